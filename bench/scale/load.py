"""The load: the states of every node of a job, window after window, as its collectors would send them.

Values differ between nodes and windows: a few variants are made beforehand and taken in turn. Sizes do not follow the
decisions: what an arbitrator decides costs it the same whether or not anybody trains by it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from bench.node_window import metric_window
from bench.scale.plan import RANKS_PER_NODE

from dynamix.reward.formula import Weights, reward_of
from dynamix.schemas import codec, subjects
from dynamix.schemas.features import state_of
from dynamix.schemas.messages import Job, Message, MetricWindow, NodeRanks, RankMetrics, Reward, State

NUM_VARIANTS = 4
LOCAL_BATCH_SIZE = 96
WINDOW_STEPS = 20


class Parcel(NamedTuple):
    """A message ready to be published."""

    subject: str
    payload: bytes
    message_id: str


def job_of(name: str, num_workers: int, policy: str, seed: int = 0) -> Job:
    """A job of so many ranks, eight to a node."""
    starts = range(0, num_workers, RANKS_PER_NODE)
    return Job(
        job=name,
        generation=0,
        phase="running",
        world_size=num_workers,
        nodes=tuple(
            NodeRanks(
                node=f"node-{start // RANKS_PER_NODE}",
                ranks=tuple(range(start, min(start + RANKS_PER_NODE, num_workers))),
            )
            for start in starts
        ),
        window_steps=WINDOW_STEPS,
        initial_local_batch_sizes=(LOCAL_BATCH_SIZE,) * num_workers,
        base_global_batch_size=LOCAL_BATCH_SIZE * num_workers,
        min_local_batch_size=32,
        max_local_batch_sizes=(1024,) * num_workers,
        optimizer_family="sgd",
        policy=policy,
        seed=seed,
    )


class Load:
    """What the nodes of one job send."""

    def __init__(self, job: Job, *, seed: int = 0, num_variants: int = NUM_VARIANTS) -> None:
        rng = np.random.default_rng(seed)
        self._windows = [[_measured(job, node, rng) for node in job.nodes] for _ in range(num_variants)]
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


def _measured(job: Job, node: NodeRanks, rng: np.random.Generator) -> MetricWindow:
    """One node's window: ranks of four speeds, with 5 % noise on every time."""
    model = metric_window()
    ranks = tuple(_rank(model.ranks[0], rank, rng) for rank in node.ranks)
    total = sum(job.initial_local_batch_sizes)
    totals = msgspec.structs.replace(
        model.job_metrics,
        global_batch_size=total,
        num_samples=total * job.window_steps,
        noise_scale=total * rng.uniform(0.5, 2.0),
    )
    return msgspec.structs.replace(
        model, job=job.job, node=node.node, num_steps=job.window_steps, ranks=ranks, job_metrics=totals
    )


def _rank(model: RankMetrics, rank: int, rng: np.random.Generator) -> RankMetrics:
    compute_s = 0.03 * (1 + rank % 4) * (1 + 0.05 * float(rng.standard_normal()))
    training = msgspec.structs.replace(
        model.training,
        local_batch_size=LOCAL_BATCH_SIZE,
        pending_local_batch_size=LOCAL_BATCH_SIZE,
        num_samples=LOCAL_BATCH_SIZE * WINDOW_STEPS,
        compute_time_s=compute_s,
        sync_time_s=max(0.005, 0.14 - compute_s),
        step_time_s=0.16,
    )
    return msgspec.structs.replace(model, rank=rank, training=training)
