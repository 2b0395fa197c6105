"""Several shards on one broker: `python -m bench.scale.shards --shards 2 --workers 20000 --jobs 2 --seconds 60`.

A shard is a NATS account with streams, users and an arbitrator of its own (docs/scale.md, "Shards"); a job belongs to
the shard whose credentials it was given. Each shard here has the real arbitrator and a generator in processes of their
own, as `bench.scale` has one; all shards share the broker and this machine. Latencies as there, by shard.

Every window must be decided once. There is no target for the latency: it is that of all processes on these processors.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from bench.harness.broker import run_with_uvloop
from bench.harness.command import BenchmarkReport, Target, benchmark_parser, run_benchmark
from bench.harness.tables import formatted
from bench.scale.generator import ScaleError
from bench.scale.latency import achieved_rate, kept_rate, latency_of, lateness_ms
from bench.scale.measurement import ARBITRATOR, BROKER, run_load, running_arbitrator
from bench.scale.plan import WARM_UP_WINDOWS, ScalePlan
from bench.scale.watch import MIB, Meter, Watch, cpu_seconds

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.runtime.settings import BusSettings

_AUTHORIZATION, _ROOM = "authorization {", "max_file_store: 4GB"
COLUMNS = {
    "shard": "{shard}",
    "workers": "{workers:,}",
    "jobs": "{jobs}",
    "windows/s each": "{rate:g}",
    "latency p50 / p95 / p99 / max [ms]": (
        "{decision_latency_p50_ms:.1f} / {decision_latency_p95_ms:.1f} / {decision_latency_p99_ms:.1f} / "
        "{decision_latency_max_ms:.1f}"
    ),
    "decided": "{windows_decided} of {windows_expected}",
    "arbitrator, % of a core": "{cpu_percent:.1f}",
    "MB": "{rss_mb:.0f}",
    "messages/s": "{messages_per_s:,.0f}",
}


class ShardResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one shard's arbitrator did; fields as in `ScaleResult`."""

    shard: int
    workers: int
    jobs: int
    rate: float
    decision_latency_p50_ms: float
    decision_latency_p95_ms: float
    decision_latency_p99_ms: float
    decision_latency_max_ms: float
    max_lag_windows: int
    windows_expected: int
    windows_decided: int
    actions_out_of_chain: int
    cpu_percent: float
    rss_mb: float
    messages_per_s: float
    generator_lateness_ms: float


class ShardedServer(EmbeddedServer):
    """An embedded server with an account and a user for each shard."""

    def __init__(self, num_shards: int) -> None:
        super().__init__()
        self._num_shards = num_shards

    def of_shard(self, shard: int) -> BusSettings:
        """How to connect to a shard."""
        return msgspec.structs.replace(self.settings, user=f"shard-{shard}")

    def _config(self, store: Path) -> str:
        head, found, _ = super()._config(store).partition(_AUTHORIZATION)
        assert found, "the embedded server's configuration names its user otherwise"
        assert _ROOM in head, "the embedded server's configuration has another room"
        head = head.replace(_ROOM, f"max_file_store: {2 * self._num_shards}GB")
        accounts = [self._account(shard) for shard in range(self._num_shards)]
        return f"{head}accounts {{ {', '.join(accounts)} }}\n"

    def _account(self, shard: int) -> str:
        user = f'{{ user: "{self.of_shard(shard).user}", password: "{self._password}" }}'
        return f"SHARD_{shard} {{ jetstream: enabled, users: [{user}] }}"


async def measure(plan: ScalePlan, num_shards: int) -> tuple[list[ShardResult], dict[str, float]]:
    """Run `plan` in each of the shards at once; their results, and what the broker used.

    Raises:
        ScaleError: when a generator did not keep its rate, or an arbitrator ended.
    """
    async with ShardedServer(num_shards) as server:
        meter = Meter({BROKER: server.pid})
        meter.sample()
        metering = asyncio.create_task(meter.run())
        running = [asyncio.create_task(_shard(plan, shard, server.of_shard(shard))) for shard in range(num_shards)]
        try:
            results = await asyncio.gather(*running)
        finally:
            for task in (metering, *running):
                task.cancel()
            await asyncio.gather(metering, *running, return_exceptions=True)
        meter.sample()
    samples = meter.samples[BROKER]
    span_s = samples[-1].at_s - samples[0].at_s
    cpu_s = cpu_seconds(samples, samples[0].at_s, samples[-1].at_s)
    broker = {"broker_cpu_percent": 100 * cpu_s / span_s, "broker_rss_mb": samples[-1].rss_bytes / MIB}
    return results, {**broker, "load_average": os.getloadavg()[0]}


