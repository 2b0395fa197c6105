"""The result of one check."""

from typing import Literal

import msgspec

Need = Literal["always", "training", "demo", "views", "ebpf"]


class DoctorCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One requirement, and whether it is met."""

    name: str
    present: bool
    needed_for: Need
    """`always` makes the doctor's exit code 1 when the requirement is not met."""
    found: str
    """What is there, or what is wrong."""
    fix: str = ""
    """How to meet the requirement; empty when it is met."""

    @property
    def is_fatal(self) -> bool:
        """Whether nothing works without it."""
        return not self.present and self.needed_for == "always"


class CheckSection(msgspec.Struct, frozen=True):
    """The checks of one subject."""

    title: str
    checks: list[DoctorCheck]


def passed(name: str, needed_for: Need, found: str) -> DoctorCheck:
    """A requirement that is met."""
    return DoctorCheck(name=name, present=True, needed_for=needed_for, found=found)


def failed(name: str, needed_for: Need, found: str, fix: str) -> DoctorCheck:
    """A requirement that is not met, and how to meet it."""
    return DoctorCheck(name=name, present=False, needed_for=needed_for, found=found, fix=fix)
