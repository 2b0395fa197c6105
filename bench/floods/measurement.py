"""One flood beside a steady job: its delays before, and from the beginning of the flood until after it."""

import asyncio
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import msgspec
import numpy as np
from bench.floods.senders import Sent, send
from bench.harness.broker import broker_with_bus
from bench.harness.steady_job import running_job

from dynamix.runtime.die_with_parent import begin_worker

DECIDED_TIMEOUT_S = 300.0


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """From the report of a window to its action at the reader, in seconds."""

    num_windows: int
    median_s: float
    p95_s: float
    longest_s: float


class FloodResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one flood did to an honest job."""

    flood: str
    count: int
    sent: Sent
    calm: Delays
    flooded: Delays
    num_out_of_chain: int


async def measure(flood: str, count: int, *, calm_s: float, after_s: float) -> FloodResult:
    """Run one flood on a broker and services of its own.

    Raises:
        SteadyJobError: when a service ended, or a window was not decided at all.
    """
    async with broker_with_bus("trainer") as (server, bus), running_job(server.settings, bus) as job:
        first = len(job.reported_at)
        await asyncio.sleep(calm_s)
        begin = len(job.reported_at)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, initializer=begin_worker, initargs=(os.getpid(),)) as pool:
            sent = await asyncio.get_running_loop().run_in_executor(pool, send, flood, count, server.settings)
        await asyncio.sleep(after_s)
        async with job.paused(DECIDED_TIMEOUT_S):
            return FloodResult(
                flood=flood,
                count=count,
                sent=sent,
                calm=delays_of(job.waits_s(range(first, begin))),
                flooded=delays_of(job.waits_s(range(begin, len(job.reported_at)))),
                num_out_of_chain=job.num_out_of_chain(),
            )


def delays_of(waits_s: list[float]) -> Delays:
    """Median, 95th percentile and maximum."""
    median, p95 = np.percentile(waits_s, [50, 95])
    return Delays(num_windows=len(waits_s), median_s=float(median), p95_s=float(p95), longest_s=max(waits_s))
