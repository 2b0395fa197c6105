"""One flood beside steady jobs: their delays before, and from the beginning of the flood until after it."""

import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import msgspec
import numpy as np
from bench.failover.servers import NUM_SERVERS, ThreeServers
from bench.floods.deployment import deployment
from bench.floods.senders import ALL_JOBS, FLOODS, HOSTILE_JOB, Sent, send
from bench.harness.broker import broker_with_bus
from bench.harness.steady_job import NODE, SteadyJob, running_job

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.die_with_parent import begin_worker
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.streams import FEED

DECIDED_TIMEOUT_S = 300.0
HONEST_JOBS = ("steady-0a1b2c3d", "steady-4e5f6a7b")


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """From the report of a window to its action at the reader, in seconds."""

    num_windows: int
    median_s: float
    p95_s: float
    longest_s: float


class FloodResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one flood did to honest jobs."""

    flood: str
    count: int
    sent: Sent
    calm: Delays
    flooded: Delays
    num_out_of_chain: int


class _Honest(NamedTuple):
    """Jobs that are measured, and how the flood connects."""

    jobs: Sequence[SteadyJob]
    flooder: BusSettings
    watcher: Bus


async def measure(
    flood: str, count: int, *, calm_s: float, after_s: float, with_keys: bool, num_servers: int = 1
) -> FloodResult:
    """Run one flood on a broker, of one server or three, and services of its own.

    With keys those of two honest jobs are for these only; that of the flood is for its own, where it needs no others.

    Raises:
        SteadyJobError: when a service ended, or a window was not decided at all.
    """
    flooder = HOSTILE_JOB if FLOODS[flood].with_key else ALL_JOBS
    async with _honest_with_keys(num_servers, flooder) if with_keys else _honest(num_servers) as honest:
        jobs = honest.jobs
        first = [len(job.reported_at) for job in jobs]
        await asyncio.sleep(calm_s)
        begin = [len(job.reported_at) for job in jobs]
        stored = (await honest.watcher.stream_state(FEED.name)).last_sequence
        sent = await _send(flood, count, honest.flooder)
        await asyncio.sleep(after_s)
        async with contextlib.AsyncExitStack() as stack:
            for job in jobs:
                await stack.enter_async_context(job.paused(DECIDED_TIMEOUT_S))
            if not sent.accepted + sent.refused:  # the few hundred messages of honest jobs are in what is counted
                stored = min(count, (await honest.watcher.stream_state(FEED.name)).last_sequence - stored)
                sent = msgspec.structs.replace(sent, accepted=stored, refused=count - stored)
            ends = [len(job.reported_at) for job in jobs]
            return FloodResult(
                flood=flood,
                count=count,
                sent=sent,
                calm=_delays(jobs, map(range, first, begin)),
                flooded=_delays(jobs, map(range, begin, ends)),
                num_out_of_chain=sum(job.num_out_of_chain() for job in jobs),
            )


async def _send(flood: str, count: int, settings: BusSettings) -> Sent:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=begin_worker, initargs=(os.getpid(),)) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, send, flood, count, settings)


@contextlib.asynccontextmanager
async def _honest(num_servers: int) -> AsyncIterator[_Honest]:
    """One job, on a broker that has one user."""
    servers = _three_servers() if num_servers > 1 else _one_server()
    async with servers as (settings, bus), running_job(settings, bus) as job:
        yield _Honest([job], settings, bus)


@contextlib.asynccontextmanager
async def _one_server() -> AsyncIterator[tuple[BusSettings, Bus]]:
    async with broker_with_bus("trainer") as (server, bus):
        yield server.settings, bus


@contextlib.asynccontextmanager
async def _three_servers() -> AsyncIterator[tuple[BusSettings, Bus]]:
    async with ThreeServers() as servers:
        bus = await Bus.connect(servers.settings, name="trainer")
        try:
            await provision(bus, num_replicas=NUM_SERVERS)
            await servers.until_current(bus)
            yield servers.settings, bus
        finally:
            await bus.close()


@contextlib.asynccontextmanager
async def _honest_with_keys(num_servers: int, flooder: str) -> AsyncIterator[_Honest]:
    """Two jobs, each with a key of its own, on the broker of a deployment."""
    async with deployment([*HONEST_JOBS, HOSTILE_JOB], num_servers) as running, contextlib.AsyncExitStack() as stack:
        jobs = []
        for name in HONEST_JOBS:
            bus = await Bus.connect(running.settings(name), name=f"trainer-{NODE}")
            stack.push_async_callback(bus.close)
            jobs.append(SteadyJob(bus, reader=running.watcher, name=name))
            await stack.enter_async_context(jobs[-1].running())
        yield _Honest(jobs, running.settings(flooder), running.watcher)


def _delays(jobs: Sequence[SteadyJob], windows: Iterable[range]) -> Delays:
    return delays_of([wait_s for job, own in zip(jobs, windows, strict=True) for wait_s in job.waits_s(own)])


def delays_of(waits_s: list[float]) -> Delays:
    """Median, 95th percentile and maximum."""
    median, p95 = np.percentile(waits_s, [50, 95])
    return Delays(num_windows=len(waits_s), median_s=float(median), p95_s=float(p95), longest_s=max(waits_s))
