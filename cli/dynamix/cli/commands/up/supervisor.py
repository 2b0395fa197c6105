"""Keeps child processes running: notices an end at once, starts again after a wait that grows, stops all in order."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import NamedTuple

from dynamix.cli.services import ServiceProcess
from dynamix.runtime.embedded import EmbeddedServer

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


def broker(server: EmbeddedServer) -> Child:
    """The embedded nats-server; a restart keeps its port, password and streams, so that clients come back alone."""
    return Child("broker", lambda: server.pid, server.restart, server.stop)


def service(process: ServiceProcess) -> Child:
    """One of our services; the event loop goes on while it drains."""

    async def start() -> None:
        await asyncio.to_thread(process.stop)  # takes leave of the one that ended
        process.start()

    return Child(process.name, lambda: process.pid, start, lambda: asyncio.to_thread(process.stop))


class Supervisor:
    """Runs children until it is stopped.

    Args:
        report: called at every end and start with the child's name and a line of text.
        min_wait_s: the shortest wait before a restart.
    """

    def __init__(self, report: Callable[[str, str], None], *, min_wait_s: float = MIN_WAIT_S) -> None:
        self._report = report
        self._min_wait_s = min_wait_s
        self._stopping = asyncio.Event()
        self.num_restarts: dict[str, int] = {}

    def stop(self) -> None:
        """Let `keep` stop its child and return."""
        self._stopping.set()

    async def keep(self, child: Child) -> None:
        """Run a child that is already started: start it again whenever it ends, until `stop`."""
        wait_s = self._min_wait_s
        try:
            while not self._stopping.is_set():
                begin = asyncio.get_running_loop().time()
                await self._end_or_stop(child.pid())
                lived_s = asyncio.get_running_loop().time() - begin
                wait_s = self._min_wait_s if lived_s >= STEADY_AFTER_S else wait_s
                if not await self._stopped_within(wait_s):
                    await self._again(child, lived_s)
                wait_s = min(2 * wait_s, MAX_WAIT_S)
        finally:
            await child.stop()

    async def _again(self, child: Child, lived_s: float) -> None:
        self.num_restarts[child.name] = self.num_restarts.get(child.name, 0) + 1
        self._report(child.name, f"ended after {lived_s:.1f} s; starting it again")
        try:
            await child.start()
        except (OSError, RuntimeError) as error:
            self._report(child.name, f"does not start: {error}")

    async def _end_or_stop(self, pid: int) -> None:
        waits = (asyncio.ensure_future(exited(pid)), asyncio.ensure_future(self._stopping.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()


@contextlib.asynccontextmanager
async def kept(
    children: Iterable[Child],
    report: Callable[[str, str], None],
    stop: asyncio.Event,
    *,
    min_wait_s: float = MIN_WAIT_S,
) -> AsyncIterator[Supervisor]:
    """Keep started children running for as long as the context lasts, then stop them; sets `stop` if that fails."""
    supervisor = Supervisor(report, min_wait_s=min_wait_s)
    tasks = [asyncio.create_task(supervisor.keep(child), name=f"keep {child.name}") for child in children]
    for task in tasks:
        task.add_done_callback(lambda _: stop.set())
    try:
        yield supervisor
    finally:
        supervisor.stop()
        await asyncio.gather(*tasks)


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
