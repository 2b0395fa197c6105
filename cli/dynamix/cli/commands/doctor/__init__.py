"""Check what this machine has, what is missing, what for, and how to fix it.

Exit code 1 means that nothing works without what is missing.
"""

import argparse
import asyncio
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from dynamix.cli.arguments import add_json_argument
from dynamix.cli.connection import find, is_configured
from dynamix.cli.errors import explained
from dynamix.cli.jobs import check_job
from dynamix.cli.output import write_result
from dynamix.cli.services import SERVICES
from dynamix.runtime.log import configure as configure_log
from dynamix.runtime.settings import SettingsError, read

WIDEST = 110
EBPF = "eBPF, which the collector uses where it can"


Need = Literal["always", "training", "demo", "views", "ebpf", "secrecy", "failover"]
NAME_WIDTH = 14
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
    permitted: bool = True
    """Whether this user may check it."""

    @property
    def is_missing(self) -> bool:
        """Whether the requirement is known not to be met."""
        return self.permitted and not self.present

    @property
    def is_fatal(self) -> bool:
        """Whether nothing works without it."""
        return self.is_missing and self.needed_for == "always"


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


def forbidden(name: str, needed_for: Need, fix: str) -> DoctorCheck:
    """A requirement that this user may not check, and how to check it."""
    found = "not permitted with this key"
    return DoctorCheck(name=name, present=False, needed_for=needed_for, found=found, fix=fix, permitted=False)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_json_argument(parser)
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--alive",
        metavar="SERVICE",
        choices=(*SERVICES, "learner"),
        help="check nothing but the heartbeat of this machine's SERVICE, for health checks: exit 0 or 1",
    )
    only.add_argument(
        "--ebpf",
        action="store_true",
        help="check nothing but eBPF, and try it: load the probe, attach it, count a connection, detach: exit 0 or 1",
    )
    only.add_argument(
        "--actions",
        metavar="JOB",
        help="check nothing but the stored actions of JOB: hashes, chain, and what its trainer applied: exit 0 or 1",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check everything, or what one option names; 1 when something fatal, or anything named, is missing."""
    from dynamix.collector.observation import CollectorSettings

    from .bus import actions, bus, is_alive
    from .machine import choice, chosen, ebpf, kernel, node, software, try_ebpf

    configure_log("critical")  # the checks say what is wrong
    if arguments.alive is not None:
        return 0 if asyncio.run(is_alive(find(os.environ), arguments.alive, os.environ)) else 1
    if arguments.actions is not None:
        checks = [asyncio.run(actions(find(os.environ), check_job(arguments.actions)))]
        return _show([CheckSection("Stored actions", checks)], {}, arguments.json, all_fatal=True)
    with explained(SettingsError):
        settings = read(CollectorSettings, "collector", os.environ)
        here = node(os.environ)
    if arguments.ebpf:
        return _show([CheckSection(EBPF, [*ebpf(), try_ebpf(settings.cgroup)])], {}, arguments.json, all_fatal=True)
    open_to_all, programs = kernel(), ebpf()
    sections = [
        CheckSection("Software", software()),
        CheckSection(
            "Broker and services",
            [here, *asyncio.run(bus(find(os.environ), configured=is_configured(os.environ)))],
        ),
        CheckSection("Kernel, as every user sees it", open_to_all),
        CheckSection(EBPF, [*programs, chosen(open_to_all, programs, settings.probe)]),
    ]
    return _show(sections, {"probe": choice(open_to_all, programs, settings.probe)}, arguments.json)


def _show(
    sections: Sequence[CheckSection], also: Mapping[str, str], destination: str | None, *, all_fatal: bool = False
) -> int:
    """Print the checks and write them as JSON; the exit code."""
    checks = [check for section in sections for check in section.checks]
    found = [{**msgspec.structs.asdict(check), "fatal": check.is_fatal} for check in checks]
    width = min(WIDEST, shutil.get_terminal_size().columns)
    text = report(sections, width=width, colours=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    write_result({"findings": found, **also}, text, destination)
    return 1 if any((not check.present and all_fatal) or check.is_fatal for check in checks) else 0


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
    is_implied = not check.is_missing or check.needed_for in ("always", "ebpf")  # the section's title has the latter
    purpose = "" if is_implied else f" (for {PURPOSES[check.needed_for]})"
    mark = "ok    " if check.present else "failed" if check.permitted else "-     "
    indent = " " * (len(mark) + NAME_WIDTH + 4)
    lines = _fold(check.found + purpose, width, f"  {mark}  {check.name:<{NAME_WIDTH}}", indent)
    if not check.present:
        lines += _fold(check.fix, width, indent + "fix: ", indent + "     ")
    if colours and check.permitted:
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
    needs = {check.needed_for for check in checks if check.is_missing}
    if not needs:
        return "Everything is there." if all(check.permitted for check in checks) else "Nothing is known to be missing."
    purposes = ", ".join(text for need, text in PURPOSES.items() if need in needs)
    return f"Everything required is there; checks failed for {purposes}."
