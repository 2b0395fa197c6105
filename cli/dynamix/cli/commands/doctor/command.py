"""Say what this machine has, what it lacks, what for, and how to mend it.

The exit code is 1 only when something is missing without which nothing works.
"""

import argparse
import asyncio
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from dynamix.cli.connection import PREFIX, find
from dynamix.cli.errors import CommandError
from dynamix.cli.output import STANDARD_OUTPUT, add_json_argument, write_json
from dynamix.cli.services import SERVICES
from dynamix.collector.settings import CollectorSettings
from dynamix.runtime.log import configure
from dynamix.runtime.settings import SettingsError, read

from .actions import actions
from .bus import bus, is_alive
from .ebpf import choice, chosen, ebpf
from .ebpf_trial import try_ebpf
from .finding import Finding, Section
from .kernel import kernel
from .software import software

NAME_WIDTH, MARKS = 14, {True: "ok     ", False: "lacking"}
GREEN, YELLOW, RED, BOLD, PLAIN = "\033[32m", "\033[33m", "\033[31m", "\033[1m", "\033[0m"
WIDEST = 110
PURPOSES = {"training": "training", "demo": "the demo", "views": "live views", "ebpf": "eBPF probes"}
ACTIONS = "Stored actions"
BUS, KERNEL, EBPF = (
    "Broker and services",
    "Kernel, as every user sees it",
    "eBPF, which the collector uses where it can",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(namespace: argparse.Namespace) -> int:
    """Check everything; 1 when something fatal is missing."""
    configure("critical")  # the findings say it
    if namespace.alive is not None:
        return 0 if asyncio.run(is_alive(find(os.environ), namespace.alive, os.environ)) else 1
    if namespace.actions is not None:
        section = Section(ACTIONS, [asyncio.run(actions(find(os.environ), namespace.actions))])
        _show([section], {}, namespace.json)
        return 0 if section.findings[0].present else 1
    settings = _collector_settings(os.environ)
    if namespace.ebpf:
        section = Section(EBPF, [*ebpf(), try_ebpf(settings.cgroup)])
        _show([section], {}, namespace.json)
        return 0 if all(finding.present for finding in section.findings) else 1
    open_to_all, programs = kernel(), ebpf()
    sections = [
        Section("Software", software()),
        Section(BUS, _bus(os.environ)),
        Section(KERNEL, open_to_all),
        Section(EBPF, [*programs, chosen(open_to_all, programs, settings.probe)]),
    ]
    _show(sections, {"probe": choice(open_to_all, programs, settings.probe)}, namespace.json)
    return 1 if any(finding.is_fatal for finding in _all(sections)) else 0


def report(sections: Sequence[Section], *, width: int, colours: bool = False) -> str:
    """The findings as lines; what is lacking is followed by how to mend it, and a verdict ends it."""
    lines: list[str] = []
    for section in sections:
        lines.append(f"{BOLD}{section.title}{PLAIN}" if colours else section.title)
        for finding in section.findings:
            lines += _lines(finding, width, colours=colours)
        lines.append("")
    return "\n".join([*lines, *textwrap.wrap(_verdict(list(_all(sections))), width)])


def _bus(environ: Mapping[str, str]) -> list[Finding]:
    configured = any(key.startswith(PREFIX) and value for key, value in environ.items())
    return asyncio.run(bus(find(environ), configured=configured))


def _collector_settings(environ: Mapping[str, str]) -> CollectorSettings:
    try:
        return read(CollectorSettings, "collector", environ)
    except SettingsError as error:
        raise CommandError(str(error)) from error


def _show(sections: Sequence[Section], also: Mapping[str, str], destination: str | None) -> None:
    if destination is not None:
        shown = [{**msgspec.structs.asdict(finding), "fatal": finding.is_fatal} for finding in _all(sections)]
        write_json({"findings": shown, **also}, destination)
    if destination != STANDARD_OUTPUT:
        width = min(WIDEST, shutil.get_terminal_size().columns)
        print(report(sections, width=width, colours=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))


def _lines(finding: Finding, width: int, *, colours: bool) -> list[str]:
    """One finding, folded; what is behind its name is indented alike on every line."""
    untold = finding.present or finding.needed_for in ("always", "ebpf")  # the section's title tells the latter
    purpose = "" if untold else f" (for {PURPOSES[finding.needed_for]})"
    mark = MARKS[finding.present]
    indent = " " * (len(mark) + NAME_WIDTH + 4)
    lines = _fold(finding.found + purpose, width, f"  {mark}  {finding.name:<{NAME_WIDTH}}", indent)
    if not finding.present:
        lines += _fold(finding.mend, width, indent + "mend: ", indent + "      ")
    if colours:
        colour = GREEN if finding.present else RED if finding.is_fatal else YELLOW
        lines[0] = lines[0].replace(mark, f"{colour}{mark}{PLAIN}", 1)
    return lines


def _fold(text: str, width: int, first: str, indent: str) -> list[str]:
    """Lines that can be copied: a path or an option is never cut."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _all(sections: Iterable[Section]) -> Iterable[Finding]:
    return (finding for section in sections for finding in section.findings)


def _verdict(findings: Sequence[Finding]) -> str:
    if fatal := [finding.name for finding in findings if finding.is_fatal]:
        return f"Nothing works without: {', '.join(fatal)}."
    lacking = {finding.needed_for for finding in findings if not finding.present}
    if not lacking:
        return "Everything is there."
    hindered = ", ".join(text for need, text in PURPOSES.items() if need in lacking)
    return f"What must be there is there; something is lacking for {hindered}."
