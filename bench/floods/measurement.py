"""One flood beside steady jobs: their delays before, and from the beginning of the flood until after it."""

import asyncio
import contextlib
import functools
import multiprocessing
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import msgspec
import numpy as np
from bench.failover.servers import NUM_SERVERS, ThreeServers
from bench.floods.deployment import Deployment, User, deployment
from bench.floods.senders import ALL_JOBS, FLOODS, HOSTILE_JOB, Sent, send
from bench.harness.broker import broker_with_bus
from bench.harness.steady_job import NODE, SteadyJob, running_job

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.die_with_parent import begin_worker
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.streams import STREAMS

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


class Honest(NamedTuple):
    """Jobs that are measured, and how the flood connects."""

    jobs: Sequence[SteadyJob]
    flooder: BusSettings
    watcher: Bus
    broker: Deployment | None = None
    """Where it is that of deploy/."""

    def reported(self) -> list[int]:
        """How many windows each job has reported."""
        return [len(job.reported_at) for job in self.jobs]

    def delays(self, begin: Sequence[int], ends: Sequence[int]) -> Delays:
        """Those of some windows of each job, all of which are decided."""
        return delays_of(
            [
                wait_s
                for job, first, end in zip(self.jobs, begin, ends, strict=True)
                for wait_s in job.waits_s(range(first, end))
            ]
        )

    @contextlib.asynccontextmanager
    async def all_decided(self) -> AsyncIterator[None]:
        """No job reports during the block, which begins when all that was reported is decided."""
        async with contextlib.AsyncExitStack() as stack:
            for job in self.jobs:
                await stack.enter_async_context(job.paused(DECIDED_TIMEOUT_S))
            yield

    async def num_stored(self) -> int:
        """Messages that streams have stored so far, those that they dropped since included."""
        return sum([(await self.watcher.stream_state(stream.name)).last_sequence for stream in STREAMS])


async def measure(
    flood: str, count: int, *, calm_s: float, after_s: float, with_keys: bool, num_servers: int = 1
) -> FloodResult:
    """Run one flood on a broker, of one server or three, and services of its own.

    With keys those of two honest jobs are for these only; that of the flood is for its own, where it needs no others.

    Raises:
        SteadyJobError: when a service ended, or a window was not decided at all.
    """
    flooder = HOSTILE_JOB if FLOODS[flood].with_key else ALL_JOBS
    async with honest_with_keys(num_servers, flooder) if with_keys else _honest(num_servers) as honest:
        first = honest.reported()
        await asyncio.sleep(calm_s)
        begin = honest.reported()
        sent = await send_beside(honest, functools.partial(send, flood), count, after_s)
        async with honest.all_decided():
            return FloodResult(
                flood=flood,
                count=count,
                sent=sent,
                calm=honest.delays(first, begin),
                flooded=honest.delays(begin, honest.reported()),
                num_out_of_chain=sum(job.num_out_of_chain() for job in honest.jobs),
            )


async def send_beside(honest: Honest, send_all: Callable[[int, BusSettings], Sent], count: int, after_s: float) -> Sent:
    """Send a flood from a process of its own, and wait; streams count it where the sender cannot tell."""
    stored = await honest.num_stored()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=begin_worker, initargs=(os.getpid(),)) as pool:
        sent = await asyncio.get_running_loop().run_in_executor(pool, send_all, count, honest.flooder)
    await asyncio.sleep(after_s)
    if sent.accepted + sent.refused:
        return sent
    async with honest.all_decided():  # the few hundred messages of honest jobs are in what is counted
        accepted = max(0, min(count - sent.denied, await honest.num_stored() - stored))
        return msgspec.structs.replace(sent, accepted=accepted, refused=max(sent.denied, count - accepted))


@contextlib.asynccontextmanager
async def _honest(num_servers: int) -> AsyncIterator[Honest]:
    """One job, on a broker that has one user."""
    servers = _three_servers() if num_servers > 1 else _one_server()
    async with servers as (settings, bus), running_job(settings, bus) as job:
        yield Honest([job], settings, bus)


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
async def honest_with_keys(num_servers: int, flooder: str, others: Sequence[User] = ()) -> AsyncIterator[Honest]:
    """Two jobs, each with a key of its own, on the broker of a deployment, which has other users, too."""
    names = [*HONEST_JOBS, HOSTILE_JOB]
    async with deployment(names, num_servers, others) as running, contextlib.AsyncExitStack() as stack:
        jobs = []
        for name in HONEST_JOBS:
            bus = await Bus.connect(running.settings(name), name=f"trainer-{NODE}")
            stack.push_async_callback(bus.close)
            jobs.append(SteadyJob(bus, reader=running.watcher, name=name))
            await stack.enter_async_context(jobs[-1].running())
        yield Honest(jobs, running.settings(flooder), running.watcher, running)


def delays_of(waits_s: list[float]) -> Delays:
    """Median, 95th percentile and maximum."""
    median, p95 = np.percentile(waits_s, [50, 95])
    return Delays(num_windows=len(waits_s), median_s=float(median), p95_s=float(p95), longest_s=max(waits_s))
