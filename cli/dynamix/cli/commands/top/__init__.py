"""Watch a job while it runs: local batch sizes, times, throughput, accuracy, decisions, rewards, services.

Without a name it shows the newest running job. Press q to leave; the job is not affected.
"""

import argparse
import asyncio
import os
import sys
import time

from dynamix.cli.arguments import add_json_argument
from dynamix.cli.connection import connected, find
from dynamix.cli.documents import alarms_of, job_document, window_document
from dynamix.cli.errors import CommandError
from dynamix.cli.fleet import Fleet
from dynamix.cli.jobs import NO_JOB, check_job, known_jobs, none_called
from dynamix.cli.output import write_json
from dynamix.runtime.log import configure as configure_log

HEARTBEAT_WAIT_S = 1.5
"""A service beats every second."""


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
    asyncio.run(_run(arguments.job, arguments.json, once=arguments.once or not sys.stdout.isatty()))
    return 0


async def _run(wanted: str | None, json: str | None, *, once: bool) -> None:
    async with connected(find(os.environ), "top") as bus:
        fleet = Fleet(bus, wanted)
        if json is None and not once:
            from .frame import watch

            await watch(fleet, wanted)
            return
        async with fleet.following():  # what is stored now, after one round of heartbeats
            await fleet.known.wait()
            name = fleet.newest(time.time_ns())
            view = None if name is None else await fleet.open(name)
            await asyncio.sleep(HEARTBEAT_WAIT_S)
        missing = NO_JOB if wanted is None else none_called(wanted, await known_jobs(bus))
    now_ns, now_s = time.time_ns(), time.monotonic()
    views = [] if view is None else [view]
    document = {
        "job": None if view is None else job_document(view, now_ns),
        "windows": [window_document(window) for view in views for window in view.history],
        "services": fleet.heartbeats.document(now_s),
        "services_missing": fleet.heartbeats.missing(now_s),
        "alarms": alarms_of(views, fleet.heartbeats, now_ns=now_ns, now_s=now_s),
    }
    write_json(document, json)
    if view is None and wanted is not None:
        raise CommandError(missing)
    if json is None:
        from rich.console import Console

        from .frame import frame

        console = Console()
        console.print(frame(view, fleet.heartbeats, console, missing=missing, now_ns=now_ns, now_s=now_s))
