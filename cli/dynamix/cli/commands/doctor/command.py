"""Check what this machine has, what is missing, what for, and how to fix it.

The exit code is 1 only when something is missing without which nothing works.
"""

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Mapping, Sequence

import msgspec

from dynamix.cli.connection import find, is_configured
from dynamix.cli.errors import explained
from dynamix.cli.jobs import check_job
from dynamix.cli.output import add_json_argument, write_result
from dynamix.cli.services import SERVICES
from dynamix.collector.observation import CollectorSettings
from dynamix.runtime.log import configure as configure_log
from dynamix.runtime.settings import SettingsError, read

from .bus import actions, bus, is_alive
from .check import CheckSection, report
from .ebpf import choice, chosen, ebpf, try_ebpf
from .machine import kernel, node, software

WIDEST = 110
EBPF = "eBPF, which the collector uses where it can"


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
    return 1 if any(not check.present and (all_fatal or check.is_fatal) for check in checks) else 0
