"""Ingest: reading as the arbitrator does, with our consumer and codec, against a raw pull of the same messages."""

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import nats
from bench.raw_pull import pull
from bench.scale.load import Load, job_of, parcel
from bench.scale.plan import Plan
from nats.aio.client import Client
from nats.aio.msg import Msg

from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import State
from dynamix.schemas.streams import FEED

NUM_MESSAGES = 20_000
NUM_PAIRS = 5
JOB = "ingest-0a1b2c3d"


class Ingest(NamedTuple):
    """Medians over the pairs; rates in messages per second, CPU time of the reading process per message."""

    ratio: float
    per_s: float
    raw_per_s: float
    cpu_us: float
    raw_cpu_us: float


class _Sample(NamedTuple):
    per_s: float
    cpu_us: float


async def measure_ingest(
    plan: Plan, bus: Bus, settings: BusSettings, *, num_messages: int = NUM_MESSAGES, num_pairs: int = NUM_PAIRS
) -> Ingest:
    """Store states of the plan's nodes, then read them in turn: ours, raw, raw, ours."""
    first = await _store(plan, bus, num_messages)
    client = await nats.connect(settings.url, user=settings.user, password=settings.password)
    try:
        arms = (lambda: _ours(bus, num_messages, first), lambda: _raw(client, num_messages, first))
        samples: tuple[list[_Sample], list[_Sample]] = ([], [])
        for pair in range(-1, num_pairs):  # the first one warms up
            for arm in (0, 1) if pair % 2 else (1, 0):
                sample = await _timed(arms[arm], num_messages)
                if pair >= 0:
                    samples[arm].append(sample)
    finally:
        await client.close()
    ours, raw = samples
    return Ingest(
        ratio=statistics.median(our.per_s / their.per_s for our, their in zip(ours, raw, strict=True)),
        per_s=statistics.median(sample.per_s for sample in ours),
        raw_per_s=statistics.median(sample.per_s for sample in raw),
        cpu_us=statistics.median(sample.cpu_us for sample in ours),
        raw_cpu_us=statistics.median(sample.cpu_us for sample in raw),
    )


async def _store(plan: Plan, bus: Bus, num_messages: int) -> int:
    """Fill the stream as the generator does, for a job that nobody decides; returns the first sequence."""
    first = (await bus.stream_state(FEED.name)).last_sequence + 1
    job = job_of(JOB, plan.workers_per_job, plan.policy, plan.seed)
    load = await asyncio.to_thread(Load, job, seed=plan.seed, num_variants=1)  # seconds for thousands of nodes
    missing, window = num_messages, 0
    while missing > 0:
        states = list(load.states(window))[:missing]
        for state in states:
            await bus.publish_bytes_soon(*parcel(state))
        missing, window = missing - len(states), window + 1
    assert await bus.flush(60)
    return first


async def _ours(bus: Bus, num_messages: int, first: int) -> None:
    async with bus.consume(FEED.name, [subjects.state(JOB, subjects.ANY)], start=first) as consumer:
        async for batch in consumer:
            for message in batch:
                decode(State, message.subject, message.payload)
            num_messages -= len(batch)
            if num_messages <= 0:
                return


async def _raw(client: Client, num_messages: int, first: int) -> None:
    def take(message: Msg) -> None:
        decode(State, message.subject, message.data)

    async with asyncio.timeout(120):
        await pull(client, FEED.name, subjects.state(JOB, subjects.ANY), num_messages, take, first=first)


async def _timed(arm: Callable[[], Awaitable[None]], num_messages: int) -> _Sample:
    gc.collect()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    await arm()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    return _Sample(num_messages / wall_s, 1e6 * cpu_s / num_messages)
