"""The virtual ranks in the types of real ones: what they agree on when they attach, and the rows that they gather."""

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from dynamix.lab.workloads import Data, Part, workload_named
from dynamix.schemas.messages import SocketCounters, SystemMetrics
from dynamix.schemas.messages.allocation import EXACT
from dynamix.trainer.data.division import StepPlan
from dynamix.trainer.exchange.codec import CodedSquares
from dynamix.trainer.exchange.embedding_tables import table_share
from dynamix.trainer.gradient.noise import NoiseSums
from dynamix.trainer.job.identity import Attempt, JobIdentity, Place
from dynamix.trainer.job.options import JobOptions
from dynamix.trainer.job.reporting import Reporter
from dynamix.trainer.measurement.clock import StepTimes
from dynamix.trainer.measurement.process import ProcessIdentity
from dynamix.trainer.measurement.rows import UNKNOWN, Row, make_row

from .clock import StepTiming
from .disturbances import LABELS, Conditions, generator
from .exchange.traffic import StepTraffic
from .gradients import StepSums
from .scenario import Scenario

Array64 = npt.NDArray[np.float64]

MARGIN_STEPS = 2
"""Steps from knowing of a change to the first step that can follow it, with a real loader without workers."""

NOISE_DECAY = 0.9
"""The default of `attach`."""

MAX_LAG_WINDOWS = 4

NO_PROCESS = ProcessIdentity(pid=0, start_ticks=0, namespace=0, uid=0)


def job_options(
    scenario: Scenario, seed: int, policy: str, policy_options: Mapping[str, float], sizes: tuple[int, ...]
) -> JobOptions:
    """What `attach` would have been told.

    Raises:
        ValueError: when the policy lets gradients travel from the first step on as this job cannot have it.
    """
    options = JobOptions(
        local_batch_sizes=sizes,
        base_global_batch_size=scenario.base_global_batch_size,
        window_steps=scenario.window_steps,
        min_local_batch_size=scenario.min_local_batch_size,
        max_local_batch_size=scenario.max_local_batch_size,
        max_lag_windows=max(MAX_LAG_WINDOWS, scenario.lag_windows + 1),
        margin_steps=MARGIN_STEPS,
        policy=policy,
        policy_options=policy_options,
        optimizer_family="sgd" if scenario.optimizer == "sgd" else "adam",
        learning_rate_rule=scenario.learning_rate_rule,
        reduction="mean",
        seed=seed,
        shuffle=True,
        drop_last=False,
        noise_every=scenario.noise_every,
        noise_decay=NOISE_DECAY,
        supports_tracking=True,
        exchange=scenario.exchange,
        supports_exchange=scenario.supports_exchange,
        table_share=_table_share(scenario.workload),
    )
    first = options.initial_allocation.exchange
    if first != EXACT and not scenario.supports_exchange:
        raise ValueError(
            f"policy {policy!r} asks for gradients {first.label}, which parameter servers cannot exchange: use "
            'network.topology = "ring", or the policy without these options'
        )
    return options


@cache
def _table_share(workload: str) -> float:
    with torch.device("meta"):  # no memory, and no random number
        return table_share([workload_named(workload).model()])


def identity_of(scenario: Scenario, job: str) -> JobIdentity:
    """What the ranks would have agreed on when they attached."""
    return JobIdentity(
        job=job,
        generation=0,
        attempt=Attempt(launch="virtual", restarts=0, max_restarts=0),
        nodes=scenario.nodes,
        max_local_batch_sizes=scenario.max_local_batch_sizes,
    )


def training_part(scenario: Scenario, data: Data, seed: int) -> Part:
    """The training part as the scenario has it: its first samples, some of their labels replaced by another class."""
    inputs, labels = (tensor[: scenario.num_train_samples or None] for tensor in data.train)
    if scenario.label_noise > 0:
        drawn = generator(seed, LABELS, 0)
        flat = labels.flatten().cpu().numpy().copy()
        wrong = drawn.random(len(flat)) < scenario.label_noise
        num_classes = int(flat.max()) + 1
        flat[wrong] = (flat[wrong] + drawn.integers(1, num_classes, size=len(flat))[wrong]) % num_classes
        labels = torch.from_numpy(flat).view(labels.shape).to(inputs.device)
    return Part(inputs, labels)


def reporters_of(options: JobOptions, identity: JobIdentity) -> list[Reporter]:
    """One reporter per node, as each node's local rank 0 has one."""
    return [
        Reporter(options, identity, Place(node.ranks[0], 0, node.node, tuple(node.ranks)), options.initial_allocation)
        for node in identity.nodes
    ]


