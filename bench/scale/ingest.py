"""Ingest: reading as the arbitrator does, with our consumer and codec, against a raw pull of the same messages."""

import asyncio

from bench.harness.broker import raw_client
from bench.harness.rounds import Rounds, Timed
from bench.messages.load import Load, parcel
from bench.messages.nodes import job_of
from bench.messages.readers import read_raw, read_with_bus
from bench.scale.plan import ScalePlan

from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.streams import FEED

NUM_MESSAGES = 20_000
NUM_PAIRS = 5
JOB = "ingest-0a1b2c3d"
OURS, RAW = "ours", "raw"


async def measure_ingest(plan: ScalePlan, bus: Bus, settings: BusSettings, num_messages: int) -> dict[str, float]:
    """Store states of the plan's nodes, then read them in pairs.

    Medians over the pairs: rates in messages per second, CPU time of the reading process per message.
    """
    first, subject = await _store(plan, bus, num_messages), subjects.of("state", JOB, subjects.ANY)
    rounds = Rounds((OURS, RAW), NUM_PAIRS, label="ingest")
    async with raw_client(settings) as client:
        for arm in rounds:
            with Timed(num_messages) as done:
                if arm == OURS:
                    await read_with_bus(bus, subject, num_messages, first=first)
                else:
                    await read_raw(client, subject, num_messages, first=first)
            rounds.record(done.timing)
    per_s, cpu_us = rounds.medians("per_s"), rounds.medians("cpu_us")
    return {
        "ingest_vs_raw": rounds.ratios("per_s")["ratio"],
        "ingest_per_s": per_s[OURS],
        "raw_per_s": per_s[RAW],
        "ingest_cpu_us": cpu_us[OURS],
        "raw_cpu_us": cpu_us[RAW],
    }


async def _store(plan: ScalePlan, bus: Bus, num_messages: int) -> int:
    """Fill the stream as the generator does, for a job without decisions; returns the first sequence."""
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
