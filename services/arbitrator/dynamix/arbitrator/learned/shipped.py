"""The learned policies that come with the package: files in `shipped_policies/`, version 1 of their names."""

from importlib import resources
from pathlib import Path

from dynamix.schemas.subjects import check_token

from .policy_file import SUFFIX

SHIPPED_POLICIES = ("ppo", "ppo-paper")
"""The learned policies. NAME.safetensors is what a job of that name gets, NAME-SEED.safetensors the same learning begun
with another seed: the policy seeds of a comparison."""

SHIPPED_VERSION = 1
"""Versions on the bus are higher, so that a name and a number never mean two policies."""


def shipped_directory() -> Path:
    """The folder of the files."""
    return Path(str(resources.files("dynamix.arbitrator.learned"))) / "shipped_policies"


def shipped_names() -> list[str]:
    """The names of the shipped policies, sorted."""
    return sorted(path.stem for path in shipped_directory().glob(f"*{SUFFIX}"))


def shipped_policy(name: str) -> bytes | None:
    """The content of a shipped file, `None` when none has this name."""
    path = shipped_directory() / (check_token(name) + SUFFIX)
    return path.read_bytes() if path.is_file() else None
