"""Made-up jobs: what their nodes send, a whole one as a capture, and a steady one beside the real services.

A job has nodes of eight ranks of four speeds. Values differ between nodes and windows: a few variants are made
beforehand and used in turn. Sizes do not follow the decisions: what an arbitrator decides costs it the same.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from bench.harness import BenchmarkError

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.cli.services import SERVICES, ServiceProcess, bus_environment, wait_until_ready
from dynamix.collector.window import Observation, metric_window, read_network
from dynamix.recording.capture import CaptureHeader, CaptureWriter, Record
from dynamix.reward.formula import Weights, reward_of
from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import codec, subjects
from dynamix.schemas.features import state_of
from dynamix.schemas.messages import (
    Action,
    Applied,
    GradientNoise,
    Job,
    JobTotals,
    Message,
    MetricWindow,
    NetworkMetrics,
    NodeMetrics,
    NodeRanks,
    RankRow,
    Report,
    Reward,
    State,
    SystemMetrics,
)
from dynamix.schemas.streams import ACTIONS
from dynamix.schemas.subjects import BY_STRUCT

RANKS_PER_NODE = 8
LOCAL_BATCH_SIZE = 96
WINDOW_STEPS = 20
STEP_TIME_S = 0.16
NUM_VARIANTS = 4
"""Different windows of a node."""


def job_of(name: str, num_workers: int, policy: str) -> Job:
    """A job of so many ranks, eight to a node."""
    ranks = range(num_workers)
    nodes = tuple(
        NodeRanks(node=f"node-{start // RANKS_PER_NODE}", ranks=tuple(ranks[start : start + RANKS_PER_NODE]))
        for start in ranks[::RANKS_PER_NODE]
    )
    return Job(
        job=name,
        generation=0,
        phase="running",
        world_size=num_workers,
        nodes=nodes,
        window_steps=WINDOW_STEPS,
        initial_local_batch_sizes=(LOCAL_BATCH_SIZE,) * num_workers,
        base_global_batch_size=LOCAL_BATCH_SIZE * num_workers,
        min_local_batch_size=32,
        max_local_batch_sizes=(1024,) * num_workers,
        optimizer_family="sgd",
        policy=policy,
        seed=0,
    )


class NodeWindow(NamedTuple):
    """The measurements of one node in one window."""

    report: Report
    systems: Mapping[int, SystemMetrics]
    """By rank."""
    node: NodeMetrics

    def at(self, window: int) -> "NodeWindow":
        """The same measurements as those of another window."""
        totals = msgspec.structs.replace(self.report.totals, window=window)
        report = msgspec.structs.replace(self.report, window=window, totals=totals)
        return self._replace(report=report)

    def collected(self) -> MetricWindow:
        """The messages that the node's collector publishes."""
        network = read_network(self.report, self.node)
        return metric_window(self.report, Observation(systems=self.systems, node=self.node, network=network))


def node_window(job: Job, node: NodeRanks, rng: np.random.Generator) -> NodeWindow:
    """A node's first window, with 5 % noise on every compute time and a noise scale that differs between draws."""
    global_batch_size = sum(job.initial_local_batch_sizes)
    num_samples = global_batch_size * job.window_steps
    noise_scale, squared_norm = global_batch_size * rng.uniform(0.5, 2.0), 0.06 / job.world_size
    report = Report(
        job=job.job,
        generation=0,
        window=0,
        node=node.node,
        optimizer_family=job.optimizer_family,
        samples_seen=num_samples,
        rows=tuple(_row(job, rank, rng) for rank in node.ranks),
        totals=JobTotals(
            window=0,
            num_steps=job.window_steps,
            num_samples=num_samples,
            global_batch_size=global_batch_size,
            loss_sum=1.2 * num_samples,
            num_correct=0.55 * num_samples,
            time_s=STEP_TIME_S * job.window_steps,
            noise=GradientNoise(trace=noise_scale * squared_norm, squared_norm=squared_norm),
        ),
    )
    systems = {
        rank: SystemMetrics(cpu_time_ratio=1 + rng.random(), memory_bytes=3 << 30, memory_ratio=0.11)
        for rank in node.ranks
    }
    return NodeWindow(report, systems, NodeMetrics(load_per_cpu=0.7 + 0.1 * rng.random(), memory_used_ratio=0.4))


