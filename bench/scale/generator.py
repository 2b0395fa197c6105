"""The process that plays all trainers and collectors: it publishes specifications, then states at a steady pace.

What a window holds is encoded before it is due, so that publishing is all that is done in its time. When it is
acknowledged, the broker is asked when it stored the last state: decisions are timed from there, by the broker's clock.
"""

import asyncio
import json
import time
from typing import NamedTuple

import msgspec
import nats
import numpy as np
import uvloop
from bench.messages.load import Load, Parcel, parcel
from bench.messages.nodes import job_of
from bench.scale.plan import Plan
from nats.aio.client import Client

from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.streams import FEED

LEAD_S = 0.5
"""Between the last preparation and the first window."""
SMALLEST_SLEEP_S = 0.001
FLUSH_S = 60.0
ANSWER_S = 10.0


class ScaleError(RuntimeError):
    """The measurement could not be made; the text says why."""


class _Due(NamedTuple):
    """A parcel of a window, and how many nodes come before it."""

    parcel: Parcel
    node: int
    is_state: bool


class Sent(msgspec.Struct, frozen=True):
    """One window of one job, as it was published; monotonic times in seconds."""

    job: str
    window: int
    due_s: float
    begun_s: float
    acknowledged_s: float
    stored_ns: int
    """When the broker stored the last of its states, since the Unix epoch."""


class Published(msgspec.Struct, frozen=True):
    """All that a generator published."""

    sent: list[Sent]
    num_messages: int
    num_bytes: int
    """Of payloads."""
    num_states: int
    state_bytes: int
    """Of one state of a full node."""
    num_retries: int


def job_names(plan: Plan) -> list[str]:
    """Names of the jobs."""
    return [f"scale-{number:04d}-0a1b2c3d" for number in range(plan.num_jobs)]


def generate(plan: Plan, settings: BusSettings) -> Published:
    """Publish the whole load; for a process of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_generate(plan, settings))


async def _generate(plan: Plan, settings: BusSettings) -> Published:
    bus = await Bus.connect(settings, name="scale-generator")
    client = await nats.connect(settings.url, user=settings.user, password=settings.password)
    try:
        return await _Generator(plan, bus, client).run()
    finally:
        await client.close()
        await bus.close()


class _Generator:
    def __init__(self, plan: Plan, bus: Bus, client: Client) -> None:
        self._plan = plan
        self._bus = bus
        self._client = client
        self._sent: list[Sent] = []
        self._num_messages = self._num_bytes = self._num_states = self._state_bytes = 0

    async def run(self) -> Published:
        """Every job at the plan's rate, one after the other within an interval."""
        plan = self._plan
        jobs = [job_of(name, plan.workers_per_job, plan.policy, plan.seed) for name in job_names(plan)]
        loads = [await asyncio.to_thread(Load, job, seed=plan.seed + number) for number, job in enumerate(jobs)]
        for job in jobs:
            await self._bus.publish(job)
        begin_s = time.monotonic() + LEAD_S
        async with asyncio.TaskGroup() as tasks:
            for number, (job, load) in enumerate(zip(jobs, loads, strict=True)):
                phase_s = number / len(jobs) * plan.interval_s
                tasks.create_task(self._run_job(job.job, load, begin_s + phase_s))
        if not await self._bus.flush(FLUSH_S):
            raise ScaleError(f"the broker did not acknowledge everything within {FLUSH_S:g} s")
        return Published(
            sent=self._sent,
            num_messages=self._num_messages,
            num_bytes=self._num_bytes,
            num_states=self._num_states,
            state_bytes=self._state_bytes,
            num_retries=self._bus.counters["retries"],
        )

    async def _run_job(self, job: str, load: Load, begin_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for window in range(self._plan.all_windows):
                due = self._prepare(load, window)
                due_s = begin_s + window * self._plan.interval_s
                await asyncio.sleep(due_s - time.monotonic())
                begun_s = time.monotonic()
                futures = await self._publish(due, due_s)
                tasks.create_task(self._note(job, window, due_s, begun_s, futures))

    def _prepare(self, load: Load, window: int) -> list[_Due]:
        """What is published for a window, in order: each node's state, after its metric window, then all rewards."""
        states = [parcel(state) for state in load.states(window)]
        self._num_states += len(states)
        self._state_bytes = len(states[0].payload)
        if not self._plan.background:
            return [_Due(state, node, is_state=True) for node, state in enumerate(states)]
        windows = [parcel(metrics) for metrics in load.windows(window)]
        rewards = [parcel(reward) for reward in load.rewards(window)]
        due = []
        for node, (metrics, state) in enumerate(zip(windows, states, strict=True)):
            due += [_Due(metrics, node, is_state=False), _Due(state, node, is_state=True)]
        return due + [_Due(reward, len(states), is_state=False) for reward in rewards]

    async def _publish(self, due: list[_Due], due_s: float) -> list[asyncio.Future[int]]:
        """Publish a window over the plan's spread; returns the acknowledgements of its states."""
        step_s, futures = self._plan.spread_s / self._plan.nodes_per_job, []
        for one, node, is_state in due:
            if step_s and (ahead_s := due_s + node * step_s - time.monotonic()) > SMALLEST_SLEEP_S:
                await asyncio.sleep(ahead_s)
            future = await self._bus.publish_bytes_soon(*one)
            self._num_messages += 1
            self._num_bytes += len(one.payload)
            if is_state:
                futures.append(future)
        return futures

    async def _note(
        self, job: str, window: int, due_s: float, begun_s: float, futures: list[asyncio.Future[int]]
    ) -> None:
        """When all states are acknowledged: ask when the last one was stored, and write the window down."""
        last = max(await asyncio.gather(*futures))
        acknowledged_s = time.monotonic()
        stored_ns = await self._stored_ns(last)
        self._sent.append(Sent(job, window, due_s, begun_s, acknowledged_s, stored_ns))

    async def _stored_ns(self, sequence: int) -> int:
        subject, body = f"$JS.API.STREAM.MSG.GET.{FEED.name}", json.dumps({"seq": sequence}).encode()
        answer = json.loads((await self._client.request(subject, body, timeout=ANSWER_S)).data)
        if "message" not in answer:
            raise ScaleError(f"{FEED.name} no longer holds {sequence}: {answer.get('error')}")
        return int(np.datetime64(answer["message"]["time"].removesuffix("Z"), "ns").astype(np.int64))
