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
from dynamix.cli.output import Document, write_result
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.log import configure as configure_log
from dynamix.schemas.subjects import BY_NAME, ROOT


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--replicas", type=int, choices=(1, 3, 5), help="copies of each stream in a cluster (default: unchanged, or 1)"
    )
    what = "only remove the messages on these subjects from their stream"
    parser.add_argument("--purge", metavar="SUBJECT", help=what)
    what = "seconds to wait for the broker (default: %(default)g)"
    parser.add_argument("--wait", type=number(0, 86_400), default=60.0, metavar="SECONDS", help=what)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Provision, a line per stream; or purge."""
    configure_log("warning")
    kind = None
    if arguments.purge is not None:
        kind = BY_NAME.get(arguments.purge.removeprefix(f"{ROOT}.").partition(".")[0])
        if not arguments.purge.startswith(f"{ROOT}.") or kind is None or kind.stream is None:
            raise MisuseError(f"no stream keeps {arguments.purge!r}: docs/subjects.md has all subjects")

    async def act() -> tuple[Document, str]:
        async with connected(find(os.environ), "provision", timeout_s=arguments.wait) as bus:
            if kind is not None and kind.stream is not None:
                removed = await bus.purge(kind.stream.name, arguments.purge)
                result: Document = {"stream": kind.stream.name, "messages_removed": removed}
                return result, f"{kind.stream.name}: {removed} messages removed"
            lines = await provision(bus, num_replicas=arguments.replicas)
            streams = [dict(zip(("stream", "result"), line.split(": ", 1), strict=True)) for line in lines]
            return {"streams": streams}, "\n".join(lines)

    write_result(*asyncio.run(act()), arguments.json)
    return 0