def _row(job: Job, rank: int, rng: np.random.Generator) -> RankRow:
    compute_s = 0.03 * (1 + rank % 4) * (1 + 0.05 * float(rng.standard_normal()))
    num_samples = LOCAL_BATCH_SIZE * job.window_steps
    return RankRow(
        rank=rank,
        local_rank=rank % RANKS_PER_NODE,
        pid=1000 + rank,
        pid_start_ticks=5000,
        pid_namespace=4026531836,
        uid=1000,
        local_batch_size=LOCAL_BATCH_SIZE,
        pending_local_batch_size=LOCAL_BATCH_SIZE,
        num_samples=num_samples,
        loss_sum=num_samples * (1.2 + 0.05 * float(rng.standard_normal())),
        num_correct=float(rng.binomial(num_samples, 0.55)),
        data_time_s=0.004 * job.window_steps,
        compute_time_s=compute_s * job.window_steps,
        sync_time_s=max(0.005, 0.14 - compute_s) * job.window_steps,
        update_time_s=0.006 * job.window_steps,
        sockets=NetworkMetrics(tx_bytes=48_123_456 + rank, rx_bytes=47_987_654, retransmits=rank % 8, srtt_us=212.5),
        sockets_before=NetworkMetrics(tx_bytes=0, rx_bytes=0, retransmits=0),
    )


class Parcel(NamedTuple):
    """A message ready to be published."""

    subject: str
    payload: bytes
    message_id: str


class Load:
    """The messages that the nodes of one job send."""

    def __init__(self, job: Job, *, num_variants: int = NUM_VARIANTS) -> None:
        rng = np.random.default_rng(0)
        self._windows = [[node_window(job, node, rng).collected() for node in job.nodes] for _ in range(num_variants)]
        self._states = [[state_of(window) for window in windows] for windows in self._windows]

    def states(self, window: int) -> Iterator[State]:
        """The state of each node for a window."""
        for state in self._states[window % len(self._states)]:
            yield msgspec.structs.replace(state, window=window)

    def windows(self, window: int) -> Iterator[MetricWindow]:
        """The metric window of each node, from which its state is made."""
        for measured in self._windows[window % len(self._windows)]:
            yield msgspec.structs.replace(measured, window=window)

    def rewards(self, window: int) -> Iterator[Reward]:
        """The rewards of each node's ranks."""
        for metrics in self.windows(window):
            yield reward_of(metrics, Weights())


def parcel(message: Message) -> Parcel:
    """Encode a message and name it, as the bus would."""
    return Parcel(subjects.subject_of(message), codec.encode(message), codec.message_id(message))


# --- a whole job as a capture ----------------------------------------------------------------------------------------

BEGIN_NS, PERIOD_NS, STEP_NS = 1_795_000_000 * 10**9, 10**9, 1000
"""The first window's time, one window a second, and a microsecond between two messages of a window."""
LAG = 2
"""Windows from a decision to its effect."""


class StreamRecorder:
    """Stores messages in a capture as a broker would: a sequence for each in its stream, and the time."""

    def __init__(self, writer: CaptureWriter) -> None:
        self.now_ns = BEGIN_NS
        self._writer = writer
        self._sequences: dict[str, int] = {}

    def store(self, message: Message) -> int:
        """Append a message; its sequence."""
        stream = BY_STRUCT[type(message)].carrier
        sequence = self._sequences[stream] = self._sequences.get(stream, 0) + 1
        self.now_ns += STEP_NS
        named = (subjects.subject_of(message), codec.message_id(message), codec.encode(message))
        self._writer.write_record(Record(stream, sequence, self.now_ns, *named))
        return sequence


def write_recording(path: Path, *, num_workers: int, num_windows: int) -> None:
    """Write a capture of a job from its start to its end.

    Every message is what the services' own functions give for the one before it: a replay of it must be equal.
    """
    job = job_of("bench-0a1b2c3d", num_workers, "rule")
    generators = [np.random.default_rng((0, index)) for index in range(len(job.nodes))]
    variants = [
        [node_window(job, node, rng) for _ in range(NUM_VARIANTS)]
        for node, rng in zip(job.nodes, generators, strict=True)
    ]
    fold, decided = Fold(job, policy_named(job.policy), None), list[Action]()
    with CaptureWriter(path, CaptureHeader.of(job.job)) as writer:
        recorder = StreamRecorder(writer)
        recorder.store(job)
        for number in range(num_windows):
            recorder.now_ns = max(recorder.now_ns, BEGIN_NS + number * PERIOD_NS)
            nodes = [node[number % NUM_VARIANTS].at(number) for node in variants]
            for node in nodes:
                recorder.store(node.report)
            windows = [node.collected() for node in nodes]
            for window in windows:
                recorder.store(window)
                state = state_of(window)
                fold.add_state(recorder.store(state), state)
            while (action := fold.close()) is not None:
                recorder.store(action)
                fold.adopt(action)
                decided.append(action)
            for window in windows:
                recorder.store(reward_of(window, Weights()))
            if number >= LAG:
                action = decided[number - LAG]
                applied = Applied(
                    job=job.job,
                    generation=action.generation,
                    decided_window=action.window,
                    effective_window=number,
                    effective_step=number * job.window_steps,
                    local_batch_sizes=action.local_batch_sizes,
                    action_hash=action.hash,
                )
                recorder.store(applied)
        recorder.store(msgspec.structs.replace(job, phase="ended", end_reason="finished"))


