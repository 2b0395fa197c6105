"""The virtual cluster: N workers train one model in this process, and report, adopt and count as real ranks do.

What real ranks compute is computed by their code: the schedule and the plan of each step, the noise estimate, rows,
totals and reports, which action is adopted. Virtual are the clock and what the kernel would have seen.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from dynamix.lab.workloads import Data, Part, make_optimizer, workload_named
from dynamix.schemas.messages import Action, Applied, NetworkMetrics, RankRow, Report, SystemMetrics, Trace
from dynamix.schemas.messages.allocation import EXACT, Allocation, Explored
from dynamix.trainer.data.orders import Permutations
from dynamix.trainer.data.plan import Division, PlanSampler, Position, Schedule, StepPlan
from dynamix.trainer.exchange.codec import CodedSquares
from dynamix.trainer.exchange.plan import StepExchange
from dynamix.trainer.exchange.rows import table_share
from dynamix.trainer.gradient.learning_rate import FACTORS, scale_every_step
from dynamix.trainer.gradient.noise import NoiseAverage, NoiseSums, is_measured, window_moments
from dynamix.trainer.job.identity import Attempt, JobIdentity, Place
from dynamix.trainer.job.options import JobOptions
from dynamix.trainer.measurement.meter import Row, job_totals
from dynamix.trainer.steering.beginning import NUM_TIMED, begun_exchange, is_timed
from dynamix.trainer.steering.fast_loop import FastLoop
from dynamix.trainer.steering.offers import Offers
from dynamix.trainer.steering.run import Reporter, field_of

from .clock import LABELS, ComputeTimes, Conditions, Disturbances, Sizes, StepTiming, VirtualClock, generator
from .exchange import Array64, StepTraffic, VirtualExchange, total_bytes
from .gradients import StepSums, gradients_of
from .rounds import VirtualRounds
from .scenario import Scenario

MARGIN_STEPS = 2
"""Steps from knowing of a change to the first step that can follow it, with a real loader without workers."""

MAX_LAG_WINDOWS = 4


def job_options(
    scenario: Scenario, seed: int, policy: str, policy_options: Mapping[str, float | str], sizes: tuple[int, ...]
) -> JobOptions:
    """The options of `attach` for such a job.

    Raises:
        ValueError: when the policy begins with a codec or local steps that this job does not support.
    """
    with torch.device("meta"):  # no memory, and no random number
        model = workload_named(scenario.workload).model()
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
        optimizer_family=scenario.optimizer_family,
        learning_rate_rule=scenario.learning_rate_rule,
        reduction="mean",
        seed=seed,
        shuffle=True,
        drop_last=False,
        noise_every=scenario.noise_every,
        supports_tracking=True,
        exchange=scenario.exchange,
        supports_exchange=scenario.supports_exchange,
        table_share=table_share([model]),
    )
    first = options.initial_allocation.exchange
    if first != EXACT and not scenario.supports_exchange:
        raise ValueError(
            f"policy {policy!r} begins with {first.label}, which parameter servers do not support: use "
            'network.topology = "ring", or the policy without these options'
        )
    return options


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


class Step(NamedTuple):
    """One step as it was run."""

    plan: StepPlan
    sums: StepSums
    timing: StepTiming
    conditions: Conditions
    traffic: StepTraffic | None
    """Bytes that were sent in it, unless that was uncoded gradients by all-reduces."""
    shares_times: bool
    """Whether the ranks share their times after it: of one that is not local, or of a round."""


class WindowRecorder:
    """Sums over the steps of a window, one number per worker in each array."""

    def __init__(
        self, scenario: Scenario, tx_bytes_per_step: float, link_rates: Callable[[Conditions], Array64]
    ) -> None:
        """`link_rates` has bytes per second at which each worker sends to the next one."""
        self._link_rates = link_rates
        self._local_ranks = [local_rank for node in scenario.nodes for local_rank in range(len(node.ranks))]
        self._memory_sizes = np.array(scenario.max_local_batch_sizes, dtype=np.float64)
        self._tx_bytes_per_step = tx_bytes_per_step
        self._num_together = scenario.num_together
        self._is_ring = scenario.network.topology == "ring"
        self._round_trip_us = 2e6 * scenario.network.latency_s
        self._retransmits_per_s = 0.0 if scenario.congestion is None else scenario.congestion.retransmits_per_s
        zeros = np.zeros(scenario.world_size)
        self._tx_bytes, self._rx_bytes, self._retransmits = zeros, zeros, zeros
        self._coded_before = CodedSquares()
        self.steps: list[Step] = []
        """Steps of the window so far."""

    def _of_ranks(self, of_links: Array64) -> Array64:
        """Equal parts of each link's bytes; one number is of all."""
        return np.repeat(of_links / self._num_together, self._num_together) if len(of_links) > 1 else of_links

    def take_rows(
        self, held_out_accuracy: float | None, learning_rate: float, coded: CodedSquares
    ) -> tuple[list[Row], list[SystemMetrics]]:
        """The rows of all ranks since the last call, and what a kernel would have shown of their processes.

        `coded` is that of all ranks together from the first step on.
        """
        steps, self.steps = self.steps, []
        timings, count = [step.timing for step in steps], len(self._local_ranks)
        zeros, each_way = np.zeros(count), np.full(count, self._tx_bytes_per_step)
        noise, rings_s = [NoiseSums() for _ in range(count)], zeros
        for plan, sums, timing, conditions, traffic, _ in steps:
            if traffic is None:
                rings_s = rings_s + each_way / self._link_rates(conditions)
            sent, received = (each_way, each_way) if traffic is None else map(self._of_ranks, total_bytes(traffic))
            self._tx_bytes, self._rx_bytes = self._tx_bytes + sent, self._rx_bytes + received
            retransmits = conditions.congested * (self._retransmits_per_s * timing.step_s)
            self._retransmits = self._retransmits + retransmits
            if sums.norms is not None:
                for rank, own in enumerate(noise):
                    own.add_step(plan.counts, rank, float(sums.norms.local[rank]), sums.norms.reduced)
        sizes = np.array([step.plan.counts.values for step in steps])
        num_samples = sizes.sum(axis=0)
        loss, num_correct = (
            sum((getattr(step.sums, name) for step in steps), zeros) for name in ("loss", "num_correct")
        )
        computes_s = sum((timing.compute_s for timing in timings), zeros)
        syncs_s = sum((timing.sync_s for timing in timings), zeros)
        waits_s = [each.timing.sync_s - each.timing.sync_s.min() for each in steps if each.shares_times]
        update_s, time_s = (sum(getattr(timing, name) for timing in timings) for name in ("update_s", "step_s"))
        round_trips = sum((step.conditions.congestion * step.timing.step_s for step in steps), zeros)
        window = coded.since(self._coded_before)
        self._coded_before = coded
        each = CodedSquares(window.wanted / count, window.sent / count)
        link_bytes, rows = sum(step.traffic is None for step in steps) * self._tx_bytes_per_step, []
        for rank, local_rank in enumerate(self._local_ranks):
            compute_s, sending_s = float(computes_s[rank]), rings_s[rank]
            link, sockets = None, None
            if self._is_ring and sending_s > 0:  # how fast it sent to the next rank
                link = float(link_bytes / sending_s)
            if self._tx_bytes_per_step:  # cumulative counters; a rank alone has no socket
                sockets = NetworkMetrics(
                    tx_bytes=int(self._tx_bytes[rank]),
                    rx_bytes=int(self._rx_bytes[rank]),
                    retransmits=int(self._retransmits[rank]),
                    srtt_us=self._round_trip_us * float(round_trips[rank]) / time_s,
                )
            rows.append(
                Row(
                    rank=RankRow(
                        rank=rank,
                        local_rank=local_rank,
                        pid=0,
                        pid_start_ticks=0,
                        pid_namespace=0,
                        uid=0,
                        local_batch_size=0,
                        pending_local_batch_size=0,
                        num_samples=int(num_samples[rank]),
                        loss_sum=float(loss[rank]),
                        num_correct=float(num_correct[rank]),
                        data_time_s=0.0,
                        compute_time_s=compute_s,
                        sync_time_s=float(syncs_s[rank]),
                        update_time_s=update_s,
                        sockets=sockets,
                        link_bytes_per_s=link,
                        link_peer=None if link is None else (rank + self._num_together) % count,
                        waiting_time_s=sum(float(each[rank]) for each in waits_s) if waits_s else None,
                    ),
                    noise=noise[rank],
                    held_out_accuracy=held_out_accuracy,
                    learning_rate=learning_rate,
                    coded=each,
                )
            )
        memory = sizes.max(axis=0) / self._memory_sizes
        simulated = [
            SystemMetrics(cpu_time_ratio=ratio, memory_ratio=share)
            for ratio, share in zip((computes_s / time_s).tolist(), memory.tolist(), strict=True)
        ]
        return rows, simulated


