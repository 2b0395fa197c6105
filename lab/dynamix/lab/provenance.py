"""Where numbers come from: the code and the libraries that made them, without a word about the machine."""

import hashlib
import importlib.metadata
import platform
from functools import lru_cache
from importlib import resources

import numpy as np

DECIDING_PACKAGES = ("dynamix.schemas", "dynamix.collector", "dynamix.reward", "dynamix.arbitrator", "dynamix.trainer")
"""Packages whose code an episode runs through; `dynamix.lab.episode` comes on top."""


@lru_cache(maxsize=1)
def code_digest() -> str:
    """SHA-256 over the sources that an episode runs through: results of other code are never mixed with these."""
    total = hashlib.sha256()
    for package in DECIDING_PACKAGES:
        root = resources.files(package)
        with resources.as_file(root) as directory:
            for path in sorted(directory.rglob("*.py")):
                total.update(f"{package}/{path.relative_to(directory)}\0".encode())
                total.update(path.read_bytes())
    total.update(resources.files("dynamix.lab").joinpath("episode.py").read_bytes())
    return total.hexdigest()


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions that numbers may depend on."""
    return {
        "dynamix": importlib.metadata.version("dynamix-batch"),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "numpy": np.__version__,
    }
