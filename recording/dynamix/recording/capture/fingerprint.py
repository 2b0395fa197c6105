"""The build and the processor that results depend on to the last bit."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dynamix.recording.provenance import code_digest

CPU_INFO = Path("/proc/cpuinfo")
_IDENTITY = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
"""The lines that tell processor families apart, on x86 and on ARM."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Where it is the same, the same input gives the same bytes."""

    dynamix: str
    code: str
    """SHA-256 over the sources that decide (`dynamix.recording.provenance`)."""
    python: str
    numpy: str
    machine: str
    """Instruction set, for example x86_64."""
    cpu: str
    """Vendor, family and model as the kernel numbers them; empty where it does not say."""
    simd: tuple[str, ...]
    """What numpy found beyond its baseline: its kernels differ by it."""


def fingerprint() -> Fingerprint:
    """That of this process."""
    return Fingerprint(
        dynamix=importlib.metadata.version("dynamix-batch"),
        code=code_digest(),
        python=platform.python_version(),
        numpy=np.__version__,
        machine=platform.machine(),
        cpu=_cpu(CPU_INFO),
        simd=_simd(),
    )


def differences(theirs: Fingerprint, ours: Fingerprint) -> list[str]:
    """What differs, a line each; empty where byte-identical results are to be expected."""
    return [
        f"{field}: {_shown(there)} there, {_shown(here)} here"
        for field in Fingerprint.__struct_fields__
        if (there := getattr(theirs, field)) != (here := getattr(ours, field))
    ]


def _shown(value: str | tuple[str, ...]) -> str:
    text = value if isinstance(value, str) else " ".join(value)
    return f"{text[:16]}..." if len(text) == 64 and text.isalnum() else text or "unknown"


def _cpu(path: Path) -> str:
    try:
        first = path.read_text().partition("\n\n")[0]
    except OSError:  # not Linux: `machine` says what can be said
        return ""
    found = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    values = {name.strip(): value.strip() for name, value in found.items()}
    return "/".join(values[name] for name in _IDENTITY if name in values)


def _simd() -> tuple[str, ...]:
    shown: Any = np.show_config(mode="dicts")
    return tuple(shown.get("SIMD Extensions", {}).get("found", ()))
