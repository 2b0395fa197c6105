"""The virtual clock: what a step of N workers costs, by formulas. Pure.

    compute_i = slowdown_i * (overhead_i + max(b_i, saturation_i) / samples_per_s_i)
    ring:              C = 2 (N - 1) K * max(mean_i (l_i + s_i), max_i s_i),  s_i = congestion_i * M / (K N bandwidth_i)
    parameter server:  C = 2 K * max(l_0 + congestion_0 * N M / (K servers bandwidth), max_i (l_i + N s_i))
    exposed = max(C / K, C - overlap * max_i compute_i) + max_i (1 - cores_i) * quota_period_i
    step    = max_i compute_i + exposed + decision

l_i = congestion_i * latency is a message's latency on a worker's link, and s_i the time that the link takes to send its
part, an N-th of a bucket. A gradient of M bytes is sent in K buckets, one after the other. The first is ready when the
share `overlap` of the slowest worker's computing is left, the last when it ends, the others evenly between them: what
is longer than that share is exposed, and the last bucket always is.

A ring all-reduce moves each bucket twice around, in 2 (N - 1) rounds. A part continues when it has arrived, so a round
takes the mean time of a message over all links, unless one link has to send for longer. With links alike that is
C = 2 (N - 1) / N * M / bandwidth + 2 (N - 1) K latency; one slow link hides the latencies. With parameter servers all
workers push to and pull from each server at once: its link carries N parts (incast), and is congested (congestion_0)
where the whole network is. A congested link has its bandwidth divided and its latency multiplied.

Where a codec, local steps or another route is active, `exchange` has the formulas of C and of the exposed part; those
of a ring are the same.

A straggler and the jitter of a step slow all of a worker's computing, its overhead too. The parts are those of the real
clock (`dynamix.trainer.gradient.clock`): data 0, compute, sync = waiting for the slowest and the exposed
communication, update = the cost of a decision. The optimizer's own time belongs to `overhead_s`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .exchange import Array64, StepTraffic, exchange_times_s
from .scenario import BYTES_PER_MBIT, Scenario

Sizes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

SLOW, CONGESTED, JITTER, LABELS = range(4)
"""Kinds of random numbers, each with separate generators."""

JITTER_BLOCK = 256
"""Steps drawn at once: a generator costs some 20 us to make."""


class Conditions(NamedTuple):
    """Conditions of each worker in one step; float64, one per worker."""

    slowdown: Array64
    """Factor on its compute time: straggling and jitter."""
    congestion: Array64
    """Factor that its link's bandwidth is divided by, and its latency multiplied."""
    congested: Flags


class Disturbances:
    """The disturbances of a scenario under one seed. Time must not run backwards between two calls."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        count = scenario.world_size
        stragglers, congestion = scenario.stragglers, scenario.congestion
        self._ones = np.ones(count)
        self._clear = np.zeros(count, dtype=bool)
        self._slow_factor = self._congestion_factor = 1.0
        self._slow = self._congested = None
        self._seed, self._jitter = seed, 0.0 if stragglers is None else stragglers.jitter
        self._block, self._factors = -1, self._ones
        if stragglers is not None and stragglers.factor > 1:
            self._slow_factor = stragglers.factor
            self._slow = Switching(seed, SLOW, count, off_s=stragglers.mean_normal_s, on_s=stragglers.mean_slow_s)
        if congestion is not None:
            self._congestion_factor = congestion.factor
            links = 1 if congestion.shared else count
            off_s, on_s = congestion.mean_clear_s, congestion.mean_congested_s
            self._congested = Switching(seed, CONGESTED, links, off_s=off_s, on_s=on_s)

    def at(self, step: int, time_s: float) -> Conditions:
        """The conditions of a step that begins at `time_s`, until its end."""
        slowdown = self._jitter_of(step) if self._jitter > 0 else self._ones
        if self._slow is not None:
            slowdown = np.where(self._slow.at(time_s), self._slow_factor * slowdown, slowdown)
        if self._congested is None:
            return Conditions(slowdown, self._ones, self._clear)
        congested = np.logical_or(self._clear, self._congested.at(time_s))
        return Conditions(slowdown, np.where(congested, self._congestion_factor, 1.0), congested)

    def _jitter_of(self, step: int) -> Array64:
        """Lognormal factors of median 1, one per worker."""
        block, row = divmod(step, JITTER_BLOCK)
        if block != self._block:
            draws = generator(self._seed, JITTER, block).standard_normal((JITTER_BLOCK, len(self._ones)))
            self._block, self._factors = block, np.exp(self._jitter * draws)
        factors: Array64 = self._factors[row]
        return factors


class Switching:
    """Two-state Markov processes in continuous time, one for each index: exponential stays, off and on in turn.

    They begin in their stationary distribution. Each draws from its own generator, in the order of its switches, so
    that its path does not depend on when it is looked at.
    """

    def __init__(self, seed: int, kind: int, count: int, *, off_s: float, on_s: float) -> None:
        self._mean_s = (off_s, on_s)
        self._generators = [generator(seed, kind, index) for index in range(count)]
        share = on_s / (off_s + on_s)
        self._on = np.array([drawn.random() < share for drawn in self._generators], dtype=bool)
        self._next_s = np.array([self._stay_s(index) for index in range(count)])
        self._soonest_s = float(self._next_s.min())

    def at(self, time_s: float) -> Flags:
        """Which are on at a time, not earlier than the last call's. Costs a comparison while nothing switches."""
        while self._soonest_s <= time_s:
            for index in np.flatnonzero(self._next_s <= time_s).tolist():
                self._on[index] = not self._on[index]
                self._next_s[index] += self._stay_s(index)
            self._soonest_s = float(self._next_s.min())
        return self._on

    def _stay_s(self, index: int) -> float:
        return float(self._generators[index].exponential(self._mean_s[int(self._on[index])]))


