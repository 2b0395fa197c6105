"""Watch a job while it runs: local batch sizes, times, throughput, accuracy, decisions, rewards, services.

Without a name it shows the newest running job. Press q to leave; the job is not affected.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import os
import sys
import time

from dynamix.cli.arguments import add_json_argument
from dynamix.cli.connection import connected, find
from dynamix.cli.errors import CommandError
from dynamix.cli.fleet import Fleet, listen, silent_jobs, stored_job
from dynamix.cli.heartbeats import Heartbeats
from dynamix.cli.jobs import NO_JOB, check_job, known_jobs, newest_job, none_called
from dynamix.cli.output import Document, document_of, write_json
from dynamix.recording.job_view import JobView
from dynamix.runtime.bus import Bus, BusError
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
    if arguments.json is None and importlib.util.find_spec("rich") is None:
        raise CommandError("the view needs the package rich: pip install 'dynamix-batch[cli]', or use --json -")
    asyncio.run(_run(arguments))
    return 0


async def _run(arguments: argparse.Namespace) -> None:
    wanted = arguments.job
    async with connected(find(os.environ), "top") as bus:
        if arguments.json is None and not arguments.once and sys.stdout.isatty():
            from .frame import watch

            await watch(Fleet(bus, wanted), wanted)
            return
        view, heartbeats, missing = await stored(bus, wanted)
    if arguments.json is not None:
        write_json(snapshot(view, heartbeats, time.monotonic()), arguments.json)
    if view is None and wanted is not None:
        raise CommandError(missing)
    if arguments.json is None:
        from rich.console import Console

        from .frame import show

        console = Console()
        console.print(show(view, heartbeats, console, missing))


async def stored(bus: Bus, wanted: str | None) -> tuple[JobView | None, Heartbeats, str]:
    """The job to show with what is stored of it now, one round of heartbeats, and why there is no job."""
    heartbeats, jobs = Heartbeats(), await known_jobs(bus)
    name = newest_job(jobs, wanted, await silent_jobs(bus, jobs, time.time_ns()))
    view = None if name is None else await stored_job(bus, name)
    with contextlib.suppress(BusError):  # the job is shown also to a user who may not hear the services
        await listen(bus, heartbeats, HEARTBEAT_WAIT_S)
    return view, heartbeats, NO_JOB if wanted is None else none_called(wanted, jobs)


def snapshot(view: JobView | None, heartbeats: Heartbeats, now_s: float) -> Document:
    """Everything that is shown, with the units in the names; `job` is `None` while there is none."""
    return {
        "job": None if view is None else _job(view),
        "services": heartbeats.document(now_s),
        "services_missing": heartbeats.missing(now_s),
        "num_not_stored": heartbeats.num_not_stored(now_s),
    }


def _job(view: JobView) -> Document:
    return {
        "name": view.name,
        "specification": document_of(view.job),
        "generation": view.generation,
        "window": None if view.window < 0 else view.window,
        "updated_ns": view.updated_ns or None,
        "local_batch_sizes": list(view.local_batch_sizes),
        "exchange": {**document_of(view.exchange), "label": view.exchange.label},
        "metrics": document_of(view.metrics),
        "ranks": [
            {
                **document_of(row.metrics),
                "node": row.node,
                "window": row.window,
                "reward": None if row.reward is None else row.reward.reward,
            }
            for _, row in sorted(view.ranks.items())
        ],
        "action": document_of(view.action, leave_out=("carry",)),
        "applied": document_of(view.applied),
        "event": document_of(view.event),
        "reward": {"formula": view.formula, "mean": view.mean_reward(), "terms": view.reward_terms()},
        "history": [
            {"generation": window.generation, "window": window.window, **document_of(window.metrics)}
            for window in view.history
            if window.metrics is not None
        ],
    }
