"""Watch a job while it runs: local batch sizes, times, throughput, accuracy, decisions, rewards, services.

Without a name it shows the newest job that runs. Press q to leave; the job does not notice.
"""

import argparse
import asyncio
import importlib.util
import os
import sys
import time

from dynamix.cli.board.feed import Feed
from dynamix.cli.board.snapshot import snapshot
from dynamix.cli.broker import connected
from dynamix.cli.connection import find
from dynamix.cli.errors import CommandError
from dynamix.cli.output import add_json_argument, write_json
from dynamix.runtime.log import configure
from dynamix.runtime.settings import BusSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("job", nargs="?", help="the job's id, or its name (default: the newest that runs)")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    add_json_argument(parser)


def run(namespace: argparse.Namespace) -> int:
    """Show the job; 0 when the person leaves, 1 when there is no such job or no broker."""
    configure("critical")  # the screen belongs to the view
    settings = find(os.environ)
    if namespace.json is not None:
        return asyncio.run(_json(settings, namespace.job, namespace.json))
    if importlib.util.find_spec("rich") is None:
        raise CommandError("the view needs the package rich: pip install 'dynamix-batch[cli]', or use --json -")
    once = namespace.once or not sys.stdout.isatty()
    return asyncio.run(_once(settings, namespace.job) if once else _watch(settings, namespace.job))


async def _json(settings: BusSettings, wanted: str | None, destination: str) -> int:
    async with connected(settings, "top") as bus:
        feed = Feed(bus, wanted)
        await feed.catch_up()
    write_json(snapshot(feed.board, feed.heartbeats, time.monotonic()), destination)
    return _found(feed, wanted)


async def _once(settings: BusSettings, wanted: str | None) -> int:
    from rich.console import Console  # noqa: PLC0415 - --json works without rich

    from .view.screen import current  # noqa: PLC0415 - the same

    console = Console()
    async with connected(settings, "top") as bus:
        feed = Feed(bus, wanted)
        await feed.catch_up()
    console.print(current(feed, console))
    return _found(feed, wanted)


async def _watch(settings: BusSettings, wanted: str | None) -> int:
    from rich.console import Console  # noqa: PLC0415 - --json works without rich

    from .view.screen import watch  # noqa: PLC0415 - the same

    async with connected(settings, "top") as bus:
        await watch(Feed(bus, wanted), Console())
    return 0


def _found(feed: Feed, wanted: str | None) -> int:
    if feed.board is None and wanted is not None:
        print(f"dynamix top: no job is called {wanted!r} on this broker", file=sys.stderr)
        return 1
    return 0