def generator(seed: int, kind: int, index: int) -> np.random.Generator:
    """A counter-based generator (Philox) for one purpose: equal keys, equal numbers, on every machine."""
    key = np.array([seed, (kind << 56) | index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


class StepTiming(NamedTuple):
    """Parts of the time of one step, in seconds; arrays hold one number per worker."""

    compute_s: Array64
    sync_s: Array64
    update_s: float
    step_s: float
    communication_s: float
    """C, the exposed part and the hidden one."""

    def seconds_per_sample(self, sizes: Sequence[int]) -> list[float]:
        """Compute time over samples, as workers exchange it; 0 where a worker had none."""
        return [time_s / size if size else 0.0 for time_s, size in zip(self.compute_s.tolist(), sizes, strict=True)]


class ComputeTimes(NamedTuple):
    """Seconds that each worker computes on `size` samples: max(least_s, fixed_s + s_per_sample * size)."""

    least_s: Array64
    fixed_s: Array64
    s_per_sample: Array64

    def of(self, sizes: Array64 | Sizes) -> Array64:
        """The seconds of each worker on its own number of samples."""
        return np.maximum(self.least_s, self.fixed_s + self.s_per_sample * sizes)


class VirtualClock:
    """The formulas with one scenario's numbers."""

    def __init__(self, scenario: Scenario, gradient_bytes: int) -> None:
        network, workers = scenario.network, scenario.per_worker
        self._network = network
        self.gradient_bytes = network.gradient_bytes or gradient_bytes
        """M: of one gradient, as large as it pretends to be."""
        self._overhead_s = np.array([worker.overhead_s for worker in workers])
        self._saturation = np.array([worker.saturation for worker in workers])
        self._s_per_sample = np.array([1 / worker.samples_per_s for worker in workers])
        self._num_together = scenario.num_together
        self._firsts = np.arange(0, len(workers), scenario.num_together)
        bandwidth = BYTES_PER_MBIT * np.array(
            [worker.bandwidth_mbit_s or network.bandwidth_mbit_s for worker in workers]
        )
        self._bandwidth = np.minimum.reduceat(bandwidth, self._firsts)
        """Bandwidth of each link: a worker's, or a node's."""
        self._coding = scenario.coding
        self._cores = np.array([worker.cores for worker in workers])
        self._throttled_s = max(max(0.0, 1 - worker.cores) * worker.quota_period_s for worker in workers)
        self.decision_s = scenario.decision.cost_s + scenario.decision.cost_per_doubling_s * math.log2(len(workers))
        self.tx_bytes_per_step = sent_bytes(network.topology, len(self._bandwidth), self.gradient_bytes)
        self.tx_bytes_per_step /= scenario.num_together
        """Bytes that each worker sends, and receives, in one step."""

    def step(
        self,
        sizes: Array64,
        conditions: Conditions,
        *,
        decided: bool = False,
        traffic: StepTraffic | None = None,
        since_s: Array64 | None = None,
    ) -> StepTiming:
        """One step with these local batch sizes; `decided` when it is the first one with another allocation.

        `traffic` is what the ranks sent, unless that was uncoded gradients by all-reduces.

        In a round of local steps `since_s` is how long each has stepped without waiting for all: without `traffic` they
        go on at once, with it the round ends. It lasts as long as the worker that has computed longest: a step, by how
        much that grew. The others wait for it at the end, where what is sent is not ready before, so that none of it is
        hidden.
        """
        compute_s: Array64 = conditions.slowdown * (
            self._overhead_s + np.maximum(sizes, self._saturation) * self._s_per_sample
        )
        is_local, begun_s = since_s is not None, 0.0
        ends_s = compute_s
        if since_s is not None:
            ends_s, begun_s = since_s + compute_s, float(since_s.max())
        slowest_s = float(ends_s.max())
        communication_s = exposed_s = 0.0
        if traffic is not None and len(self._bandwidth) > 1:
            congestion = self._congestion(conditions)
            communication_s, exposed_s = exchange_times_s(
                traffic,
                self._bandwidth / congestion,
                congestion * self._network.latency_s,
                self._coding,
                slowdown=float((conditions.slowdown / self._cores).max()),
                computed_s=0.0 if is_local else slowest_s,
                overlap=0.0 if is_local else self._network.overlap,
            )
        elif traffic is None and not is_local:
            communication_s = self.communication_s(conditions)
            hidden_s = self._network.overlap * slowest_s
            exposed_s = max(communication_s / self._network.num_buckets, communication_s - hidden_s)
        if communication_s > 0.0:
            communication_s, exposed_s = communication_s + self._throttled_s, exposed_s + self._throttled_s
        sync_s = np.zeros_like(ends_s) if is_local and traffic is None else slowest_s - ends_s + exposed_s
        update_s = self.decision_s if decided else 0.0
        step_s = slowest_s - begun_s + exposed_s + update_s
        return StepTiming(compute_s, sync_s, update_s, step_s, communication_s)

    def compute_times(self, conditions: Conditions) -> ComputeTimes:
        """Compute time of each worker, as a function of its size."""
        fixed_s, s_per_sample = conditions.slowdown * self._overhead_s, conditions.slowdown * self._s_per_sample
        return ComputeTimes(fixed_s + self._saturation * s_per_sample, fixed_s, s_per_sample)

    def link_rates(self, conditions: Conditions) -> Array64:
        """Bytes per second at which each worker sends to the next one around the ring: over both of their links."""
        bandwidth = self._bandwidth / self._congestion(conditions)
        of_links = np.minimum(bandwidth, np.roll(bandwidth, -1))
        return np.repeat(of_links / self._num_together, self._num_together)

    def _congestion(self, conditions: Conditions) -> Array64:
        """Congestion of each link."""
        return np.maximum.reduceat(conditions.congestion, self._firsts)

    def communication_s(self, conditions: Conditions) -> float:
        """C under the given congestion; 0 for a single worker, who reduces nothing."""
        network, num_workers, congestion = self._network, len(self._bandwidth), self._congestion(conditions)
        if num_workers < 2:
            return 0.0
        latencies_s = congestion * network.latency_s
        buckets_s = congestion * (self.gradient_bytes / network.num_buckets / self._bandwidth)
        if network.topology == "ring":
            sending_s = buckets_s / num_workers
            round_s = max(float((latencies_s + sending_s).mean()), float(sending_s.max()))
            return 2 * (num_workers - 1) * network.num_buckets * round_s
        servers_bandwidth = network.num_servers * BYTES_PER_MBIT * network.bandwidth_mbit_s
        bytes_in = num_workers * self.gradient_bytes / network.num_buckets
        incast_s = float(congestion.min()) * (network.latency_s + bytes_in / servers_bandwidth)
        return 2 * network.num_buckets * max(incast_s, float((latencies_s + buckets_s).max()))


def sent_bytes(topology: str, num_workers: int, gradient_bytes: int) -> float:
    """Bytes that each worker sends in one step, and receives."""
    if num_workers < 2:
        return 0.0
    return 2 * (num_workers - 1) / num_workers * gradient_bytes if topology == "ring" else float(gradient_bytes)
