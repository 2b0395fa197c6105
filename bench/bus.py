"""The bus and what hangs on it: `python -m bench.bus [throughput] [scale] [replay]`; without a word: all three.

throughput  half a minute: what our bus costs beside bare nats-py, in pairs over one broker, one process, uvloop, a
            state message of 8 ranks. consume: `Bus.consume` and `codec.decode` against a pipelined pull by hand of the
            SAME stored messages, decoded with the same codec. publish: `Bus.publish_bytes_soon` against core publishing
            of the same bytes and headers whose acknowledgements are counted; ours keeps each message until it is
            acknowledged and would publish it again. The third row also encodes the message; it has no target.
scale       eight minutes: one arbitrator from 32 to 10,000 workers, eight to a node, by two policies. The real
            arbitrator in one process, a generator that plays all trainers and collectors, and a reader of the actions.
            A decision's latency runs from the broker's time of the last state of a window to that of its action; all
            nodes send their states at once, as after a barrier. A generator that does not keep its rate ends the
            measurement.
replay      a minute: how fast a generated capture (bench.jobs) replays into each service, in this process; the best of
            three, which must come out equal.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import nats
import numpy as np
from bench.harness import (
    BenchmarkError,
    Cell,
    Panel,
    Report,
    Rounds,
    Table,
    Target,
    Timed,
    Timing,
    broker_with_bus,
    connected,
    parser,
    run,
    run_with_uvloop,
)
from bench.jobs import RANKS_PER_NODE, Load, Parcel, job_of, parcel, write_recording
from nats.aio.client import Client
from nats.aio.msg import Msg

from dynamix.cli.services import ServiceProcess, bus_environment, wait_until_ready
from dynamix.collector.procfs import Proc
from dynamix.recording.replay import ReplayTarget, replay
from dynamix.runtime.bus import Bus
from dynamix.runtime.die_with_parent import begin_worker
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, State
from dynamix.schemas.streams import ACTIONS, FEED

MIB = 1 << 20
MIN_RATIO = 0.6
"""Target: messages a second over those of the bare client."""
MAX_P95_MS = 100.0
MIN_TIMES_REAL_TIME = 50.0
FLUSH_S = 60.0


# --- throughput ------------------------------------------------------------------------------------------------------

STATES = subjects.of("state", subjects.ANY, subjects.ANY)
BATCH = 512
"""Messages of a request; two requests are always open, so that the broker never waits."""


async def _read_with_bus(bus: Bus, num_states: int) -> None:
    async with bus.consume(FEED.name, [STATES], start=1) as consumer:
        async for batch in consumer:
            for message in batch:
                decode(State, message.subject, message.payload)
            num_states -= len(batch)
            if num_states <= 0:
                return


async def _read_raw(client: Client, num_states: int, number: int) -> None:
    """Read the same states by hand, which is what reading a stream costs at least in this language."""
    inbox, done, name = client.new_inbox(), asyncio.Event(), f"raw-{number}"
    missing, asked = num_states, 0

    async def ask() -> None:
        nonlocal asked
        asked += BATCH
        request = {"batch": BATCH, "expires": 30 * 10**9}
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{FEED.name}.{name}", json.dumps(request).encode(), inbox)

    async def on_message(message: Msg) -> None:
        nonlocal missing, asked
        if not message.reply:
            return  # a request that ended
        decode(State, message.subject, message.data)
        missing -= 1
        asked -= 1
        if missing == 0:
            done.set()
        elif asked <= BATCH:
            await ask()

    subscription = await client.subscribe(inbox, cb=on_message)
    config = {
        "name": name,
        "ack_policy": "none",
        "deliver_policy": "all",
        "mem_storage": True,
        "inactive_threshold": 5 * 10**9,
        "filter_subject": STATES,
    }
    body = json.dumps({"stream_name": FEED.name, "config": config}).encode()
    reply = await client.request(f"$JS.API.CONSUMER.CREATE.{FEED.name}.{name}", body, timeout=5)
    if error := json.loads(reply.data).get("error"):
        raise BenchmarkError(f"the broker makes no consumer of {FEED.name}: {error}")
    await ask()
    await ask()
    async with asyncio.timeout(120):
        await done.wait()
    await subscription.unsubscribe()


async def _publish_raw(client: Client, parcels: Sequence[Parcel]) -> None:
    """Core publishing of the same bytes and headers; counts acknowledgements."""
    inbox, done, missing = client.new_inbox(), asyncio.Event(), len(parcels)

    async def count(_message: Msg) -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            done.set()

    subscription = await client.subscribe(inbox, cb=count)
    for subject, payload, message_id in parcels:
        await client.publish(subject, payload, inbox, {"Nats-Msg-Id": message_id})
    await done.wait()
    await subscription.unsubscribe()


@contextlib.asynccontextmanager
async def raw_client(settings: BusSettings) -> AsyncIterator[Client]:
    """nats-py without our bus."""
    client = await nats.connect(settings.url, user=settings.user, password=settings.password)
    try:
        yield client
    finally:
        await client.close()


class Arms:
    """Our bus and the bare client on one broker."""

    def __init__(self, bus: Bus, raw: Client, num_messages: int) -> None:
        self.first = next(Load(job_of("bench-0a1b2c3d", RANKS_PER_NODE, "static")).states(0))
        self.num_messages, self.num_read = num_messages, 2 * num_messages  # reading is faster: runs are about as long
        self._bus, self._raw, self._numbers = bus, raw, itertools.count(1)

    def unseen(self, count: int) -> list[State]:
        """States that the stream has not: an equal identity would be dropped as a duplicate, and cost less."""
        state = msgspec.structs.replace(self.first, generation=next(self._numbers))
        # a stream keeps the newest 4,096 of a subject
        nodes = [f"{state.node}-{state.generation}-{window // 4096}" for window in range(count)]
        return [msgspec.structs.replace(state, window=window, node=node) for window, node in enumerate(nodes)]

    async def run(self, row: str, arm: str) -> Timing:
        """One run; what it needs is made before its time begins."""
        if row == "consume":
            work = (
                _read_with_bus(self._bus, self.num_read)
                if arm == "ours"
                else _read_raw(self._raw, self.num_read, next(self._numbers))
            )
            with Timed(self.num_read) as done:
                await work
            return done.timing
        states = self.unseen(self.num_messages)
        parcels = [parcel(state) for state in states]
        with Timed(self.num_messages) as done:
            if arm == "raw":
                await _publish_raw(self._raw, parcels)
            else:
                await self.publish(parcels if row == "publish" else states)
        return done.timing

    async def publish(self, messages: Sequence[Parcel] | Sequence[State]) -> None:
        """Publish what is encoded, or encode it, too; until all is acknowledged."""
        for one in messages:
            if isinstance(one, Parcel):
                await self._bus.publish_bytes_soon(*one)
            else:
                await self._bus.publish_soon(one)
        assert await self._bus.flush(FLUSH_S)


async def throughput(num_pairs: int, num_messages: int) -> Report:
    """All comparisons over one broker."""
    async with broker_with_bus("bench") as (server, bus), raw_client(server.settings) as raw:
        arms = Arms(bus, raw, num_messages)
        await arms.publish([parcel(state) for state in arms.unseen(arms.num_read)])
        found = {
            row: Rounds(("ours", "raw"), num_pairs, label=row) for row in ("consume", "publish", "encode, publish")
        }
        for row, rounds in found.items():
            for arm in rounds:
                rounds.record(await arms.run(row, arm))
    rows: list[list[Cell]] = [
        [
            name,
            *(rounds.median(arm, figure) for figure in ("per_s", "cpu_us") for arm in rounds.timings),
            rounds.ratio("per_s"),
        ]
        for name, rounds in found.items()
    ]
    size = len(parcel(arms.first).payload)
    note = f"A state of {RANKS_PER_NODE} ranks has {size} bytes; {num_pairs} pairs, their range."
    columns = ["", "ours / s", "raw / s", "CPU us a message, ours", "raw", "ratio"]
    targets = [
        Target(f"{name}, over raw", found[name].ratio("per_s").value, at_least=MIN_RATIO)
        for name in ("consume", "publish")
    ]
    return Report([Table("bus", columns, rows, [note])], targets)


# --- scale -----------------------------------------------------------------------------------------------------------

SIZES, POLICIES = (32, 128, 1024, 10_000), ("static", "rule")
"""`static` decides nothing: its cost is that of moving and folding the messages."""
WARM_UP_WINDOWS = 5
LEAD_S, LAST_DECISIONS_S = 0.5, 30.0
OWN = {"DYNAMIX_NODE": "scale", "DYNAMIX_LOG_LEVEL": "error"}


class ScalePlan(NamedTuple):
    """One measurement: a window a second of each job."""

    workers: int
    jobs: int
    policy: str
    seconds: float

    @property
    def num_windows(self) -> int:
        """Windows of each job, with those to warm up."""
        return WARM_UP_WINDOWS + max(2, round(self.seconds))


class Sent(NamedTuple):
    """One window of one job, as it was published; monotonic times in seconds."""

    job: str
    window: int
    due_s: float
    begun_s: float
    stored_ns: int
    """When the broker stored the last of its states, since the Unix epoch."""


def generate(plan: ScalePlan, settings: BusSettings) -> list[Sent]:
    """Play all trainers and collectors, for a process of its own."""
    return run_with_uvloop(_generate(plan, settings))


async def _generate(plan: ScalePlan, settings: BusSettings) -> list[Sent]:
    sent = list[Sent]()
    names = [f"scale-{number:04d}-0a1b2c3d" for number in range(plan.jobs)]
    jobs = [job_of(name, plan.workers // plan.jobs, plan.policy) for name in names]
    loads = {job.job: Load(job) for job in jobs}

    async def record(job: str, window: int, due_s: float, begun_s: float, stored: list[asyncio.Future[int]]) -> None:
        """When all states are acknowledged, ask the broker when it stored the last one."""
        last = max(await asyncio.gather(*stored))
        found = await bus.first(FEED.name, subjects.of("state", job, subjects.ANY), start=last)
        if found is None or found.sequence != last:
            raise BenchmarkError(f"{FEED.name} no longer holds {last}")
        sent.append(Sent(job, window, due_s, begun_s, found.timestamp_ns))

    async def play(job: str, begin_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for window in range(plan.num_windows):
                parcels = [parcel(state) for state in loads[job].states(window)]  # encoded before they are due
                due_s = begin_s + window
                await asyncio.sleep(due_s - time.monotonic())
                begun_s = time.monotonic()
                stored = [await bus.publish_bytes_soon(*one) for one in parcels]
                tasks.create_task(record(job, window, due_s, begun_s, stored))

    async with connected(settings, "scale-generator") as bus:
        for job in jobs:
            await bus.publish(job)
        begin_s = time.monotonic() + LEAD_S
        async with asyncio.TaskGroup() as tasks:
            for at, name in enumerate(names):
                tasks.create_task(play(name, begin_s + at / len(names)))
        if not await bus.flush(FLUSH_S):
            raise BenchmarkError(f"the broker did not acknowledge everything within {FLUSH_S:g} s")
        return sent


class Meter:
    """Samples CPU time and memory of processes once a second, and the actions as trainers read them."""

    def __init__(self, bus: Bus, pids: dict[str, int]) -> None:
        self.cpu_s: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}
        self.resident: dict[str, int] = {}
        self.decided: dict[tuple[str, int], int] = {}
        """When the action of a job's window was stored, in nanoseconds since the Unix epoch."""
        self.num_out_of_chain = 0
        self.listening = asyncio.Event()
        self._bus, self._pids, self._hashes = bus, pids, dict[str, bytes]()

    async def sample(self) -> None:
        """Sample until cancelled."""
        proc = Proc()
        while True:
            for name, pid in self._pids.items():
                cpu_s = proc.family(pid).cpu_ticks / proc.ticks_per_s
                self.cpu_s[name].append((time.monotonic(), cpu_s))
                self.resident[name] = proc.resident_bytes(pid)
            await asyncio.sleep(1)

    async def follow(self) -> None:
        """Read actions until cancelled."""
        async with self._bus.consume(ACTIONS.name, [subjects.of("action", subjects.ANY)], start="new") as consumer:
            self.listening.set()
            async for batch in consumer:
                for message in batch:
                    action = decode(Action, message.subject, message.payload)
                    follows = action.previous_hash == self._hashes.get(action.job, b"")
                    self.num_out_of_chain += not follows or (action.job, action.window) in self.decided
                    self._hashes[action.job] = action.hash
                    self.decided[action.job, action.window] = message.timestamp_ns

    def spent_s(self, name: str, begin_s: float, end_s: float) -> float:
        """CPU time between two moments, interpolated between samples."""
        before, after = np.interp([begin_s, end_s], *np.transpose(self.cpu_s[name]))
        return float(after - before)


