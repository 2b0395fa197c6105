"""Check what this machine has, what is missing, what for, and how to fix it.

Exit code 1 means that nothing works without what is missing.
"""

import argparse
import asyncio
import os
import shutil
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
PURPOSES = {
    "training": "training",
    "demo": "the demo",
    "views": "live views",
    "ebpf": "eBPF probes",
    "secrecy": "secrecy",
    "failover": "failover",
}


class DoctorCheck(msgspec.Struct, frozen=True):
    """One requirement, and whether it is met."""

    name: str
    needed_for: Need
    """`always` makes the doctor's exit code 1 when the requirement is not met."""
    found: str
    """Description of what was found."""
    fix: str = ""
    """Fix; empty when the requirement is met."""
    permitted: bool = True
    """Whether this user may check it."""

    @property
    def present(self) -> bool:
        """Whether the requirement is met."""
        return not self.fix

    @property
    def is_missing(self) -> bool:
        """Whether the requirement is known not to be met."""
        return self.permitted and not self.present

    @property
    def is_fatal(self) -> bool:
        """Whether nothing works without it."""
        return self.is_missing and self.needed_for == "always"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_json_argument(parser)
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--alive",
        metavar="SERVICE",
        choices=(*SERVICES, "learner"),
        help="check only the heartbeat of this machine's SERVICE, for health checks: exit 0 or 1",
    )
    only.add_argument(
        "--ebpf",
        action="store_true",
        help="check only eBPF, and try it: load the probe, attach it, count a connection, detach: exit 0 or 1",
    )
    only.add_argument(
        "--actions",
        metavar="JOB",
        help="check only the stored actions of JOB: hashes, chain, and what its trainer applied: exit 0 or 1",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check everything, or what one option names; 1 when something fatal, or anything named, is missing."""
    from dynamix.collector.observation import CollectorSettings

    from . import checks, ebpf

    configure_log("critical")  # the checks show what is wrong
    if arguments.alive is not None:
        return 0 if asyncio.run(checks.is_alive(find(os.environ), arguments.alive, os.environ)) else 1
    if arguments.actions is not None:
        found = asyncio.run(checks.actions(find(os.environ), check_job(arguments.actions)))
        return _show({"Stored actions": [found]}, {}, arguments.json, all_fatal=True)
    with explained(SettingsError):
        settings = read(CollectorSettings, "collector", os.environ)
        here = checks.node(os.environ)
    if arguments.ebpf:
        tried = [*ebpf.programs(), ebpf.try_ebpf(settings.cgroup)]
        return _show({EBPF: tried}, {}, arguments.json, all_fatal=True)
    kernel, programs = checks.kernel(), ebpf.programs()
    broker = asyncio.run(checks.bus(find(os.environ), configured=is_configured(os.environ)))
    probe, chosen = ebpf.chosen(kernel, programs, settings.probe)
    sections = {
        "Software": checks.software(),
        "Broker and services": [here, *broker],
        "Kernel, as every user sees it": kernel,
        EBPF: [*programs, chosen],
    }
    return _show(sections, {"probe": probe}, arguments.json)


def _show(
    sections: Mapping[str, Sequence[DoctorCheck]],
    also: Mapping[str, str],
    destination: str | None,
    *,
    all_fatal: bool = False,
) -> int:
    """Print the checks and write them as JSON; the exit code."""
    checks = [check for section in sections.values() for check in section]
    found = [{**msgspec.structs.asdict(check), "present": check.present, "fatal": check.is_fatal} for check in checks]
    text = report(sections, width=min(WIDEST, shutil.get_terminal_size().columns))
    write_result({"findings": found, **also}, text, destination)
    return 1 if any((not check.present and all_fatal) or check.is_fatal for check in checks) else 0


def report(sections: Mapping[str, Sequence[DoctorCheck]], *, width: int) -> str:
    """A line for each check; a failed one is followed by how to fix it, and a verdict comes last.

    Lines are folded to the width, but a path or an option is never cut, so that it can be copied.
    """
    lines: list[str] = []
    indent = " " * 26
    for title, checks in sections.items():
        lines.append(title)
        for check in checks:
            mark = "ok" if check.present else "failed" if check.permitted else "-"
            purpose = PURPOSES.get(check.needed_for, "") if check.is_missing else ""
            text = f"{check.found} (for {purpose})" if purpose else check.found
            folded = [(text, f"  {mark:<8}{check.name:<14}  ")]
            folded += [(f"fix: {check.fix}", indent)] if check.fix else []
            wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
            wrapper.subsequent_indent = indent
            for words, wrapper.initial_indent in folded:
                lines += wrapper.wrap(words)
        lines.append("")
    return "\n".join([*lines, *textwrap.wrap(_verdict([one for each in sections.values() for one in each]), width)])


def _verdict(checks: Sequence[DoctorCheck]) -> str:
    if fatal := [check.name for check in checks if check.is_fatal]:
        return f"Nothing works without: {', '.join(fatal)}."
    needs = {check.needed_for for check in checks if check.is_missing}
    if not needs:
        return "Everything is there." if all(check.permitted for check in checks) else "Nothing is known to be missing."
    purposes = ", ".join(text for need, text in PURPOSES.items() if need in needs)
    return f"Everything required is there; checks failed for {purposes}."
