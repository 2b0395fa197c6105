"""What the virtual ranks would have measured in a window, as the rows that real ranks gather at its end."""

import numpy as np
import numpy.typing as npt

from dynamix.schemas.messages import SocketCounters, SystemMetrics
from dynamix.trainer.data.sampler import StepPlan
from dynamix.trainer.gradient.noise import NoiseSums
from dynamix.trainer.job.identity import JobIdentity, Place
from dynamix.trainer.job.options import JobOptions
from dynamix.trainer.job.reporting import Reporter
from dynamix.trainer.measurement.clock import StepTimes
from dynamix.trainer.measurement.process import ProcessIdentity
from dynamix.trainer.measurement.rows import Row, make_row

from .clock import StepTiming
from .disturbances import Conditions
from .gradients import StepSums
from .scenario import Scenario

Array64 = npt.NDArray[np.float64]

NO_PROCESS = ProcessIdentity(pid=0, start_ticks=0, namespace=0, uid=0)


class WindowRecorder:
    """Sums over the steps of a window, one number per worker in each array."""

    def __init__(self, scenario: Scenario, tx_bytes_per_step: float) -> None:
        count = scenario.world_size
        self._places = _places(scenario)
        self._memory_sizes = np.array(scenario.max_local_batch_sizes, dtype=np.float64)
        self._tx_bytes_per_step = tx_bytes_per_step
        self._round_trip_us = 2e6 * scenario.network.latency_s
        self._retransmits_per_s = 0.0 if scenario.congestion is None else scenario.congestion.retransmits_per_s
        self._tx_bytes = 0.0
        self._retransmits = np.zeros(count)
        self._begin()

    def _begin(self) -> None:
        count = len(self._places)
        self._num_steps = 0
        self._time_s = self._update_s = 0.0
        self._compute_s, self._sync_s, self._weighted_round_trip = np.zeros(count), np.zeros(count), np.zeros(count)
        self._loss, self._num_correct = np.zeros(count), np.zeros(count)
        self._num_samples = np.zeros(count, dtype=np.int64)
        self._largest = np.zeros(count)
        self._noise = [NoiseSums() for _ in range(count)]

    def record_step(self, plan: StepPlan, sums: StepSums, timing: StepTiming, conditions: Conditions) -> None:
        """Add a step."""
        sizes = np.asarray(plan.counts.values)
        self._num_steps += 1
        self._num_samples += sizes
        self._largest = np.maximum(self._largest, sizes)
        self._loss += sums.loss
        self._num_correct += sums.num_correct
        self._compute_s += timing.compute_s
        self._sync_s += timing.sync_s
        self._update_s += timing.update_s
        self._time_s += timing.step_s
        self._tx_bytes += self._tx_bytes_per_step
        self._retransmits += conditions.congested * (self._retransmits_per_s * timing.step_s)
        self._weighted_round_trip += conditions.congestion * timing.step_s
        if sums.norms is not None:
            sums.norms.add_to(self._noise, plan.counts)

    def take_rows(self, held_out_accuracy: float | None) -> tuple[list[Row], list[SystemMetrics]]:
        """The rows of all ranks since the last call, and what a kernel would have shown of their processes."""
        rows = [self._row(rank, held_out_accuracy) for rank in range(len(self._places))]
        busy = self._compute_s / self._time_s
        memory = self._largest / self._memory_sizes
        simulated = [
            SystemMetrics(cpu_time_ratio=ratio, memory_ratio=share)
            for ratio, share in zip(busy.tolist(), memory.tolist(), strict=True)
        ]
        self._begin()
        return rows, simulated

    def _row(self, rank: int, held_out_accuracy: float | None) -> Row:
        times = StepTimes(0.0, float(self._compute_s[rank]), float(self._sync_s[rank]), self._update_s)
        return make_row(
            self._places[rank].local_rank,
            NO_PROCESS,
            num_samples=int(self._num_samples[rank]),
            loss_sum=float(self._loss[rank]),
            num_correct=float(self._num_correct[rank]),
            times=[times],
            times_split=True,
            noise=self._noise[rank],
            sockets=self._sockets(rank),
            held_out_accuracy=held_out_accuracy,
        )

    def _sockets(self, rank: int) -> SocketCounters | None:
        """Cumulative counters; a worker alone has no socket."""
        if self._tx_bytes_per_step == 0:
            return None
        return SocketCounters(
            tx_bytes=int(self._tx_bytes),
            rx_bytes=int(self._tx_bytes),
            retransmits=int(self._retransmits[rank]),
            srtt_us=self._round_trip_us * float(self._weighted_round_trip[rank]) / self._time_s,
        )


def reporters_of(options: JobOptions, identity: JobIdentity) -> list[Reporter]:
    """One reporter per node, as each node's local rank 0 has one."""
    return [
        Reporter(options, identity, Place(node.ranks[0], 0, node.node, tuple(node.ranks)), options.initial_allocation)
        for node in identity.nodes
    ]


def _places(scenario: Scenario) -> list[Place]:
    return [
        Place(rank, local_rank, node.node, tuple(node.ranks))
        for node in scenario.nodes
        for local_rank, rank in enumerate(node.ranks)
    ]