async def scale_point(plan: ScalePlan) -> tuple[list[Cell], dict[str, float]]:
    """One row of the table, and the figures that growth and targets are judged by."""
    context = multiprocessing.get_context("spawn")
    async with broker_with_bus("scale") as (server, bus):
        arbitrator = ServiceProcess("arbitrator", {**bus_environment(server.settings), **OWN})
        arbitrator.start()
        meter = Meter(bus, {"arbitrator": arbitrator.pid, "broker": server.pid})
        background = list[asyncio.Task[None]]()
        try:
            await wait_until_ready(bus, ["arbitrator"])
            background += [asyncio.create_task(meter.follow()), asyncio.create_task(meter.sample())]
            await meter.listening.wait()
            with ProcessPoolExecutor(1, context, initializer=begin_worker, initargs=(os.getpid(),)) as pool:
                work = asyncio.get_running_loop().run_in_executor(pool, generate, plan, server.settings)
                sent = await work
            num_expected = plan.jobs * plan.num_windows
            with contextlib.suppress(TimeoutError):  # what is missing then is missing
                async with asyncio.timeout(LAST_DECISIONS_S):
                    while len(meter.decided) < num_expected:  # noqa: ASYNC110 - no event tells
                        await asyncio.sleep(0.1)
            await asyncio.sleep(1)  # the last sample
            for task in background:
                if task.done():
                    task.result()
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            arbitrator.stop()
    judged = [one for one in sent if one.window >= WARM_UP_WINDOWS]
    late_s = max(one.begun_s - one.due_s for one in judged)
    if late_s >= 1:
        raise BenchmarkError(f"the generator was late by {late_s:.2f} s: take fewer --workers or a quieter machine")
    waits_ms = [
        (meter.decided[one.job, one.window] - one.stored_ns) / 1e6
        for one in judged
        if (one.job, one.window) in meter.decided
    ]
    p50, p95, p99 = np.percentile(waits_ms or [math.nan], [50, 95, 99]).tolist()
    begin_s, end_s = min(one.due_s for one in judged), max(one.due_s for one in judged) + 1
    cpu = {name: 100 * meter.spent_s(name, begin_s, end_s) / (end_s - begin_s) for name in meter.cpu_s}
    missing = num_expected - len(meter.decided)
    figures = {"p50": p50, "p95": p95, "cpu": cpu["arbitrator"], "bad": missing + meter.num_out_of_chain}
    return [
        *(plan.policy, plan.workers, plan.jobs, f"{p50:.1f} / {p95:.1f} / {p99:.1f}", cpu["arbitrator"]),
        *(meter.resident["arbitrator"] / MIB, cpu["broker"]),
    ], figures