class WindowRecorder:
    """Sums over the steps of a window, one number per worker in each array."""

    def __init__(
        self, scenario: Scenario, tx_bytes_per_step: float, link_rates: Callable[[Conditions], Array64]
    ) -> None:
        """`link_rates` has bytes per second at which each worker sends to the next one."""
        self._link_rates = link_rates
        count = scenario.world_size
        self._local_ranks = [local_rank for node in scenario.nodes for local_rank in range(len(node.ranks))]
        self._memory_sizes = np.array(scenario.max_local_batch_sizes, dtype=np.float64)
        self._tx_bytes_per_step = tx_bytes_per_step
        power = scenario.power_per_worker
        self._busy_w, self._idle_w = (
            np.array([getattr(each, name) for each in power]) for name in ("busy_w", "idle_w")
        )
        self._is_ring = scenario.network.topology == "ring"
        self._round_trip_us = 2e6 * scenario.network.latency_s
        self._retransmits_per_s = 0.0 if scenario.congestion is None else scenario.congestion.retransmits_per_s
        self._tx_bytes, self._rx_bytes = np.zeros(count), np.zeros(count)
        self._retransmits = np.zeros(count)
        self._coded_before = CodedSquares()
        self._begin()

    def _begin(self) -> None:
        count = len(self._local_ranks)
        self._time_s = self._update_s = 0.0
        self._compute_s, self._sync_s, self._weighted_round_trip = np.zeros(count), np.zeros(count), np.zeros(count)
        self._loss, self._num_correct = np.zeros(count), np.zeros(count)
        self._num_samples = np.zeros(count, dtype=np.int64)
        self._largest = np.zeros(count)
        self._noise = [NoiseSums() for _ in range(count)]
        self._drift_own, self._drift_mean = np.zeros(count), 0.0
        self._sending_s, self._num_rings = np.zeros(count), 0

    def record_step(
        self,
        plan: StepPlan,
        sums: StepSums,
        timing: StepTiming,
        conditions: Conditions,
        traffic: StepTraffic | None = None,
    ) -> None:
        """Add a step; `traffic` is what was sent in it, where it is not gradients as they are, by all-reduces."""
        sizes = np.asarray(plan.counts.values)
        self._num_samples += sizes
        self._largest = np.maximum(self._largest, sizes)
        self._loss += sums.loss
        self._num_correct += sums.num_correct
        self._compute_s += timing.compute_s
        self._sync_s += timing.sync_s
        self._update_s += timing.update_s
        self._time_s += timing.step_s
        if traffic is None:
            self._sending_s += self._tx_bytes_per_step / self._link_rates(conditions)
            self._num_rings += 1
        self._tx_bytes += self._tx_bytes_per_step if traffic is None else traffic.sent_bytes()
        self._rx_bytes += self._tx_bytes_per_step if traffic is None else traffic.received_bytes()
        self._retransmits += conditions.congested * (self._retransmits_per_s * timing.step_s)
        self._weighted_round_trip += conditions.congestion * timing.step_s
        if sums.norms is not None:
            sums.norms.add_to(self._noise, plan.counts)
        if sums.drift is not None:
            self._drift_own += sums.drift.own
            self._drift_mean += sums.drift.mean

    def take_rows(
        self, held_out_accuracy: float | None, learning_rate: float, coded: CodedSquares
    ) -> tuple[list[Row], list[SystemMetrics]]:
        """The rows of all ranks since the last call, and what a kernel would have shown of their processes.

        `coded` is that of all ranks together from the first step on.
        """
        count = len(self._local_ranks)
        window = coded.since(self._coded_before)
        self._coded_before = coded
        each = CodedSquares(window.wanted / count, window.sent / count)
        rows = [self._row(rank, held_out_accuracy, learning_rate, each) for rank in range(count)]
        busy = self._compute_s / self._time_s
        memory = self._largest / self._memory_sizes
        simulated = [
            SystemMetrics(cpu_time_ratio=ratio, memory_ratio=share)
            for ratio, share in zip(busy.tolist(), memory.tolist(), strict=True)
        ]
        self._begin()
        return rows, simulated

    def _row(self, rank: int, held_out_accuracy: float | None, learning_rate: float, coded: CodedSquares) -> Row:
        times = StepTimes(0.0, float(self._compute_s[rank]), float(self._sync_s[rank]), self._update_s)
        return make_row(
            self._local_ranks[rank],
            NO_PROCESS,
            num_samples=int(self._num_samples[rank]),
            loss_sum=float(self._loss[rank]),
            num_correct=float(self._num_correct[rank]),
            times=[times],
            times_split=True,
            noise=self._noise[rank],
            sockets=self._sockets(rank),
            held_out_accuracy=held_out_accuracy,
            drift=(float(self._drift_own[rank]), self._drift_mean),
            learning_rate=learning_rate,
            coded=coded,
            link=self._link(rank),
            energy_j=self._energy_j(rank),
        )

    def _energy_j(self, rank: int) -> float:
        if not self._busy_w.size:
            return UNKNOWN
        busy_s = float(self._compute_s[rank])
        return float(self._busy_w[rank] * busy_s + self._idle_w[rank] * (self._time_s - busy_s))

    def _link(self, rank: int) -> tuple[float, int] | None:
        """How fast a worker sent to the next one; unknown where gradients did not travel around the ring."""
        if not self._is_ring or not self._sending_s[rank] > 0:
            return None
        sent = self._num_rings * self._tx_bytes_per_step
        return float(sent / self._sending_s[rank]), (rank + 1) % len(self._local_ranks)

    def _sockets(self, rank: int) -> SocketCounters | None:
        """Cumulative counters; a worker alone has no socket."""
        if self._tx_bytes_per_step == 0:
            return None
        return SocketCounters(
            tx_bytes=int(self._tx_bytes[rank]),
            rx_bytes=int(self._rx_bytes[rank]),
            retransmits=int(self._retransmits[rank]),
            srtt_us=self._round_trip_us * float(self._weighted_round_trip[rank]) / self._time_s,
        )
