"""Where numbers come from: the code and the libraries that made them, without a word about the machine."""

import hashlib
import importlib.metadata
import importlib.util
import platform
from functools import lru_cache
from pathlib import Path

import numpy as np

DECIDING_PACKAGES = (
    *("dynamix.schemas", "dynamix.collector", "dynamix.reward", "dynamix.arbitrator", "dynamix.trainer"),
    *("dynamix.lab.simulator", "dynamix.lab.workloads", "dynamix.lab.experiments.episodes"),
)
"""Packages whose code an episode runs through."""


@lru_cache(maxsize=1)
def code_digest() -> str:
    """SHA-256 over the sources that an episode runs through: results of other code are never mixed with these."""
    total = hashlib.sha256()
    for package in DECIDING_PACKAGES:
        directory = _directory(package)
        for path in sorted(directory.rglob("*.py")):
            total.update(f"{package}/{path.relative_to(directory)}\0".encode())
            total.update(path.read_bytes())
    return total.hexdigest()


def _directory(package: str) -> Path:
    """Where a package's sources are, found without importing it: the trainer's would import torch."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, "our own packages are there"
    assert spec.origin is not None, "and are files"
    return Path(spec.origin).parent


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions that numbers may depend on."""
    return {
        "dynamix": importlib.metadata.version("dynamix-batch"),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "numpy": np.__version__,
    }