def scale(sizes: Sequence[int], policies: Sequence[str], jobs: int, seconds: float) -> Report:
    """Measure all sizes under all policies, one after the other."""
    rows, targets, curves = list[list[Cell]](), list[Target](), dict[str, list[tuple[float, float]]]()
    for policy in policies:
        found: dict[int, dict[str, float]] = {}
        for workers in sizes:
            row, found[workers] = run_with_uvloop(scale_point(ScalePlan(workers, jobs, policy, seconds)))
            rows.append(row)
            sys.stderr.write(f"  {' | '.join(map(str, row))}\n")
            label = f"{policy}, {workers:,} workers"
            targets.append(
                Target(f"{label}: p95 of the decision latency, ms", found[workers]["p95"], at_most=MAX_P95_MS)
            )
            targets.append(Target(f"{label}: windows not decided once, in order", found[workers]["bad"], at_most=0))
        curves[policy] = [(workers, figures["p50"]) for workers, figures in found.items()]
        for figure, name in (("cpu", "CPU time"), ("p50", "median latency")):
            low, high = found[sizes[0]][figure], found[sizes[-1]][figure]
            if low > 0 and high > 0 and len(sizes) > 1:  # below a tick of the clock is 0
                power = math.log(high / low) / math.log(sizes[-1] / sizes[0])
                targets.append(Target(f"{policy}: power of the workers that {name} grows with", power, at_most=1.0))
    columns = ["policy", "workers", "jobs", "latency p50 / p95 / p99, ms", "arbitrator, % of a core", "MiB"]
    columns.append("broker, % of a core")
    panel = Panel("Last state of a window to its action", "workers", "ms", dict(curves), logarithmic=True)
    return Report([Table("scale", columns, rows)], targets, [panel])


