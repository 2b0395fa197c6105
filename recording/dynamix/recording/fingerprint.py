"""The build and the processor that results depend on to the last bit."""

import hashlib
import importlib.metadata
import importlib.util
import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

DECIDING_PACKAGES = ("dynamix.schemas", "dynamix.collector", "dynamix.reward", "dynamix.arbitrator")
"""Packages whose code a replay runs through."""

CPU_FIELDS = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
"""The lines that tell processor families apart, on x86 and on ARM."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Build and processor of a program: where it is equal, equal input gives equal bytes."""

    dynamix: str
    code: str
    """SHA-256 over the sources of `DECIDING_PACKAGES`."""
    python: str
    numpy: str
    machine: str
    """Instruction set, for example x86_64."""
    cpu: str
    """Vendor, family and model as the kernel numbers them; empty where the kernel does not report them."""
    simd: tuple[str, ...]
    """Vector extensions that numpy found beyond its baseline; numpy chooses its kernels by them."""


def fingerprint() -> Fingerprint:
    """Fingerprint of this process."""
    simd: Any = np.show_config(mode="dicts")
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:  # not Linux: `machine` is all that is known
        lines = []
    processor = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Fingerprint(
        dynamix=importlib.metadata.version("dynamix-batch"),
        code=source_digest(DECIDING_PACKAGES),
        python=platform.python_version(),
        numpy=np.__version__,
        machine=platform.machine(),
        cpu="/".join(processor[name] for name in CPU_FIELDS if name in processor),
        simd=tuple(simd.get("SIMD Extensions", {}).get("found", ())),
    )


def differences(theirs: Fingerprint, ours: Fingerprint) -> list[str]:
    """Fields that differ, one line each; empty where equal bytes are to be expected."""
    return [
        f"{field}: {_shown(there)} there, {_shown(here)} here"
        for field in Fingerprint.__struct_fields__
        if (there := getattr(theirs, field)) != (here := getattr(ours, field))
    ]


@lru_cache(maxsize=4)
def source_digest(packages: tuple[str, ...]) -> str:
    """SHA-256 over the Python sources of some packages: names and content, in order."""
    total = hashlib.sha256()
    for package in packages:
        spec = importlib.util.find_spec(package)  # not imported: the trainer would import torch
        assert spec is not None, "our own packages are installed"
        directory = Path(str(spec.origin)).parent
        for path in sorted(directory.rglob("*.py")):
            total.update(f"{package}/{path.relative_to(directory)}\0".encode())
            total.update(path.read_bytes())
    return total.hexdigest()


def _shown(value: str | tuple[str, ...]) -> str:
    text = value if isinstance(value, str) else " ".join(value)
    return f"{text[:16]}..." if len(text) == 64 and text.isalnum() else text or "unknown"
