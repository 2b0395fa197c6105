"""Watch a job while it runs: local batch sizes, times, throughput, accuracy, decisions, rewards, services.

Without a name it shows the newest job that runs. Press q to leave; the job does not notice.
"""

import argparse
import asyncio
import importlib.util
import os
import sys
import time

from dynamix.cli.board.board import snapshot
from dynamix.cli.board.feed import Feed
from dynamix.cli.connection import connected, find
from dynamix.cli.errors import CommandError
from dynamix.cli.jobs import check_job
from dynamix.cli.output import add_json_argument, write_json
from dynamix.runtime.log import configure as configure_log
from dynamix.runtime.settings import BusSettings


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("job", nargs="?", help="the job's id, its name or its run id (default: the newest that runs)")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show the job; 0 when the person leaves, 1 when there is no such job or no broker."""
    configure_log("critical")  # the screen belongs to the view
    if arguments.job is not None:
        check_job(arguments.job)
    settings = find(os.environ)
    if arguments.json is None and importlib.util.find_spec("rich") is None:
        raise CommandError("the view needs the package rich: pip install 'dynamix-batch[cli]', or use --json -")
    once = arguments.json is not None or arguments.once or not sys.stdout.isatty()
    asyncio.run(_show_once(settings, arguments) if once else _watch(settings, arguments.job))
    return 0


async def _show_once(settings: BusSettings, arguments: argparse.Namespace) -> None:
    async with connected(settings, "top") as bus:
        feed = Feed(bus, arguments.job)
        await feed.catch_up()
    if arguments.json is not None:
        write_json(snapshot(feed.board, feed.heartbeats, time.monotonic()), arguments.json)
    if feed.board is None and arguments.job is not None:
        raise CommandError(feed.missing)
    if arguments.json is None:
        from .view.screen import show

        show(feed)


async def _watch(settings: BusSettings, wanted: str | None) -> None:
    from .view.screen import watch

    async with connected(settings, "top") as bus:
        await watch(Feed(bus, wanted))