# --- a steady job beside the real services ---------------------------------------------------------------------------

EVERY_S = 0.2
"""Between two reports of the job."""
NODE = "node-0"


class SteadyJob:
    """One node of four ranks, whose reports wait for nothing; and what a trainer sees of the decisions.

    Attributes:
        reported_at: when each window was reported, by the loop's clock.
        decided_at: when the reader of ACTIONS had each window's action.
        actions: as they were read, in order.
    """

    def __init__(self, bus: Bus, *, reader: Bus | None = None, name: str = "steady-0a1b2c3d") -> None:
        """Report on `bus`, and read actions there or, where its user may not read ACTIONS, on `reader`."""
        self.job = job_of(name, 4, "rule")
        self.reported_at: list[float] = []
        self.decided_at: dict[int, float] = {}
        self.actions: list[Action] = []
        self._bus = bus
        self._reader = reader or bus
        self._measured = node_window(self.job, self.job.nodes[0], np.random.default_rng(0))
        self._unacknowledged: set[asyncio.Future[int]] = set()
        self._news = asyncio.Condition()
        self._loop = asyncio.get_running_loop()
        self._reporting = asyncio.Event()
        self._reporting.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Report during a block, from the first decision on."""
        await self._bus.publish(self.job)
        tasks = [asyncio.create_task(work) for work in (self._follow(), self._report())]
        try:
            await self.until_decided(0, timeout_s=60)
            yield
        finally:
            failed = [task for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in failed:
                task.result()

    async def _report(self) -> None:
        while True:
            await self._reporting.wait()
            window = len(self.reported_at)
            self.reported_at.append(self._loop.time())
            future = await self._bus.publish_soon(self._measured.at(window).report)
            self._unacknowledged.add(future)
            future.add_done_callback(self._unacknowledged.discard)
            await asyncio.sleep(EVERY_S)

    async def _follow(self) -> None:
        async with self._reader.consume(ACTIONS.name, [subjects.of("action", self.job.job)], start="all") as consumer:
            async for batch in consumer:
                async with self._news:
                    for message in batch:
                        action = codec.decode(Action, message.subject, message.payload)
                        self.actions.append(action)
                        self.decided_at.setdefault(action.window, self._loop.time())
                    self._news.notify_all()

    async def until_decided(self, window: int, timeout_s: float) -> None:
        """Wait for a window's action. Raises BenchmarkError when it does not come in time."""
        try:
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait_for(lambda: window in self.decided_at)
        except TimeoutError:
            raise BenchmarkError(f"window {window} was not decided in {timeout_s:g} s") from None

    @contextlib.asynccontextmanager
    async def paused(self, timeout_s: float) -> AsyncIterator[None]:
        """Report nothing during the block, which begins when all that was reported is stored and decided."""
        self._reporting.clear()
        try:
            await asyncio.gather(*self._unacknowledged)
            await self.until_decided(len(self.reported_at) - 1, timeout_s)
            yield
        finally:
            self._reporting.set()

    def waits_s(self, windows: range) -> list[float]:
        """The times from the reports of some windows to their actions here."""
        return [self.decided_at[window] - self.reported_at[window] for window in windows]

    def num_out_of_chain(self) -> int:
        """Actions that do not follow the one before them: 0 when each window was decided once, in order."""
        first = self.actions[0].window == 0 and not self.actions[0].previous_hash
        pairs = itertools.pairwise(self.actions)
        follow = [new.window == old.window + 1 and new.previous_hash == old.hash for old, new in pairs]
        return follow.count(False) + (not first)


@contextlib.asynccontextmanager
async def running_services(settings_of: Callable[[str], BusSettings], watcher: Bus) -> AsyncIterator[None]:
    """The services of one node, ready; each connects with the settings of its name, and none may end."""
    own = {"DYNAMIX_NODE": NODE, "DYNAMIX_LOG_LEVEL": "error"}
    services = [ServiceProcess(name, {**bus_environment(settings_of(name)), **own}) for name in SERVICES]
    try:
        for service in services:
            service.start()
        await wait_until_ready(watcher, SERVICES, timeout_s=120)
        try:
            yield
        finally:  # a service that ended may have caused the error
            ended = [f"{one.name} with code {one.exit_code()}" for one in services if one.exit_code() is not None]
            if ended:
                raise BenchmarkError(f"a service ended: {', '.join(ended)}; its log is above")
    finally:
        for service in services:
            service.stop()


@contextlib.asynccontextmanager
async def running_job(settings: BusSettings, bus: Bus) -> AsyncIterator[SteadyJob]:
    """The services and a steady job, from its first decision on."""
    job = SteadyJob(bus)
    async with running_services(lambda _: settings, bus), job.running():
        yield job
