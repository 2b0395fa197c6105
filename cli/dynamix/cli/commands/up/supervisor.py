"""Keeps child processes running: notices an end at once, starts again after a wait that grows, stops all in order."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import NamedTuple

from dynamix.cli.services import ServiceProcess
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.runtime.service import EXIT_USAGE

MIN_WAIT_S = 0.5
MAX_WAIT_S = 10.0
STEADY_AFTER_S = 30.0
"""A child that ran this long has recovered: its next restart waits the least again."""


class Child(NamedTuple):
    """A process that can be started again after its end."""

    name: str
    pid: Callable[[], int]
    """The running process's id."""
    start: Callable[[], Awaitable[None]]
    """Start it, or start it again."""
    stop: Callable[[], Awaitable[None]]
    """Ask it to end, and wait until it has."""
    exit_code: Callable[[], int | None] = lambda: None
    """How it ended; `None` where any end is followed by a restart."""


class ChildSettingsError(Exception):
    """A child refused its settings: it would do so after every restart."""


def broker(server: EmbeddedServer, restarted: Callable[[], None] | None = None) -> Child:
    """The embedded nats-server; a restart keeps its port, password and streams, so that clients come back alone.

    `restarted` is called after each.
    """

    async def start() -> None:
        await server.restart()
        if restarted is not None:
            restarted()

    return Child("broker", lambda: server.pid, start, server.stop)


def service(process: ServiceProcess) -> Child:
    """One of our services; the event loop goes on while it drains."""

    async def start() -> None:
        await asyncio.to_thread(process.stop)  # takes leave of the one that ended
        process.start()

    return Child(process.name, lambda: process.pid, start, lambda: asyncio.to_thread(process.stop), process.exit_code)


@contextlib.asynccontextmanager
async def kept(
    children: Iterable[Child],
    report: Callable[[str, str], None],
    stop: asyncio.Event,
    *,
    min_wait_s: float = MIN_WAIT_S,
) -> AsyncIterator[asyncio.Event]:
    """Keep started children running until the context ends, or its event is set, then stop them.

    `report` is told by name of every end and start; `stop` is set if the keeping fails, and the context then raises.

    Raises:
        ChildSettingsError: when a child refused its settings.
    """
    stopping = asyncio.Event()
    tasks = [
        asyncio.create_task(_keep(child, report, stopping, min_wait_s), name=f"keep {child.name}") for child in children
    ]
    for task in tasks:
        task.add_done_callback(lambda _: stop.set())
    try:
        yield stopping
    finally:
        stopping.set()
        for failure in await asyncio.gather(*tasks, return_exceptions=True):  # after all are stopped
            if failure is not None:
                raise failure


async def _keep(child: Child, report: Callable[[str, str], None], stopping: asyncio.Event, min_wait_s: float) -> None:
    """Start a child again whenever it ends, until `stopping`."""
    wait_s, time_s = min_wait_s, asyncio.get_running_loop().time
    try:
        while not stopping.is_set():
            begin_s = time_s()
            await _end_or_stop(child.pid(), stopping)
            lived_s = time_s() - begin_s
            if child.exit_code() == EXIT_USAGE:
                raise ChildSettingsError(f"{child.name} cannot use its settings, and said why: correct them")
            wait_s = min_wait_s if lived_s >= STEADY_AFTER_S else wait_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await stopping.wait()
            if not stopping.is_set():
                report(child.name, f"ended after {lived_s:.1f} s; starting it again")
                try:
                    await child.start()
                except (OSError, RuntimeError) as error:
                    report(child.name, f"does not start: {error}")
            wait_s = min(2 * wait_s, MAX_WAIT_S)
    finally:
        await child.stop()


async def _end_or_stop(pid: int, stopping: asyncio.Event) -> None:
    waits = (asyncio.ensure_future(exited(pid)), asyncio.ensure_future(stopping.wait()))
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def exited(pid: int) -> None:
    """Return when a process has ended. The kernel says so: nothing is polled."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
