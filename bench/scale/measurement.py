"""One measurement: a broker, one arbitrator process, a generator process, and this process for the trainers."""

import asyncio
import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from bench.harness.broker import broker_with_bus, raw_client
from bench.harness.rounds import Rounds, Timed
from bench.messages.load import Load, job_of, parcel
from bench.messages.readers import read_raw, read_with_bus
from bench.scale.generator import Published, ScaleError, generate
from bench.scale.latency import achieved_rate, kept_rate, latency_of, lateness_ms, publishing_ms
from bench.scale.plan import WARM_UP_WINDOWS, ScalePlan
from bench.scale.result import ScaleResult
from bench.scale.watch import MIB, Meter, Watch, cpu_seconds, rss_growth_bytes, wait_seconds

from dynamix.cli.progress import ProgressLine
from dynamix.cli.services import ServiceProcess, bus_environment, wait_until_ready
from dynamix.runtime.bus import Bus
from dynamix.runtime.die_with_parent import begin_worker
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.streams import FEED

ARBITRATOR, BROKER = "arbitrator", "broker"
LAST_DECISIONS_S = 30.0
"""How long after the last state decisions are waited for; what is missing then is missing."""
PROGRESS_S = 20.0
NUM_MESSAGES = 20_000
"""Read per run of ingest."""
NUM_PAIRS = 5
JOB = "ingest-0a1b2c3d"
OURS, RAW = "ours", "raw"


async def measure(plan: ScalePlan, *, ingest_messages: int) -> ScaleResult:
    """Run one measurement.

    Raises:
        ScaleError: when the generator did not keep its rate, or the arbitrator ended; it has no figures then.
    """
    async with broker_with_bus("scale") as (server, bus):
        watch = Watch(bus, plan.all_windows * plan.jobs)
        async with running_arbitrator(bus, server.settings) as arbitrator:
            meter = Meter({ARBITRATOR: arbitrator.pid, BROKER: server.pid})
            published = await run_load(plan, server.settings, watch, meter)
            load_average = os.getloadavg()[0]
        ingest = await _ingest(plan, bus, server.settings, ingest_messages)
    if not kept_rate(plan, published.sent):
        raise ScaleError(
            f"the generator did not keep its rate: asked {plan.rate:g} windows/s, achieved "
            f"{achieved_rate(plan, published.sent):.3f}, late by up to {lateness_ms(published.sent):.0f} ms; nothing "
            "that was measured counts: take fewer --workers, a lower --rate, or a quieter machine"
        )
    return _result(plan, published, watch, meter, {"load_average": load_average, **ingest})


@contextlib.asynccontextmanager
async def running_arbitrator(bus: Bus, settings: BusSettings) -> AsyncIterator[ServiceProcess]:
    """The real service in a process of its own; its log is shown when it ends before it should."""
    environ = {**bus_environment(settings), "DYNAMIX_NODE": "scale"}
    with tempfile.TemporaryDirectory(prefix="dynamix-scale-") as directory:
        log = Path(directory) / "arbitrator.log"
        with log.open("wb") as output:
            service = ServiceProcess(ARBITRATOR, environ, output)
            service.start()
            try:
                await wait_until_ready(bus, [ARBITRATOR])
                yield service
                if service.exit_code() is not None:
                    raise ScaleError(f"the arbitrator ended with code {service.exit_code()}: {_tail(log)}")
            except (TimeoutError, OSError) as error:
                raise ScaleError(f"the arbitrator did not run: {error}: {_tail(log)}") from error
            finally:
                service.stop()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] or "it wrote no log"


async def run_load(plan: ScalePlan, settings: BusSettings, watch: Watch, meter: Meter) -> Published:
    """Let the generator run, and wait for the last decisions."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=begin_worker, initargs=(os.getpid(),)) as pool:
        endless = (watch.read_actions(), watch.read_heartbeats(), meter.run(), _progress(plan, watch))
        background = [asyncio.create_task(coroutine) for coroutine in endless]
        try:
            await watch.listening.wait()
            generating = asyncio.get_running_loop().run_in_executor(pool, generate, plan, settings)
            published = await _first_of(generating, background)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_DECISIONS_S):
                    await watch.complete.wait()
            meter.sample()
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
    return published


async def _first_of(generating: asyncio.Future[Published], background: Sequence[asyncio.Task[None]]) -> Published:
    """What was published; an error in the background, which never ends by itself, comes first."""
    ends: list[asyncio.Future[Any]] = [generating, *background]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in background:
        if task.done():
            task.result()
    return await generating


async def _progress(plan: ScalePlan, watch: Watch) -> None:
    line = ProgressLine(PROGRESS_S)
    while True:
        await asyncio.sleep(1.0)
        line.show(f"{len(watch.decided)} of {plan.all_windows * plan.jobs} windows decided")


def _result(plan: ScalePlan, published: Published, watch: Watch, meter: Meter, others: dict[str, Any]) -> ScaleResult:
    asked = msgspec.structs.asdict(plan)
    del asked["seed"]
    judged = [one for one in published.sent if one.window >= WARM_UP_WINDOWS]
    begin_s, end_s = min(one.due_s for one in judged), max(one.due_s for one in judged) + plan.interval_s
    all_s = end_s - min(one.due_s for one in published.sent)
    samples, broker = meter.samples[ARBITRATOR], meter.samples[BROKER]
    cpu_s, wait_s = cpu_seconds(samples, begin_s, end_s), wait_seconds(samples, begin_s, end_s)
    return ScaleResult(
        **asked,
        **latency_of(published.sent, watch.decided),
        **others,
        nodes=plan.nodes_per_job * plan.jobs,
        windows_expected=plan.all_windows * plan.jobs,
        windows_decided=len(watch.decided),
        actions_out_of_chain=watch.num_out_of_chain,
        late_states=watch.counters.get("late_states", 0),
        cpu_percent=100 * cpu_s / (end_s - begin_s),
        cpu_us_per_rank_window=1e6 * cpu_s / (plan.workers * plan.num_windows),
        rss_mb=samples[-1].rss_bytes / MIB,
        rss_growth_mb=rss_growth_bytes(samples, begin_s + plan.memory_warm_up_s, end_s) / MIB,
        max_loop_lag_ms=watch.counters.get("max_loop_lag_ms", 0),
        broker_cpu_percent=100 * cpu_seconds(broker, begin_s, end_s) / (end_s - begin_s),
        broker_rss_mb=broker[-1].rss_bytes / MIB,
        generator_rate=achieved_rate(plan, published.sent),
        generator_lateness_ms=lateness_ms(published.sent),
        publishing_ms=publishing_ms(published.sent),
        messages_per_s=published.num_messages / all_s,
        bytes_per_s=published.num_bytes / all_s,
        state_bytes=published.state_bytes,
        action_bytes=watch.action_bytes,
        publish_retries=published.num_retries,
        wait_ms_per_window=None if wait_s is None else 1e3 * wait_s / (plan.num_windows * plan.jobs),
    )


async def _ingest(plan: ScalePlan, bus: Bus, settings: BusSettings, num_messages: int) -> dict[str, float]:
    """Read states as the arbitrator does, with our consumer and codec, in pairs with a raw pull of the same messages.

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
