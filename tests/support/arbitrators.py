"""Arbitrators beside each other on one broker, and states fed to them without a collector."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping

from tests.support import examples
from tests.support.control_plane import ControlPlane
from tests.support.reading import read

from dynamix.cli.services import ServiceProcess
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Job, State
from dynamix.schemas.streams import ACTIONS

NODES = {"node-a": (0, 1), "node-b": (2, 3)}


def two_node_job(**changes: object) -> Job:
    """Four ranks on two nodes."""
    return examples.job(NODES, **changes)


def states_of(window: int) -> list[State]:
    """Both nodes' states of a window; the ranks' throughput wanders."""
    return [
        examples.state(node, ranks, window, throughput=tuple(800.0 + 40 * ((window * 7 + r * 13) % 23) for r in ranks))
        for node, ranks in NODES.items()
    ]


async def feed_states(plane: ControlPlane, windows: Iterable[int], every_s: float = 0.02) -> None:
    """Publish states at a steady pace, as a job does that never waits."""
    for window in windows:
        for state in states_of(window):
            await plane.bus.publish_soon(state)
        await asyncio.sleep(every_s)


async def stored_actions(bus: Bus, job: str, count: int) -> list[Action]:
    """The first actions of a job (`*`: of any), once there are so many."""
    async with asyncio.timeout(60), bus.consume(ACTIONS.name, [subjects.of("action", job)], start="all") as consumer:
        return [decode(Action, one.subject, one.payload) for one in await read(consumer, count)]


class Feeding:
    """A job that sends windows from 0 on by `feed` until `finish`."""

    def __init__(self, feed: Callable[[range], Awaitable[None]]) -> None:
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._run(feed))

    async def _run(self, feed: Callable[[range], Awaitable[None]]) -> int:
        window = 0
        while not self._stop.is_set():
            await feed(range(window, window + 1))
            window += 1
        return window

    async def finish(self) -> int:
        """Send no more; returns how many windows were sent, whole."""
        self._stop.set()
        return await self._task


class Crew:
    """The arbitrators of a control plane. Each start has a new instance name, so that heartbeats tell them apart."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._num_started = 0
        self.members: dict[str, ServiceProcess] = {}

    def start(self, environ: Mapping[str, str] | None = None) -> str:
        """Start one more; returns its instance name."""
        self._num_started += 1
        name = f"arbitrator-{self._num_started}"
        process = self._plane.another("arbitrator", {"DYNAMIX_INSTANCE": name, **(environ or {})})
        process.start()
        self.members[name] = process
        return name

    def kill(self, name: str) -> None:
        """kill -9."""
        self.members.pop(name).kill()

    def stop(self, name: str) -> None:
        """SIGSTOP."""
        os.kill(self.members[name].pid, signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """SIGCONT."""
        os.kill(self.members[name].pid, signal.SIGCONT)

    def all_alive(self) -> bool:
        """Whether all processes are running."""
        return all(process.exit_code() is None for process in self.members.values())


@contextlib.asynccontextmanager
async def crew(plane: ControlPlane) -> AsyncIterator[Crew]:
    """An empty crew; processes that are left at the end are stopped."""
    arbitrators = Crew(plane)
    try:
        yield arbitrators
    finally:
        for process in arbitrators.members.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.stop()
