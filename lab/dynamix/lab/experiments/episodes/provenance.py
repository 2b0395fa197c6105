"""The code and the libraries that the numbers of an episode depend on, without a word about the machine."""

import importlib.metadata
import platform
from functools import lru_cache

import numpy as np

from dynamix.recording.capture.fingerprint import DECIDING_PACKAGES, source_digest

EPISODE_PACKAGES = (
    *DECIDING_PACKAGES,
    *("dynamix.trainer", "dynamix.lab.simulator", "dynamix.lab.workloads", "dynamix.lab.experiments.episodes"),
)
"""Packages whose code an episode runs through."""


def code_digest() -> str:
    """SHA-256 over the sources that an episode runs through; results with different digests are never mixed."""
    return source_digest(EPISODE_PACKAGES)


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions that numbers may depend on."""
    return {
        "dynamix": importlib.metadata.version("dynamix-batch"),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "numpy": np.__version__,
    }
