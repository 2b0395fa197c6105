"""What a check found."""

from typing import Literal

import msgspec

Need = Literal["always", "training", "demo", "views", "ebpf"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is there or is not."""

    name: str
    present: bool
    needed_for: Need
    """`always` makes the doctor's exit code 1 when it is missing."""
    found: str
    """What is there, or what is wrong."""
    mend: str = ""
    """How to get it; only where it is missing."""

    @property
    def is_fatal(self) -> bool:
        """Whether nothing works without it."""
        return not self.present and self.needed_for == "always"


class Section(msgspec.Struct, frozen=True):
    """What was found of one matter."""

    title: str
    findings: list[Finding]


def there(name: str, needed_for: Need, found: str) -> Finding:
    """A thing that is there."""
    return Finding(name=name, present=True, needed_for=needed_for, found=found)


def lacking(name: str, needed_for: Need, found: str, mend: str) -> Finding:
    """A thing that is not there, and how to get it."""
    return Finding(name=name, present=False, needed_for=needed_for, found=found, mend=mend)
