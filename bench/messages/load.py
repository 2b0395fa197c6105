"""A job of nodes of eight ranks of four speeds: its specification, its reports, and all that its collectors would send.

Values differ between nodes and windows: a few variants are made beforehand and taken in turn. Sizes do not follow the
decisions: what an arbitrator decides costs it the same whether or not a job trains by it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dynamix.collector.probes import Evidence, read_network
from dynamix.collector.window import Observation, metric_window
from dynamix.reward.formula import Weights, reward_of
from dynamix.schemas import codec, subjects
from dynamix.schemas.features import state_of
from dynamix.schemas.messages import (
    GradientNoise,
    Job,
    JobTotals,
    Message,
    MetricWindow,
    NodeMetrics,
    NodeRanks,
    RankRow,
    Report,
    Reward,
    SocketCounters,
    State,
    SystemMetrics,
)

RANKS_PER_NODE = 8
LOCAL_BATCH_SIZE = 96
WINDOW_STEPS = 20
STEP_TIME_S = 0.16
NUM_VARIANTS = 4
"""Different windows of a node."""


def job_of(name: str, num_workers: int, policy: str, seed: int = 0, **changes: Any) -> Job:
    """A job of so many ranks, eight to a node; `changes` replace fields of its specification."""
    ranks = range(num_workers)
    nodes = tuple(
        NodeRanks(node=f"node-{start // RANKS_PER_NODE}", ranks=tuple(ranks[start : start + RANKS_PER_NODE]))
        for start in ranks[::RANKS_PER_NODE]
    )
    job = Job(
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
        seed=seed,
    )
    return msgspec.structs.replace(job, **changes)


class NodeWindow(NamedTuple):
    """What one node measured in one window."""

    report: Report
    systems: Mapping[int, SystemMetrics]
    """By rank."""
    node: NodeMetrics

    def at(self, window: int) -> "NodeWindow":
        """The same measurements as those of another window."""
        totals = msgspec.structs.replace(self.report.totals, window=window)
        first_step = window * totals.num_steps
        report = msgspec.structs.replace(self.report, window=window, first_step=first_step, totals=totals)
        return self._replace(report=report)

    def collected(self) -> MetricWindow:
        """What the node's collector publishes."""
        network = read_network(Evidence(self.report, self.node), "auto")
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
        first_step=0,
        epoch=0,
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
        sockets=SocketCounters(tx_bytes=48_123_456 + rank, rx_bytes=47_987_654, retransmits=rank % 8, srtt_us=212.5),
        sockets_before=SocketCounters(tx_bytes=0, rx_bytes=0, retransmits=0),
    )


class Parcel(NamedTuple):
    """A message ready to be published."""

    subject: str
    payload: bytes
    message_id: str


class Load:
    """What the nodes of one job send."""

    def __init__(self, job: Job, *, seed: int = 0, num_variants: int = NUM_VARIANTS) -> None:
        rng = np.random.default_rng(seed)
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