# --- replay ----------------------------------------------------------------------------------------------------------


def replays(num_workers: int, num_windows: int) -> Report:
    """Write a recording and replay it into every service."""
    rows, targets, equal = list[list[Cell]](), list[Target](), True
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recording.dxc"
        write_recording(path, num_workers=num_workers, num_windows=num_windows)
        services: tuple[ReplayTarget, ...] = ("collector", "reward", "arbitrator")
        for service in services:
            taken_s = []
            for _ in range(3):
                with Timed() as done:
                    outcome = replay(path, service)
                taken_s.append(done.timing.wall_s)
                equal &= outcome.bytes_equal
            times = outcome.recorded_s / min(taken_s)
            rows.append([service, min(taken_s), times])
            targets.append(Target(f"replay into {service}, x real time", times, at_least=MIN_TIMES_REAL_TIME))
        note = f"{num_workers} workers, {num_windows} windows, {path.stat().st_size / 1e6:.1f} MB."
    targets.append(Target("replays equal", float(equal), at_least=1))
    return Report([Table("replay", ["into", "seconds", "x real time"], rows, [note])], targets)


PARTS = ("throughput", "scale", "replay")


def measure(options: argparse.Namespace) -> Report:
    """Measure the chosen parts, one after the other."""
    reports = []
    for part in options.part or PARTS:
        if part == "throughput":
            reports.append(run_with_uvloop(throughput(options.pairs, options.messages)))
        elif part == "scale":
            sizes = sorted(options.workers or SIZES)
            reports.append(scale(sizes, options.policy or POLICIES, options.jobs, options.seconds))
        else:
            reports.append(replays(options.recorded_workers, options.windows))
    return Report(
        [one for report in reports for one in report.tables],
        [one for report in reports for one in report.targets],
        [one for report in reports for one in report.panels],
    )


def main() -> int:
    """Measure, print, write; 1 when a target is missed."""
    made = parser(
        *("bus", __doc__),
        ("--pairs", 9, "pairs per comparison of throughput"),
        ("--messages", 10_000, "published per run of it; twice as many are read"),
        ("--seconds", 40.0, "judged of each size of scale"),
        ("--jobs", 1, "that share the workers of scale"),
        ("--recorded-workers", 1000, "of the replayed job"),
        ("--windows", 120, "of the replayed job, one a second"),
    )
    made.add_argument("part", nargs="*", choices=[*PARTS, []], help="(default: all)")
    made.add_argument("--workers", type=int, action="append", help="a size of scale; may be repeated")
    made.add_argument("--policy", action="append", help="of scale; may be repeated")
    options = made.parse_args()
    if min(options.pairs, options.messages, options.jobs, *(options.workers or [1])) < 1:
        made.error("--pairs, --messages, --jobs and --workers are at least 1")
    return run("bus", options, lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
