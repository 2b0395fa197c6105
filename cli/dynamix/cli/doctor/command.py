"""Say what this machine has, what it lacks, what for, and how to mend it.

The exit code is 1 only when something is missing without which nothing works.
"""

import argparse
import asyncio
import os
import textwrap
from collections.abc import Sequence

import msgspec

from dynamix.cli.connection import PREFIX, find
from dynamix.cli.output import STANDARD_OUTPUT, add_json_argument, write_json
from dynamix.cli.services import SERVICES
from dynamix.runtime.log import configure

from .bus import bus, is_alive
from .finding import Finding
from .kernel import kernel
from .software import software

NAME_WIDTH, MARKS = 15, {True: "ok     ", False: "lacking"}
FOLD_AT = 100
PURPOSES = {"training": "training", "demo": "the demo", "views": "live views", "ebpf": "eBPF probes"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_json_argument(parser)
    parser.add_argument(
        "--alive",
        metavar="SERVICE",
        choices=(*SERVICES, "learner"),
        help="check nothing but the heartbeat of this machine's SERVICE, for health checks: exit 0 or 1",
    )


def run(namespace: argparse.Namespace) -> int:
    """Check everything; 1 when something fatal is missing."""
    configure("critical")  # the findings say it
    settings = find(os.environ)
    if namespace.alive is not None:
        return 0 if asyncio.run(is_alive(settings, namespace.alive, os.environ)) else 1
    configured = any(key.startswith(PREFIX) and value for key, value in os.environ.items())
    findings = [*software(), *asyncio.run(bus(settings, configured=configured)), *kernel()]
    if namespace.json is not None:
        shown = [{**msgspec.structs.asdict(finding), "fatal": finding.is_fatal} for finding in findings]
        write_json({"findings": shown}, namespace.json)
    if namespace.json != STANDARD_OUTPUT:
        print(report(findings))
    return 1 if any(finding.is_fatal for finding in findings) else 0


def report(findings: Sequence[Finding]) -> str:
    """The findings as lines; what is lacking is followed by how to mend it, and a verdict ends it."""
    lines: list[str] = []
    for finding in findings:
        purpose = "" if finding.present or finding.needed_for == "always" else f" (for {PURPOSES[finding.needed_for]})"
        head = f"{MARKS[finding.present]}  {finding.name:<{NAME_WIDTH}}"
        lines += textwrap.wrap(head + finding.found + purpose, FOLD_AT, subsequent_indent=" " * len(head))
        if not finding.present:
            lines += textwrap.wrap(
                "mend: " + finding.mend,
                FOLD_AT,
                initial_indent=" " * len(head),
                subsequent_indent=" " * (len(head) + 6),
            )
    return "\n".join([*lines, "", _verdict(findings)])


def _verdict(findings: Sequence[Finding]) -> str:
    if fatal := [finding.name for finding in findings if finding.is_fatal]:
        return f"Nothing works without: {', '.join(fatal)}."
    lacking = {finding.needed_for for finding in findings if not finding.present}
    if not lacking:
        return "Everything is there."
    hindered = ", ".join(text for need, text in PURPOSES.items() if need in lacking)
    return f"What must be there is there; something is lacking for {hindered}."
