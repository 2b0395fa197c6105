"""A recording made without a broker: a job of any size, all its messages as its services would have stored them.

Every message is what the services' own functions give for the one before it, so that a replay of it must be equal.
"""

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from bench.scale.load import LOCAL_BATCH_SIZE, job_of

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.policies import policy_named
from dynamix.collector.probes import Evidence, read_network
from dynamix.collector.window import metric_window
from dynamix.recording.capture import CaptureHeader, CaptureWriter, Record, fingerprint
from dynamix.reward.formula import Weights, reward_of
from dynamix.schemas import codec, subjects
from dynamix.schemas.features import state_of
from dynamix.schemas.kinds import BY_STRUCT
from dynamix.schemas.messages import (
    Action,
    Applied,
    GradientNoise,
    Job,
    JobTotals,
    Message,
    MetricWindow,
    NodeMetrics,
    NodeRanks,
    RankRow,
    Report,
    SocketCounters,
    SystemMetrics,
)

BEGIN_NS = 1_795_000_000 * 10**9
PERIOD_NS = 10**9
"""One window a second."""
STEP_NS = 1000
"""Between two messages of a window."""
NUM_VARIANTS = 4
"""Different windows of a node, taken in turn."""
LAG = 2
"""Windows from a decision to its effect."""


class Recorder:
    """Stores messages as a broker would: a sequence for each in its stream, and the time."""

    def __init__(self, writer: CaptureWriter) -> None:
        self.now_ns = BEGIN_NS
        self._writer = writer
        self._sequences: dict[str, int] = {}

    def store(self, message: Message) -> int:
        """Append a message; its sequence."""
        stream = BY_STRUCT[type(message)].carrier
        sequence = self._sequences[stream] = self._sequences.get(stream, 0) + 1
        self.now_ns += STEP_NS
        self._writer.add(
            Record(
                stream,
                sequence,
                self.now_ns,
                subjects.subject_of(message),
                codec.message_id(message),
                codec.encode(message),
            )
        )
        return sequence


def header_of(job: Job) -> CaptureHeader:
    """The header of a capture made now."""
    created = dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return CaptureHeader(job=job.job, created=created, fingerprint=fingerprint())


def write_recording(path: Path, *, num_workers: int, num_windows: int, policy: str = "rule", seed: int = 0) -> None:
    """Write a capture of a job of nodes of eight ranks, one window a second, from its start to its end."""
    job = job_of("bench-0a1b2c3d", num_workers, policy)
    nodes = [_Node(job, node, np.random.default_rng((seed, index))) for index, node in enumerate(job.nodes)]
    fold = Fold(job, policy_named(policy), None)
    with CaptureWriter(path, header_of(job), overwrite=True) as writer:
        recorder = Recorder(writer)
        recorder.store(job)
        decided: list[Action] = []
        for window in range(num_windows):
            recorder.now_ns = max(recorder.now_ns, BEGIN_NS + window * PERIOD_NS)
            decided += _window(recorder, fold, [node.reported(window) for node in nodes])
            if window >= LAG:
                recorder.store(_applied(decided[window - LAG], job))
        recorder.store(msgspec.structs.replace(job, phase="ended", end_reason="finished"))


def _window(recorder: Recorder, fold: Fold, found: list[tuple[Report, MetricWindow]]) -> Iterator[Action]:
    """Store what comes of one window's reports; the decisions."""
    for report, _ in found:
        recorder.store(report)
    for _, window in found:
        recorder.store(window)
        state = state_of(window)
        fold.add(recorder.store(state), state)
    actions = []
    while (action := fold.close()) is not None:
        recorder.store(action)
        fold.adopt(action)
        actions.append(action)
    for _, window in found:
        recorder.store(reward_of(window, Weights()))
    return iter(actions)


class _Node:
    """One node's reports, and what its collector sees: a few variants, of ranks of four speeds."""

    def __init__(self, job: Job, node: NodeRanks, rng: np.random.Generator) -> None:
        self._variants = [_variant(job, node, rng) for _ in range(NUM_VARIANTS)]

    def reported(self, window: int) -> tuple[Report, MetricWindow]:
        """The report of a window, and the metric window that its collector makes of it."""
        report, systems, node = self._variants[window % NUM_VARIANTS]
        totals = msgspec.structs.replace(report.totals, window=window)
        report = msgspec.structs.replace(report, window=window, first_step=window * totals.num_steps, totals=totals)
        network = read_network(Evidence(report, node), "auto")
        return report, metric_window(report, systems=systems, node=node, network=network)


def _variant(
    job: Job, node: NodeRanks, rng: np.random.Generator
) -> tuple[Report, dict[int, SystemMetrics], NodeMetrics]:
    num_samples = sum(job.initial_local_batch_sizes) * job.window_steps
    report = Report(
        job=job.job,
        generation=0,
        window=0,
        node=node.node,
        optimizer_family=job.optimizer_family,
        first_step=0,
        epoch=0,
        samples_seen=num_samples,
        rows=tuple(_row(job, rank, rng) for rank in node.ranks),
        totals=JobTotals(
            window=0,
            num_steps=job.window_steps,
            num_samples=num_samples,
            global_batch_size=sum(job.initial_local_batch_sizes),
            loss_sum=1.2 * num_samples,
            num_correct=0.55 * num_samples,
            time_s=0.16 * job.window_steps,
            noise=GradientNoise(trace=120.0, squared_norm=0.06 / job.world_size),
        ),
    )
    systems = {
        rank: SystemMetrics(cpu_time_ratio=1 + rng.random(), memory_bytes=3 << 30, memory_ratio=0.11)
        for rank in node.ranks
    }
    return report, systems, NodeMetrics(load_per_cpu=0.7 + 0.1 * rng.random(), memory_used_ratio=0.4)


def _row(job: Job, rank: int, rng: np.random.Generator) -> RankRow:
    compute_s = 0.03 * (1 + rank % 4) * (1 + 0.05 * float(rng.standard_normal()))
    num_samples = LOCAL_BATCH_SIZE * job.window_steps
    now = SocketCounters(tx_bytes=48_123_456 + rank, rx_bytes=47_987_654, retransmits=rank % 8, srtt_us=212.5)
    return RankRow(
        rank=rank,
        local_rank=rank % 8,
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
        sockets=now,
        sockets_before=SocketCounters(tx_bytes=0, rx_bytes=0, retransmits=0),
    )


def _applied(action: Action, job: Job) -> Applied:
    effective = action.window + LAG
    return Applied(
        job=job.job,
        generation=action.generation,
        decided_window=action.window,
        effective_window=effective,
        effective_step=effective * job.window_steps,
        local_batch_sizes=action.local_batch_sizes,
        action_hash=action.hash,
    )