class Evaluation(NamedTuple):
    """The validation accuracy at one point of the grid of virtual time."""

    time_s: float
    accuracy: float
    """Accuracy on the validation part, with the parameters at that time."""
    samples_seen: int


class VirtualCluster:
    """One job on one scenario's cluster under one seed, which decides weights, order of the data and disturbances."""

    def __init__(
        self,
        scenario: Scenario,
        data: Data,
        *,
        seed: int,
        policy: str,
        policy_options: Mapping[str, float | str] | None = None,
        initial_local_batch_size: int | None = None,
        job: str | None = None,
        family: str = "",
        explores: tuple[Explored, ...] = (),
    ) -> None:
        """Make the job; `initial_local_batch_size` overrules the scenario's, at most what each worker's memory holds.

        Its runs may have a `family`, and try out what it `explores`.

        Raises:
            ValueError: when the scenario names what is not known, or the size is outside its bounds.
        """
        self.scenario = scenario
        self.seed = seed
        self.time_s = 0.0
        self.position = Position()
        """Steps and samples so far."""
        self.applied: list[Applied] = []
        """Actions adopted so far."""
        self.evaluations: list[Evaluation] = []
        self.time_to_target_s: float | None = None
        """Virtual time of the first evaluation with which the target was reached."""
        sizes = scenario.local_batch_sizes(initial_local_batch_size)
        options = job_options(scenario, seed, policy, policy_options or {}, sizes)
        self._options = replace(options, family=family, explores=explores)
        self._identity = JobIdentity(
            job=job or f"{scenario.name or scenario.family}-{seed}",
            generation=0,
            attempt=Attempt(launch="virtual", restarts=0, max_restarts=0),
            nodes=scenario.nodes,
            max_local_batch_sizes=scenario.max_local_batch_sizes,
            num_replicas=len(scenario.nodes) if scenario.network.by_node else 0,
        )
        self._data = training_part(scenario, data, seed)
        self._evaluated = Part(*(tensor[: scenario.evaluation_samples or None] for tensor in data.validation))
        self._test = data.test
        workload, first = workload_named(scenario.workload), self._options.initial_allocation
        self.gradients = gradients_of(workload, seed=seed, like=self._data.inputs)
        self._schedule = Schedule(first)
        self._orders = Permutations(len(self._data.inputs), seed, shuffle=True)
        self._sampler = PlanSampler(self._orders, self._schedule, division=Division(0))
        self._disturbances = Disturbances(scenario, seed)
        self._clock = VirtualClock(scenario, workload.gradient_bytes)
        self._recorder = WindowRecorder(scenario, self._clock.tx_bytes_per_step, self._clock.link_rates)
        self.exchange = VirtualExchange(
            self.gradients.model,
            scenario.world_size,
            num_buckets=scenario.network.num_buckets,
            gradient_bytes=self._clock.gradient_bytes,
            num_together=scenario.num_together,
        )
        self._noise = NoiseAverage()
        self._optimizer = self._make_optimizer(self.gradients.parameters)
        self.rounds = VirtualRounds(
            *(self.gradients, self._optimizer, self.exchange, self._make_optimizer), noise_every=scenario.noise_every
        )
        self._offers = Offers(self._identity, self._options, first)
        self._waiting: deque[Action] = deque()
        self._field = field_of(self._options, self._identity)
        self._traces: list[Trace] = []
        self._newest_traces: dict[str, Trace] = {}
        fewest, most = self._options.min_local_batch_size, self._identity.max_local_batch_sizes
        self._fast_loop = FastLoop(self._schedule, fewest, most)
        self._exposed_s: list[float] = []
        """Time of each of the first steps beyond its slowest rank's computing."""
        self._decided = False
        """Whether the next step is the first one with another allocation."""
        self._reporters = [
            Reporter(self._options, self._identity, Place(node.ranks[0], 0, node.node, tuple(node.ranks)), first)
            for node in self._identity.nodes
        ]
        self.job = self._reporters[0].specification(total_samples=None)

    def _make_optimizer(self, parameters: torch.nn.Parameter) -> torch.optim.Optimizer:
        scenario = self.scenario
        optimizer = make_optimizer(
            scenario.optimizer, [parameters], scenario.learning_rate, weight_decay=scenario.weight_decay
        )
        scale_every_step(optimizer, lambda: self._rate_factor(self.position.step))
        return optimizer

    def _rate_factor(self, step: int) -> float:
        """The factor on the scenario's learning rate in a step."""
        ratio = self._schedule.counts_at(step).total / self.scenario.base_global_batch_size
        return FACTORS[self.scenario.learning_rate_rule](ratio) * self._schedule.allocation_at(step).rate_factor

    @property
    def window(self) -> int:
        """Windows run so far, and the index of the next one."""
        return self.position.step // self.scenario.window_steps

    @property
    def over(self) -> bool:
        """Whether the target is reached and the fixed time past, or the time limit is."""
        limit = self.scenario.time_limit_s if self.time_to_target_s is None else self.scenario.fixed_time_s
        return self.time_s >= limit

    def offer(self, action: Action) -> None:
        """Hand over an action; it is adopted, or refused, at the boundary where the scenario's lag is over."""
        if action.window < self.window:
            self._waiting.append(action)
        else:
            self._offers.consider(action, self.window)  # of a window yet to come: counted as refused

    def leave_trace(self, trace: Trace) -> None:
        """Hand over what the agent of a node left; it counts from the boundary on where the scenario's lag is over."""
        self._traces.append(trace)

    def run_window(self) -> list[Report]:
        """Train k steps and return the reports of all nodes; nothing when the run is over."""
        if self.over:
            return []
        if self.scenario.lag_windows == 0:
            self._adopt(self.position.step)
        for _ in range(self.scenario.window_steps):
            self._step()
        sizes = self._schedule.counts_at(self.position.step - 1)
        accuracy = self.evaluations[-1].accuracy if self.evaluations else None
        rate = self.scenario.learning_rate * self._rate_factor(self.position.step - 1)
        rows, simulated = self._recorder.take_rows(accuracy, rate, self.exchange.coded())
        self._noise.observe_window(window_moments(row.noise for row in rows))
        totals = job_totals(
            rows,
            window=self.window - 1,
            num_steps=self.scenario.window_steps,
            global_batch_size=sizes.total,
            noise=self._noise.value,
        )
        reports = []
        for reporter, node in zip(self._reporters, self._identity.nodes, strict=True):
            report = reporter.report(
                self.position,
                rows,
                totals,
                sizes=sizes,
                pending=self._schedule.newest,
                total_samples=None,
                num_reports_dropped=0,
                view=None if self._field is None else self._field.view(node.node),
            )
            own = tuple(simulated[rank] for rank in node.ranks)
            reports.append(msgspec.structs.replace(report, simulated=own))
        return reports

    def test_accuracy(self) -> float:
        """Accuracy on the test part, which is used once, when the run is over. Raises RuntimeError while it is not."""
        if not self.over:
            raise RuntimeError(f"the test part is scored when the run is over, not at {self.time_s:g} s")
        return self.gradients.accuracy(self._test)

    def _step(self) -> None:
        if self._sampler.is_over(self.position):
            self.position = self.position.at_epoch(self.position.epoch + 1)
        plan = self._sampler.plan_at(self.position)
        conditions = self._disturbances.at(plan.step, self.time_s)
        decided, self._decided = self._decided, False
        following = self.position.after(plan)
        if following.step % self.scenario.window_steps == 0 and self.scenario.lag_windows > 0:
            self._adopt(following.step)  # before the window's last step: a real rank knows by then what follows
        step = StepExchange(EXACT, EXACT)
        if self.scenario.world_size > 1:  # a worker alone sends nothing
            step = StepExchange(*(self._schedule.allocation_at(each).exchange for each in (plan.step, plan.step + 1)))
        sums, traffic = self._train(plan, step, ends_epoch=self._sampler.is_over(following))
        sizes = np.asarray(plan.counts.values, dtype=np.float64)
        rounds = self.rounds
        timing = self._clock.step(
            sizes,
            conditions,
            decided=decided,
            traffic=traffic,
            since_s=rounds.computed_s if step.is_local else None,
        )
        sent = () if step.is_local and not traffic else traffic
        tracks = self._schedule.allocation_at(plan.step).split == "tracking"
        shares_times = tracks and rounds.num_steps == 0
        self._recorder.steps.append(Step(plan, sums, timing, conditions, sent, shares_times))
        self._evaluate(self.time_s + timing.step_s)  # what was due before the step's end saw the parameters before it
        if step.is_local:
            rounds.end_step(timing, step)
        else:
            self._optimizer.step()
        self.time_s += timing.step_s
        self.position = following
        self._schedule.drop_before(plan.step)
        if shares_times:
            seconds, counts = timing.seconds_per_sample(plan.counts.values), plan.counts.values
            if step.is_local:
                seconds, counts = rounds.ended_times
            # a loader without workers has drawn nothing yet
            self._fast_loop.observe_times(seconds, self.position.step, counts)
        if plan.step < NUM_TIMED < self.scenario.window_steps:
            self._begin(float(timing.sync_s.min()))

    def _begin(self, exposed_s: float) -> None:
        """Begin with another exchange after the first steps, as real ranks do."""
        self._exposed_s.append(exposed_s)
        if len(self._exposed_s) < NUM_TIMED or not is_timed(self._options, self._schedule.newest):
            return
        rates, num_ranks = self._fast_loop.filter.rates, self.job.num_exchanging
        if (begun := begun_exchange(self._options, rates, self._exposed_s, num_ranks)) is not None:
            self._schedule.revise_exchange(self.position.step, begun[0])
            for reporter in self._reporters:
                reporter.begun = begun
            self.job = self._reporters[0].specification(total_samples=None)

    def _train(self, plan: StepPlan, step: StepExchange, *, ends_epoch: bool) -> tuple[StepSums, StepTraffic | None]:
        """Compute the gradient of a step, or a local step of each worker; evaluated parameters stay as they were.

        Returns what was sent; `None` for exact training, and where nothing was sent.
        """
        chosen = torch.from_numpy(self._orders.order_of(plan.epoch)[plan.offset : plan.offset + plan.counts.total])
        inputs, labels = (tensor.index_select(0, chosen.to(tensor.device)) for tensor in self._data)
        if step.is_local:
            sums = self.rounds.compute(inputs, labels, plan)
            return sums, self.rounds.update(plan, step, ends_epoch=ends_epoch)
        measured = is_measured(plan.step, self.scenario.noise_every)
        if step.exchange == EXACT:
            return self.gradients.step(inputs, labels, plan, measured=measured), None
        gradient = self.gradients.parameters.grad
        assert gradient is not None, "made with the model"
        of_each = gradient.new_empty(self.scenario.world_size, len(gradient))
        sums = self.gradients.step_of_each(inputs, labels, plan, of_each)
        traffic = self.exchange.sum(of_each / plan.counts.total, step, gradient)
        norms_of_sums = torch.linalg.vector_norm(of_each, dim=1).double().cpu().numpy()
        return sums._replace(norms=self.gradients.squared_norms(norms_of_sums) if measured else None), traffic

    def _evaluate(self, before_s: float) -> None:
        """Fill the grid up to a time, exclusively: it costs no virtual time, and the parameters stay the same."""
        scenario, accuracy = self.scenario, None
        while (due_s := (len(self.evaluations) + 1) * scenario.evaluate_every_s) < before_s:
            if due_s > scenario.time_limit_s:
                return
            if accuracy is None:
                accuracy = self.gradients.accuracy(self._evaluated)
            self.evaluations.append(Evaluation(due_s, accuracy, self.position.samples_seen))
            if self.time_to_target_s is None and accuracy >= scenario.target_accuracy:
                self.time_to_target_s = due_s

    def _adopt(self, first_step: int) -> None:
        """Apply the newest action that is old enough from the window that begins with this step."""
        window = first_step // self.scenario.window_steps
        due = window - 1 - self.scenario.lag_windows
        while self._waiting and self._waiting[0].window <= due:
            self._offers.consider(self._waiting.popleft(), window)
        action, before = self._offers.adopt(window), self._schedule.newest
        if action is not None:
            self._fast_loop.adopt(first_step, action.allocation)
            self.applied.append(
                self._reporters[0].receipt(
                    action,
                    effective_window=window,
                    effective_step=first_step,
                    num_refused=self._offers.num_refused,
                )
            )
        if self._field is not None:  # a policy of traces: apply the sizes that follow from those of windows up to `due`
            self._newest_traces.update((trace.node, trace) for trace in self._traces if trace.window <= due)
            self._traces = [trace for trace in self._traces if trace.window > due]
            self._field.take(self._field.numbers_of(self._newest_traces), window)
            fewest, upper = self._options.min_local_batch_size, self._identity.max_local_batch_sizes
            self._field.revise(self._schedule, first_step, fewest, upper)
        self._decided = self._schedule.newest != before  # a policy that changes nothing pays nothing


