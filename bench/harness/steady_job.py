"""A job that reports at a steady pace while the real services decide: how long does each window wait for its action?"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from bench.harness.command import BenchmarkError
from bench.messages.load import job_of, node_window

from dynamix.cli.services import SERVICES, ServiceProcess, bus_environment, wait_until_ready
from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action
from dynamix.schemas.streams import ACTIONS

EVERY_S = 0.2
"""Between two reports of the job."""
NODE = "node-0"
JOB = "steady-0a1b2c3d"
NUM_RANKS = 4
POLICY = "rule"


class SteadyJobError(BenchmarkError):
    """A service ended, or no decision came back; the text says which."""


class SteadyJob:
    """One node of four ranks, whose reports wait for nothing; and what a trainer sees of the decisions.

    Attributes:
        reported_at: when each window was reported, by the loop's clock.
        decided_at: when the reader of ACTIONS had each window's action.
        actions: as they were read, in order.
    """

    def __init__(self, bus: Bus, *, reader: Bus | None = None, name: str = JOB) -> None:
        """Report on `bus`, and read actions there or, where its user may not read ACTIONS, on `reader`."""
        self.job = job_of(name, NUM_RANKS, POLICY)
        assert [node.node for node in self.job.nodes] == [NODE], "the services run for one node"
        self.reported_at: list[float] = []
        self.decided_at: dict[int, float] = {}
        self.actions: list[Action] = []
        self._bus = bus
        self._reader = reader or bus
        self._measured = node_window(self.job, self.job.nodes[0], np.random.default_rng(0))
        self._unacknowledged: set[asyncio.Future[int]] = set()
        self._news = asyncio.Condition()
        self._loop = asyncio.get_running_loop()
        self._reporting = asyncio.Event()
        self._reporting.set()

    async def report(self) -> None:
        """Report windows until cancelled, but for pauses."""
        while True:
            await self._reporting.wait()
            window = len(self.reported_at)
            self.reported_at.append(self._loop.time())
            future = await self._bus.publish_soon(self._measured.at(window).report)
            self._unacknowledged.add(future)
            future.add_done_callback(self._unacknowledged.discard)
            await asyncio.sleep(EVERY_S)

    async def follow(self) -> None:
        """Read actions until cancelled."""
        own = subjects.of("action", self.job.job)
        async with self._reader.consume(ACTIONS.name, [own], start="all") as consumer:
            async for batch in consumer:
                async with self._news:
                    for message in batch:
                        action = decode(Action, message.subject, message.payload)
                        self.actions.append(action)
                        self.decided_at.setdefault(action.window, self._loop.time())
                    self._news.notify_all()

    async def until_decided(self, window: int, timeout_s: float) -> None:
        """Wait for a window's action. Raises SteadyJobError when it does not come in time."""
        try:
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait_for(lambda: window in self.decided_at)
        except TimeoutError:
            raise SteadyJobError(f"window {window} was not decided in {timeout_s:g} s") from None

    @contextlib.asynccontextmanager
    async def paused(self, timeout_s: float) -> AsyncIterator[None]:
        """Report nothing during the block, which begins when all that was reported is stored and decided."""
        self._reporting.clear()
        try:
            await asyncio.gather(*self._unacknowledged)
            await self.until_decided(len(self.reported_at) - 1, timeout_s)
            yield
        finally:
            self._reporting.set()

    def waits_s(self, windows: range) -> list[float]:
        """The times from the reports of some windows to their actions here."""
        return [self.decided_at[window] - self.reported_at[window] for window in windows]

    def num_out_of_chain(self) -> int:
        """Actions that do not follow the one before them: 0 when each window was decided once, in order."""
        first = self.actions[0].window == 0 and not self.actions[0].previous_hash
        pairs = itertools.pairwise(self.actions)
        follow = [new.window == old.window + 1 and new.previous_hash == old.hash for old, new in pairs]
        return follow.count(False) + (not first)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Report during a block, from the first decision on."""
        await self._bus.publish(self.job)
        async with _beside(self.follow(), self.report()):
            await self.until_decided(0, timeout_s=60)
            yield


@contextlib.asynccontextmanager
async def running_job(settings: BusSettings, bus: Bus) -> AsyncIterator[SteadyJob]:
    """The services and the job, from its first decision on."""
    job = SteadyJob(bus)
    async with running_services(lambda _: settings, bus), job.running():
        yield job


@contextlib.asynccontextmanager
async def running_services(
    settings_of: Callable[[str], BusSettings], watcher: Bus, *, metrics_port: int = 0
) -> AsyncIterator[Sequence[ServiceProcess]]:
    """The services, ready; each connects with the settings of its name. `metrics_port` is the arbitrator's; 0: none."""
    own = {"DYNAMIX_NODE": NODE, "DYNAMIX_LOG_LEVEL": "error"}
    shown = {"arbitrator": {"DYNAMIX_METRICS_PORT": str(metrics_port)}}
    services = [
        ServiceProcess(name, {**bus_environment(settings_of(name)), **own, **shown.get(name, {})}) for name in SERVICES
    ]
    try:
        for service in services:
            service.start()
        await wait_until_ready(watcher, SERVICES, timeout_s=120)
        try:
            yield services
        except Exception as error:
            try:
                check_running(services)
            except SteadyJobError as ended:
                raise SteadyJobError(f"{error}; {ended}") from error
            raise
        check_running(services)
    finally:
        for service in services:
            service.stop()


@contextlib.asynccontextmanager
async def _beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run some work during a block; what ended it with an error is raised at the block's end."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        failed = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in failed:
            task.result()


def check_running(services: Sequence[ServiceProcess]) -> None:
    """Raise SteadyJobError when a service has ended: here nothing starts it again."""
    ended = [f"{one.name} with code {one.exit_code()}" for one in services if one.exit_code() is not None]
    if ended:
        raise SteadyJobError(f"a service ended: {', '.join(ended)}; its log is above")
