"""The process that plays all trainers and collectors: it publishes specifications, then states at a steady pace.

What a window holds is encoded before it is due, so that publishing is all that is done in its time. When it is
acknowledged, the broker is asked when it stored the last state: decisions are timed from there, by the broker's clock.
"""

import asyncio
import time
from typing import NamedTuple

import msgspec
from bench.harness.broker import run_with_uvloop
from bench.harness.command import BenchmarkError
from bench.messages.load import Load, Parcel, job_of, parcel
from bench.scale.plan import ScalePlan

from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.streams import FEED

LEAD_S = 0.5
"""Between the last preparation and the first window."""
SMALLEST_SLEEP_S = 0.001
FLUSH_S = 60.0


class ScaleError(BenchmarkError):
    """The measurement could not be made; the text says why."""


class _Due(NamedTuple):
    """A parcel of a window, and how many nodes come before it."""

    parcel: Parcel
    node: int
    is_state: bool


class SentWindow(msgspec.Struct, frozen=True):
    """One window of one job, as it was published; monotonic times in seconds."""

    job: str
    window: int
    due_s: float
    begun_s: float
    acknowledged_s: float
    stored_ns: int
    """When the broker stored the last of its states, since the Unix epoch."""


class Published(msgspec.Struct):
    """All that a generator published."""

    sent: list[SentWindow] = []
    num_messages: int = 0
    num_bytes: int = 0
    """Bytes of payloads."""
    state_bytes: int = 0
    """Bytes of one state of a full node."""
    num_retries: int = 0


def generate(plan: ScalePlan, settings: BusSettings) -> Published:
    """Publish the whole load; for a process of its own."""
    return run_with_uvloop(_generate(plan, settings))


async def _generate(plan: ScalePlan, settings: BusSettings) -> Published:
    bus = await Bus.connect(settings, name="scale-generator")
    try:
        return await _Generator(plan, bus).run()
    finally:
        await bus.close()


class _Generator:
    def __init__(self, plan: ScalePlan, bus: Bus) -> None:
        self._plan = plan
        self._bus = bus
        self._published = Published()

    async def run(self) -> Published:
        """Every job at the plan's rate, one after the other within an interval."""
        plan = self._plan
        names = [f"scale-{number:04d}-0a1b2c3d" for number in range(plan.jobs)]
        jobs = [job_of(name, plan.workers_per_job, plan.policy, plan.seed) for name in names]
        loads = [await asyncio.to_thread(Load, job, seed=plan.seed + number) for number, job in enumerate(jobs)]
        for job in jobs:
            await self._bus.publish(job)
        begin_s = time.monotonic() + LEAD_S
        async with asyncio.TaskGroup() as tasks:
            for number, (name, load) in enumerate(zip(names, loads, strict=True)):
                tasks.create_task(self._run_job(name, load, begin_s + number / len(jobs) * plan.interval_s))
        if not await self._bus.flush(FLUSH_S):
            raise ScaleError(f"the broker did not acknowledge everything within {FLUSH_S:g} s")
        self._published.num_retries = self._bus.counters["retries"]
        return self._published

    async def _run_job(self, job: str, load: Load, begin_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for window in range(self._plan.all_windows):
                due = self._prepare(load, window)
                due_s = begin_s + window * self._plan.interval_s
                await asyncio.sleep(due_s - time.monotonic())
                begun_s = time.monotonic()
                futures = await self._publish(due, due_s)
                tasks.create_task(self._record_window(job, window, due_s, begun_s, futures))

    def _prepare(self, load: Load, window: int) -> list[_Due]:
        """What is published for a window, in order: each node's state, after its metric window, then all rewards."""
        states = [_Due(parcel(state), node, is_state=True) for node, state in enumerate(load.states(window))]
        self._published.state_bytes = len(states[0].parcel.payload)
        if not self._plan.background:
            return states
        windows = [_Due(parcel(metrics), node, is_state=False) for node, metrics in enumerate(load.windows(window))]
        rewards = [_Due(parcel(reward), len(states), is_state=False) for reward in load.rewards(window)]
        return [due for pair in zip(windows, states, strict=True) for due in pair] + rewards

    async def _publish(self, due: list[_Due], due_s: float) -> list[asyncio.Future[int]]:
        """Publish a window over the plan's spread; returns the acknowledgements of its states."""
        step_s, futures = self._plan.spread_s / self._plan.nodes_per_job, []
        for one, node, is_state in due:
            if step_s and (ahead_s := due_s + node * step_s - time.monotonic()) > SMALLEST_SLEEP_S:
                await asyncio.sleep(ahead_s)
            future = await self._bus.publish_bytes_soon(*one)
            self._published.num_messages += 1
            self._published.num_bytes += len(one.payload)
            if is_state:
                futures.append(future)
        return futures

    async def _record_window(
        self, job: str, window: int, due_s: float, begun_s: float, futures: list[asyncio.Future[int]]
    ) -> None:
        """When all states are acknowledged: ask when the last one was stored, and keep the window's times."""
        last = max(await asyncio.gather(*futures))
        acknowledged_s = time.monotonic()
        stored = await self._bus.first(FEED.name, subjects.of("state", job, subjects.ANY), start=last)
        if stored is None or stored.sequence != last:
            raise ScaleError(f"{FEED.name} no longer holds {last}")
        self._published.sent.append(SentWindow(job, window, due_s, begun_s, acknowledged_s, stored.timestamp_ns))
