"""The virtual clock: what a step of N workers costs, by formulas. Pure.

    compute_i = overhead_i + slowdown_i * b_i / samples_per_s_i
    ring:              C = 2 (N - 1) / N * bytes / min_i bandwidth_i + 2 (N - 1) latency
    parameter server:  C = 2 max(N * bytes / (servers * bandwidth), bytes / min_i bandwidth_i) + 2 latency
    exposed = max(C / buckets, C - overlap * max_i compute_i)
    step    = max_i compute_i + exposed + decision

A ring all-reduce moves every part of the gradient twice around, and its slowest link paces all. With parameter servers
all workers push to and pull from each server at once: its link carries N parts (incast). A gradient travels in
buckets beside the last share `overlap` of the slowest worker's computing; what is longer is exposed, and the last
bucket always is. A congested link has its bandwidth divided; servers are congested where the whole network is.

The parts are those of the real clock (`dynamix.trainer.measurement.clock`): data 0, compute, sync = waiting for the
slowest and the exposed communication, update = the cost of a decision. The optimizer's own time belongs to
`overhead_s`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .disturbances import Conditions
from .scenario import BYTES_PER_MBIT, Scenario

Array64 = npt.NDArray[np.float64]


class StepTiming(NamedTuple):
    """Where the time of one step goes, in seconds; arrays hold one number per worker."""

    compute_s: Array64
    sync_s: Array64
    update_s: float
    step_s: float
    communication_s: float
    """C, the exposed part and the hidden one."""

    def seconds_per_sample(self, sizes: Sequence[int]) -> list[float]:
        """What the workers would tell each other: compute time over samples; 0 where a worker had none."""
        return [time_s / size if size else 0.0 for time_s, size in zip(self.compute_s.tolist(), sizes, strict=True)]


class VirtualClock:
    """The formulas with one scenario's numbers."""

    def __init__(self, scenario: Scenario, gradient_bytes: int) -> None:
        network, workers = scenario.network, scenario.per_worker
        self._network = network
        self._gradient_bytes = network.gradient_bytes or gradient_bytes
        self._overhead_s = np.array([worker.overhead_s for worker in workers])
        self._s_per_sample = np.array([1 / worker.samples_per_s for worker in workers])
        self._bandwidth = BYTES_PER_MBIT * np.array(
            [worker.bandwidth_mbit_s or network.bandwidth_mbit_s for worker in workers]
        )
        self.decision_s = scenario.decision.cost_s + scenario.decision.cost_per_doubling_s * math.log2(len(workers))
        self.tx_bytes_per_step = sent_bytes(network.topology, len(workers), self._gradient_bytes)
        """Bytes that each worker sends, and receives, in one step."""

    def step(self, sizes: Array64, conditions: Conditions, *, decided: bool = False) -> StepTiming:
        """One step with these local batch sizes; `decided` when a decision begins to rule with it."""
        compute_s = self._overhead_s + conditions.slowdown * self._s_per_sample * sizes
        slowest_s = float(compute_s.max())
        communication_s = self.communication_s(conditions)
        exposed_s = exposed_time_s(communication_s, slowest_s, self._network.overlap, self._network.num_buckets)
        sync_s = slowest_s - compute_s + exposed_s
        update_s = self.decision_s if decided else 0.0
        return StepTiming(compute_s, sync_s, update_s, slowest_s + exposed_s + update_s, communication_s)

    def communication_s(self, conditions: Conditions) -> float:
        """C under the given congestion; 0 for a single worker, who reduces nothing."""
        network, num_workers = self._network, len(self._bandwidth)
        if num_workers < 2:
            return 0.0
        slowest = float((self._bandwidth / conditions.congestion).min())
        if network.topology == "ring":
            return ring_time_s(num_workers, self._gradient_bytes, slowest, network.latency_s)
        server = BYTES_PER_MBIT * network.bandwidth_mbit_s / float(conditions.congestion.min())
        return parameter_server_time_s(
            num_workers,
            self._gradient_bytes,
            slowest,
            network.latency_s,
            servers_bandwidth=network.num_servers * server,
        )


def ring_time_s(num_workers: int, gradient_bytes: int, bandwidth: float, latency_s: float) -> float:
    """Time of a ring all-reduce; `bandwidth` is the slowest link's in bytes/s."""
    hops = num_workers - 1
    return 2 * hops / num_workers * gradient_bytes / bandwidth + 2 * hops * latency_s


def parameter_server_time_s(
    num_workers: int, gradient_bytes: int, bandwidth: float, latency_s: float, *, servers_bandwidth: float
) -> float:
    """Time to push a gradient to all servers and to pull the sum; bandwidths in bytes/s, the servers' together."""
    incast_s = num_workers * gradient_bytes / servers_bandwidth
    return 2 * max(incast_s, gradient_bytes / bandwidth) + 2 * latency_s


def exposed_time_s(communication_s: float, slowest_compute_s: float, overlap: float, num_buckets: int) -> float:
    """The part of the communication that the step waits for."""
    return max(communication_s / num_buckets, communication_s - overlap * slowest_compute_s)


def sent_bytes(topology: str, num_workers: int, gradient_bytes: int) -> float:
    """Bytes that each worker sends in one step, and receives."""
    if num_workers < 2:
        return 0.0
    return 2 * (num_workers - 1) / num_workers * gradient_bytes if topology == "ring" else float(gradient_bytes)
