"""Files of learned policies: which come with the package, and the policy in one."""

import hashlib
from functools import lru_cache
from pathlib import Path

from dynamix.arbitrator.learned.policy_file import SUFFIX
from dynamix.arbitrator.learned.shipped import SHIPPED_POLICIES, shipped_directory


def shipped_files(name: str, directory: Path | None = None) -> list[Path]:
    """The shipped files of a learned policy, one per policy seed; a file belongs to the longest name that it bears."""
    found = sorted((directory or shipped_directory()).glob(f"{name}*{SUFFIX}"))
    return [path for path in found if _owner(path.stem) == name]


@lru_cache(maxsize=256)
def file_digest(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        ValueError: when it cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read the policy file {path}: {error.strerror}") from error


def _owner(stem: str) -> str | None:
    owners = [name for name in SHIPPED_POLICIES if stem == name or stem.startswith(f"{name}-")]
    return max(owners, key=len, default=None)