async def _shard(plan: ScalePlan, shard: int, settings: BusSettings) -> ShardResult:
    async with contextlib.AsyncExitStack() as stack:
        bus = await Bus.connect(settings, name=f"scale-{shard}")
        stack.push_async_callback(bus.close)
        await provision(bus)
        watch = Watch(bus, plan.all_windows * plan.jobs)
        async with running_arbitrator(bus, settings) as arbitrator:
            meter = Meter({ARBITRATOR: arbitrator.pid})
            published = await run_load(plan, settings, watch, meter)
    if not kept_rate(plan, published.sent):
        raise ScaleError(
            f"the generator of shard {shard} did not keep its rate: asked {plan.rate:g} windows/s, achieved "
            f"{achieved_rate(plan, published.sent):.3f}: take fewer --workers, a lower --rate, or a quieter machine"
        )
    judged = [one for one in published.sent if one.window >= WARM_UP_WINDOWS]
    begin_s, end_s = min(one.due_s for one in judged), max(one.due_s for one in judged) + plan.interval_s
    samples = meter.samples[ARBITRATOR]
    return ShardResult(
        **latency_of(published.sent, watch.decided),
        shard=shard,
        workers=plan.workers,
        jobs=plan.jobs,
        rate=plan.rate,
        windows_expected=plan.all_windows * plan.jobs,
        windows_decided=len(watch.decided),
        actions_out_of_chain=watch.num_out_of_chain,
        cpu_percent=100 * cpu_seconds(samples, begin_s, end_s) / (end_s - begin_s),
        rss_mb=samples[-1].rss_bytes / MIB,
        messages_per_s=published.num_messages / (end_s - min(one.due_s for one in published.sent)),
        generator_lateness_ms=lateness_ms(published.sent),
    )


def targets_of(results: Sequence[ShardResult]) -> list[Target]:
    """Every window is decided, once, in its chain."""
    missing = sum(one.windows_expected - one.windows_decided for one in results)
    return [
        Target(name="windows not decided", value=missing, at_most=0),
        Target(name="actions out of their chain", value=sum(one.actions_out_of_chain for one in results), at_most=0),
    ]


def report_of(options: argparse.Namespace, plan: ScalePlan) -> BenchmarkReport:
    """Measure, and describe."""
    results, broker = run_with_uvloop(measure(plan, options.shards))
    rows: list[dict[str, Any]] = [msgspec.structs.asdict(one) for one in results]
    text = formatted(rows, COLUMNS) + "\nbroker {broker_cpu_percent:.1f} % of a core, {broker_rss_mb:.0f} MB".format(
        **broker
    )
    figures = {"shards": results, **broker, "policy": plan.policy, "seconds": plan.seconds, "spread_s": plan.spread_s}
    return BenchmarkReport(figures, text, targets_of(results))


def main() -> int:
    """Measure, print, write; 1 when a window was not decided, 2 when there is nothing to judge."""
    parser = benchmark_parser(
        *("scale.shards", __doc__),
        ("--shards", 2, "accounts, each with an arbitrator"),
        ("--workers", 20_000, "of all shards"),
        ("--jobs", 2, "of all shards"),
        ("--rate", 1.0, "windows per second of each job"),
        ("--seconds", 60.0, "judged"),
        ("--policy", "rule", "of all jobs"),
        ("--spread", 0.0, "seconds over which the nodes send a window's states; 0: all at once"),
    )
    options = parser.parse_args()
    try:
        plan = plan_of(options)
    except ValueError as error:
        parser.error(str(error))
    return run_benchmark("scale.shards", options, lambda: report_of(options, plan))


def plan_of(options: argparse.Namespace) -> ScalePlan:
    """What each shard runs. Raises ValueError, naming the value, for what cannot be divided or run."""
    if options.shards < 1 or options.workers % options.shards or options.jobs % options.shards:
        raise ValueError(
            f"--shards must divide --workers {options.workers} and --jobs {options.jobs}, {options.shards} does not"
        )
    return ScalePlan(
        workers=options.workers // options.shards,
        jobs=options.jobs // options.shards,
        rate=options.rate,
        seconds=options.seconds,
        policy=options.policy,
        spread_s=options.spread,
    )


if __name__ == "__main__":
    sys.exit(main())
