"""The result of one check, and of all of them as text for a terminal."""

import textwrap
from collections.abc import Sequence
from typing import Literal

import msgspec

Need = Literal["always", "training", "demo", "views", "ebpf", "secrecy", "failover"]
NAME_WIDTH, MARKS = 14, {True: "ok    ", False: "failed"}
GREEN, YELLOW, RED, BOLD, PLAIN = "\033[32m", "\033[33m", "\033[31m", "\033[1m", "\033[0m"
PURPOSES = {
    "training": "training",
    "demo": "the demo",
    "views": "live views",
    "ebpf": "eBPF probes",
    "secrecy": "secrecy",
    "failover": "failover",
}


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


def report(sections: Sequence[CheckSection], *, width: int, colours: bool = False) -> str:
    """A line for each check; a failed one is followed by how to fix it, and a verdict comes last."""
    lines: list[str] = []
    for section in sections:
        lines.append(f"{BOLD}{section.title}{PLAIN}" if colours else section.title)
        for check in section.checks:
            lines += _lines(check, width, colours=colours)
        lines.append("")
    verdict = _verdict([check for section in sections for check in section.checks])
    return "\n".join([*lines, *textwrap.wrap(verdict, width)])


def _lines(check: DoctorCheck, width: int, *, colours: bool) -> list[str]:
    """One check, folded; what follows its name is indented alike on every line."""
    is_implied = check.present or check.needed_for in ("always", "ebpf")  # the section's title says the latter
    purpose = "" if is_implied else f" (for {PURPOSES[check.needed_for]})"
    mark = MARKS[check.present]
    indent = " " * (len(mark) + NAME_WIDTH + 4)
    lines = _fold(check.found + purpose, width, f"  {mark}  {check.name:<{NAME_WIDTH}}", indent)
    if not check.present:
        lines += _fold(check.fix, width, indent + "fix: ", indent + "     ")
    if colours:
        colour = GREEN if check.present else RED if check.is_fatal else YELLOW
        lines[0] = lines[0].replace(mark, f"{colour}{mark}{PLAIN}", 1)
    return lines


def _fold(text: str, width: int, first: str, indent: str) -> list[str]:
    """Lines that can be copied: a path or an option is never cut."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _verdict(checks: Sequence[DoctorCheck]) -> str:
    if fatal := [check.name for check in checks if check.is_fatal]:
        return f"Nothing works without: {', '.join(fatal)}."
    needs = {check.needed_for for check in checks if not check.present}
    if not needs:
        return "Everything is there."
    purposes = ", ".join(text for need, text in PURPOSES.items() if need in needs)
    return f"Everything required is there; checks failed for {purposes}."
