"""The virtual cluster: N workers train one model in this process, and report, adopt and count as real ranks do.

What real ranks compute is computed by their code: the schedule and the plan of each step, the noise estimate, rows,
totals and reports, which action is adopted. Virtual are the clock and what the kernel would have seen.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from dynamix.lab.workloads import Data, Part, make_optimizer, workload_named
from dynamix.schemas.messages import Action, Applied, Job, Report, Trace
from dynamix.schemas.messages.allocation import EXACT, Explored, Objective
from dynamix.trainer.data.division import Division, StepPlan
from dynamix.trainer.data.orders import Permutations
from dynamix.trainer.data.sampler import PlanSampler, Position
from dynamix.trainer.data.schedule import Schedule
from dynamix.trainer.gradient.learning_rate import FACTORS, scale_every_step
from dynamix.trainer.gradient.noise import NoiseAverage, is_measured, window_moments
from dynamix.trainer.measurement.rows import job_totals
from dynamix.trainer.steering.offers import Offers
from dynamix.trainer.steering.run import field_of
from dynamix.trainer.steering.tracking import FastLoop, Tracker

from .clock import VirtualClock
from .disturbances import Disturbances
from .exchange.traffic import NOTHING, StepTraffic
from .exchange.virtual import RuledStep, VirtualExchange
from .gradients import StepSums
from .perceptron import gradients_of
from .ranks import NOISE_DECAY, WindowRecorder, identity_of, job_options, reporters_of, training_part
from .rounds import VirtualRounds
from .scenario import Scenario


class Evaluation(NamedTuple):
    """The validation accuracy at one point of the grid of virtual time."""

    time_s: float
    accuracy: float
    """On the validation part, by the parameters in force at that time."""
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
        policy_options: Mapping[str, float] | None = None,
        initial_local_batch_size: int | None = None,
        job: str | None = None,
        family: str = "",
        explores: tuple[Explored, ...] = (),
        objective: Objective = "time",
    ) -> None:
        """Make the job; `initial_local_batch_size` overrules the scenario's, at most what each worker's memory holds.

        Its runs may have a `family`, and try out what it `explores`, compared by an `objective`.

        Raises:
            ValueError: when the scenario names what is not known, or the size is outside its bounds, or energy is the
                objective and its workers' power is not known.
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
        self._options = replace(options, family=family, explores=explores, objective=objective)
        if objective == "energy" and not scenario.power:
            raise ValueError(
                f"scenario {scenario.name!r} has no energy to compare runs by: add a table [[power]] per [[workers]]"
            )
        self._identity = identity_of(scenario, job or f"{scenario.name or scenario.family}-{seed}")
        self._data = training_part(scenario, data, seed)
        self._evaluated = Part(*(tensor[: scenario.evaluation_samples or None] for tensor in data.validation))
        self._test = data.test
        self._make_training()
        self._reporters = reporters_of(self._options, self._identity)
        self.job = self._reporters[0].specification(total_samples=None)

    def _make_training(self) -> None:
        scenario, seed = self.scenario, self.seed
        workload = workload_named(scenario.workload)
        inputs = self._data.inputs
        self._gradients = gradients_of(workload, seed=seed, like=inputs)
        self._schedule = Schedule(self._options.initial_allocation)
        self._orders = Permutations(len(inputs), seed, shuffle=True)
        self._sampler = PlanSampler(self._orders, self._schedule, division=Division(0))
        self._disturbances = Disturbances(scenario, seed)
        self._clock = VirtualClock(scenario, workload.gradient_bytes)
        self._recorder = WindowRecorder(scenario, self._clock.tx_bytes_per_step, self._clock.link_rates)
        self._exchange = VirtualExchange(
            self._gradients.model,
            scenario.world_size,
            num_buckets=scenario.network.num_buckets,
            gradient_bytes=self._clock.gradient_bytes,
        )
        self._noise = NoiseAverage(NOISE_DECAY)
        self._optimizer = self._make_optimizer(self._gradients.parameters)
        self._rounds = VirtualRounds(
            self._gradients,
            self._optimizer,
            self._exchange,
            self._make_optimizer,
            noise_every=scenario.noise_every,
        )
        self._offers = Offers(self._identity, self._options)
        self._waiting: deque[Action] = deque()
        self._field = field_of(self._options, self._identity)
        self._traces: list[Trace] = []
        self._newest_traces: dict[str, Trace] = {}
        self._is_ended = False
        tracker = Tracker(self._options.min_local_batch_size, self._identity.max_local_batch_sizes)
        self._fast_loop = FastLoop(self._schedule, tracker)
        self._decided = False
        self._test_accuracy: float | None = None

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
        """Whether the target is reached and the fixed time past, or the time limit is, or `end` was called."""
        limit = self.scenario.time_limit_s if self.time_to_target_s is None else self.scenario.fixed_time_s
        return self._is_ended or self.time_s >= limit

    def end(self) -> None:
        """Let the run be over now, wherever its clock is."""
        self._is_ended = True

    @property
    def num_refused(self) -> Mapping[str, int]:
        """Actions refused so far, by reason."""
        return self._offers.num_refused

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
        return self._report()

    def test_accuracy(self) -> float:
        """Accuracy on the test part, which is looked at once, when the run is over.

        Raises:
            RuntimeError: while it is not.
        """
        if not self.over:
            raise RuntimeError(f"the test part is scored when the run is over, not at {self.time_s:g} s")
        if self._test_accuracy is None:
            self._test_accuracy = self._gradients.accuracy(self._test)
        return self._test_accuracy

    def ended(self, reason: str = "completed") -> Job:
        """The specification as it is published at the end."""
        return msgspec.structs.replace(self.job, phase="ended", end_reason=reason)

    def _step(self) -> None:
        if self._sampler.is_over(self.position):
            self.position = self.position.at_epoch(self.position.epoch + 1)
        plan = self._sampler.plan_at(self.position)
        conditions = self._disturbances.at(plan.step, self.time_s)
        decided, self._decided = self._decided, False
        following = self.position.after(plan)
        if following.step % self.scenario.window_steps == 0 and self.scenario.lag_windows > 0:
            self._adopt(following.step)  # before the window's last step: a real rank knows by then what follows
        step = self._ruled(plan.step)
        sums, traffic = self._train(plan, step, ends_epoch=self._sampler.is_over(following))
        sizes = np.asarray(plan.counts.values, dtype=np.float64)
        begun_s = self._rounds.computed_s
        if step.is_local:
            timing = self._clock.local_step(sizes, conditions, begun_s, decided=decided, traffic=traffic)
        else:
            timing = self._clock.step(sizes, conditions, decided=decided, traffic=traffic)
        self._recorder.record_step(
            plan, sums, timing, conditions, NOTHING if step.is_local and not traffic else traffic
        )
        self._evaluate(self.time_s + timing.step_s)  # what was due before the step's end saw the parameters before it
        if step.is_local:
            self._rounds.end_step(timing.compute_s, step)
        else:
            self._optimizer.step()
        self.time_s += timing.step_s
        self.position = following
        self._schedule.drop_before(plan.step)
        times_are_shared = traffic is not None or not step.is_local
        if times_are_shared and self._schedule.allocation_at(plan.step).split == "tracking":
            seconds, counts = timing.seconds_per_sample(plan.counts.values), plan.counts.values
            if step.is_local:
                seconds, counts = self._rounds.ended_times(begun_s + timing.compute_s)
            # a loader without workers has drawn nothing yet
            self._fast_loop.observe_times(seconds, self.position.step, counts)

    def _ruled(self, step: int) -> RuledStep:
        """How gradients travel; those of a worker alone stay where they are."""
        if self.scenario.world_size == 1:
            return RuledStep(EXACT, EXACT)
        return RuledStep(*(self._schedule.allocation_at(each).exchange for each in (step, step + 1)))

    def _train(self, plan: StepPlan, step: RuledStep, *, ends_epoch: bool) -> tuple[StepSums, StepTraffic | None]:
        """Leave the gradient of a step, or let each worker make a step of its own; what is evaluated stays as it was.

        Returns what was sent, where it is not what exact training sends: `None` also where nothing was.
        """
        chosen = torch.from_numpy(self._orders.order_of(plan.epoch)[plan.offset : plan.offset + plan.counts.total])
        inputs, labels = (tensor.index_select(0, chosen.to(tensor.device)) for tensor in self._data)
        if step.is_local:
            sums = self._rounds.compute(inputs, labels, plan)
            ended = self._rounds.update(plan, step, ends_epoch=ends_epoch)
            return (sums, None) if ended is None else (sums._replace(drift=ended.drift), ended.traffic)
        measured = is_measured(plan.step, self.scenario.noise_every)
        if step.exchange == EXACT:
            return self._gradients.step(inputs, labels, plan, measured=measured), None
        gradient = self._gradients.parameters.grad
        assert gradient is not None, "made with the model"
        of_each = gradient.new_empty(self.scenario.world_size, len(gradient))
        sums = self._gradients.step_of_each(inputs, labels, plan, of_each)
        traffic = self._exchange.sum_gradients(of_each / plan.counts.total, step, gradient)
        return sums._replace(norms=self._gradients.norms_of(of_each) if measured else None), traffic

    def _evaluate(self, before_s: float) -> None:
        """Fill the grid up to a time, exclusively: it costs no virtual time, and the parameters stay the same."""
        scenario, accuracy = self.scenario, None
        while (due_s := (len(self.evaluations) + 1) * scenario.evaluate_every_s) < before_s:
            if due_s > scenario.time_limit_s:
                return
            if accuracy is None:
                accuracy = self._gradients.accuracy(self._evaluated)
            self.evaluations.append(Evaluation(due_s, accuracy, self.position.samples_seen))
            if self.time_to_target_s is None and self._is_at_target():
                self.time_to_target_s = due_s

    def _is_at_target(self) -> bool:
        looks = self.scenario.target_looks
        newest = [evaluation.accuracy for evaluation in self.evaluations[-looks:]]
        return len(newest) == looks and sum(newest) / looks >= self.scenario.target_accuracy

    def _adopt(self, first_step: int) -> None:
        """Let the newest action that is old enough rule from the window on that begins with a step."""
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
        self._follow_traces(first_step, window, due)
        self._decided = self._schedule.newest != before  # a policy that changes nothing pays nothing

    def _follow_traces(self, first_step: int, window: int, due: int) -> None:
        """Let the sizes rule that follow from the traces of windows up to `due`, where traces rule."""
        if self._field is None:
            return
        self._newest_traces.update((trace.node, trace) for trace in self._traces if trace.window <= due)
        self._traces = [trace for trace in self._traces if trace.window > due]
        self._field.take(self._field.numbers_of(self._newest_traces), window)
        fewest, upper = self._options.min_local_batch_size, self._identity.max_local_batch_sizes
        self._field.revise(self._schedule, first_step, fewest, upper)

    def _report(self) -> list[Report]:
        """The reports on the window that ended; they name the sizes of its last step."""
        sizes = self._schedule.counts_at(self.position.step - 1)
        accuracy = self.evaluations[-1].accuracy if self.evaluations else None
        rate = self.scenario.learning_rate * self._rate_factor(self.position.step - 1)
        rows, simulated = self._recorder.take_rows(accuracy, rate, self._exchange.coded())
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
            reporter.keep_window(rows, totals)
        return reports
