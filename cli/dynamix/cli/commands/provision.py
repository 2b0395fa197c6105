"""Create the broker's streams, or bring them up to date; the messages in them are kept.

  dynamix provision
  dynamix provision --purge 'dynamix.v1.report.mnist.*.*'    # only remove these messages

In a deployment this needs the key of `provision`.
"""

import argparse
import asyncio
import os

from dynamix.cli.arguments import add_json_argument, number
from dynamix.cli.connection import connected, find
from dynamix.cli.errors import MisuseError
from dynamix.cli.output import write_result
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.log import configure as configure_log
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.kinds import BY_NAME
from dynamix.schemas.subjects import ROOT

MAX_WAIT_S = 86_400.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--replicas", type=int, choices=(1, 3, 5), help="copies of each stream in a cluster (default: as it is, or 1)"
    )
    what = "remove the messages on these subjects from their stream, in place of making streams"
    parser.add_argument("--purge", metavar="SUBJECT", help=what)
    what = "wait so long for the broker (default: %(default)g)"
    parser.add_argument("--wait", type=number(0, MAX_WAIT_S), default=60.0, metavar="SECONDS", help=what)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Provision; one line per stream."""
    configure_log("warning")
    if arguments.purge is not None:
        return _purge(arguments)
    lines = asyncio.run(_provision(find(os.environ), arguments.replicas, arguments.wait))
    streams = [dict(zip(("stream", "result"), line.split(": ", 1), strict=True)) for line in lines]
    write_result({"streams": streams}, "\n".join(lines), arguments.json)
    return 0


def _purge(arguments: argparse.Namespace) -> int:
    kind = BY_NAME.get(arguments.purge.removeprefix(f"{ROOT}.").partition(".")[0])
    if not arguments.purge.startswith(f"{ROOT}.") or kind is None or kind.stream is None:
        raise MisuseError(f"no stream keeps {arguments.purge!r}: docs/subjects.md has all subjects")

    async def purge(stream: str) -> int:
        async with connected(find(os.environ), "provision", timeout_s=arguments.wait) as bus:
            return await bus.purge(stream, arguments.purge)

    num_purged = asyncio.run(purge(kind.stream.name))
    result = {"stream": kind.stream.name, "messages_removed": num_purged}
    write_result(result, f"{kind.stream.name}: {num_purged} messages removed", arguments.json)
    return 0


async def _provision(settings: BusSettings, num_replicas: int | None, timeout_s: float) -> list[str]:
    async with connected(settings, "provision", timeout_s=timeout_s) as bus:
        return await provision(bus, num_replicas=num_replicas)