NUM_HALVINGS = 60
ROUNDING = 1e-9
"""Samples: a whole size may come out a little less."""


class ClairvoyantCluster(VirtualCluster):
    """Trains at its initial global batch, divided again for every step; actions are dropped."""

    def offer(self, action: Action) -> None:
        """Drop it."""

    def _step(self) -> None:
        step = self.position.step
        times = self._clock.compute_times(self._disturbances.at(step, self.time_s))
        upper = np.array(self._identity.max_local_batch_sizes)
        lower = np.minimum(self._options.min_local_batch_size, upper)
        split = best_split(sum(self._options.local_batch_sizes), times, lower, upper)
        self._schedule.revise(step, Allocation(split))
        super()._step()


def best_split(total: int, times: ComputeTimes, lower: Sizes, upper: Sizes) -> tuple[int, ...]:
    """The whole sizes with the shortest slowest time. A total outside of the bounds becomes the nearest within."""
    total = int(np.clip(total, lower.sum(), upper.sum()))

    def within(time_s: float) -> Sizes:
        """The greatest sizes that take no longer than this; the lower bound where even that takes longer."""
        sizes = np.floor((time_s - times.fixed_s) / times.s_per_sample + ROUNDING)
        return np.clip(np.where(times.least_s <= time_s, sizes, lower), lower, upper).astype(np.int64)

    low, high = 0.0, float(times.of(upper).max())
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        if within(middle).sum() >= total:
            high = middle
        else:
            low = middle
    sizes = within(high)
    while (excess := int(sizes.sum()) - total) > 0:
        ends_s = np.where(sizes > lower, times.fixed_s + times.s_per_sample * sizes, -np.inf)
        slowest = np.argsort(-ends_s, kind="stable")[:excess]
        sizes[slowest[sizes[slowest] > lower[slowest]]] -= 1
    return tuple(sizes.tolist())
