"""Steering of one rank: what is due after which step, equal on all ranks.

Two loops meet here: the slow one, decisions off the bus, and the fast one, which needs no bus: under tracking every
rank derives a new split from the compute times that the gradients brought along. Where the traces of agents are in
effect, all ranks derive sum and split from those, at the same steps as from decisions.

Steps are counted over the whole run, windows from the generation's first step. All ranks call `after_step` after the
same steps, and whether a collective is due depends on the step's number only: no rank ever waits for one that another
does not enter. Each collective is posted after one step and completed after the next.
"""

import contextlib
import logging
import math
import operator
import sys
import time
from dataclasses import dataclass

import msgspec

from dynamix.schemas.messages import REFUSALS, Action, Summary
from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.bus_client.transport import Transport
from dynamix.trainer.data.orders import ONE_PART
from dynamix.trainer.data.plan import Counts, PlanSampler, Position
from dynamix.trainer.gradient.clock import StepTimes
from dynamix.trainer.gradient.losses import LossWarnings
from dynamix.trainer.gradient.noise import window_moments
from dynamix.trainer.loggers import MetricHistory, window_metrics
from dynamix.trainer.measurement.memory import largest_sizes
from dynamix.trainer.measurement.meter import ROWS, Gains, RankMeter, job_totals

from .beginning import NUM_TIMED, begun_exchange
from .collectives import Collectives
from .fast_loop import STEADY_EVERY
from .offers import Offers
from .run import Run

_log = logging.getLogger("dynamix.trainer")


@dataclass(kw_only=True, eq=False)
class Steering:
    """One rank's side of both loops."""

    run: Run
    meter: RankMeter
    sampler: PlanSampler
    collectives: Collectives
    transport: Transport
    history: MetricHistory
    losses: LossWarnings | None
    says_summary: bool

    def __post_init__(self) -> None:
        """Begin with nothing under way."""
        self._gains = Gains()
        self.offers: Offers | None = None
        """In rank 0, which alone takes actions."""
        self._posted_window: tuple[Position, Counts, Allocation, int] | None = None
        """Where the window ended whose rows are under way, the sizes and the allocation of its last step, and how many
        times longer the next may be."""
        self._posted_decision: tuple[int, Action | None] | None = None
        """Effective step of the decision that is under way, and its action, known in rank 0."""
        self._times: list[StepTimes] = []
        """Times of steps of the window, if they were taken before its end."""
        self._found = ""
        self._sockets_due = False
        self._fault = ""
        """Fault of the data, where the ranks have read different streams."""
        self._counts_before: tuple[int, ...] = ()
        self._num_alike = 0
        self._waited_s: float | None = None
        """Waiting for slower ranks in the window, as far as the ranks have shared their times."""
        self._timed_waits: list[float] = []
        """Waiting in each of the first steps, which are timed."""
        self._shared_step = -1
        """Newest step whose times were shared."""

    def start(self, position: Position) -> None:
        """Begin the generation: all ranks make sure that they stand at the same place, rank 0 publishes the job.

        Raises:
            ValueError: on all ranks, when they do not.
        """
        run = self.run
        entries = run.schedule.entries_since(position.step)
        stands = (run.identity.generation, *position, *entries, *run.fast_loop.state, run.search is None)
        everybody = self.collectives.gather_objects(stands)
        for rank, theirs in enumerate(everybody):
            if theirs != everybody[0]:
                raise ValueError(
                    f"where the run stands: rank {rank} has {theirs}, rank 0 has {everybody[0]}; load the same state"
                )
        run.begin(position.step)
        self._shared_step, self._timed_waits = position.step - 1, []
        if run.search is None:
            self._begin_decisions()

    def leave_world(self) -> None:
        """Forget what is under way, and the window that has not ended."""
        self._posted_window = self._posted_decision = self.offers = None
        self._sockets_due, self._counts_before, self._times, self._waited_s = False, (), [], None
        self.meter.take_row(self.meter.clock.take_times(), None)

    def end(self, reason: str | None) -> None:
        """End the job, once; rank 0 publishes the reason, `None` publishes nothing. Waits for nothing."""
        run = self.run
        if run.started and not run.ended and run.place.rank == 0 and reason is not None:
            summary = self.summary()
            self.transport.publish(
                run.reporter.specification(total_samples=run.total_samples, end_reason=reason, summary=summary)
            )
            if summary is not None:
                self.history.add_summary(summary)
                if self.says_summary:
                    with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
                        sys.stderr.write(f"dynamix: {summary.text}{self._found}\n")
        run.ended = True

    def summary(self) -> Summary | None:
        """The gain over the windows so far; without estimates where slow ranks cannot be seen."""
        found = self._gains.summary(self.meter.clock.own_s)
        if found is not None and self.losses is not None and self.losses.hides_slow_ranks:
            found = msgspec.structs.replace(found, equal_sizes_s=None, script_batch_s=None)
        return found

    def close(self, timeout_s: float) -> None:
        """Leave the other ranks, the loggers and the bus; each of these two may take `timeout_s`."""
        self.collectives.close()
        self.history.close(timeout_s)
        self.transport.close(timeout_s)

    def after_step(
        self, position: Position, seconds_per_sample: list[float] | None = None, counts: tuple[int, ...] = ()
    ) -> None:
        """Do what is due after the step that led to `position`; its time counts as the next step's update.

        `seconds_per_sample` is what the ranks exchanged in that step; all have the same, or none has. `counts` are its
        samples by rank.

        Raises:
            ValueError: on all ranks, when these have read different streams.
        """
        step, run = position.step - 1, self.run
        is_posted = self._posted_window is not None or self._posted_decision is not None or self._sockets_due
        windows, ahead = run.windows, step + run.options.margin_steps
        ends, adopts, is_timed = windows.is_start(position.step), windows.is_start(ahead), step == run.last_timed
        sizes = counts or run.schedule.counts_at(step).values
        is_found = run.search is not None and run.search.end_step(sizes[run.place.rank])
        if not (ends or adopts or is_timed or is_posted or is_found or seconds_per_sample is not None):
            return
        clock = self.meter.clock
        if ends or is_timed:
            self._times += clock.take_times()  # waits for a GPU: before the time that is charged
        began = time.perf_counter()
        self.complete_posted()
        if self._fault:
            raise ValueError(self._fault)
        if seconds_per_sample is not None:  # after `complete_posted`, which may have run before this step on all ranks
            self._observe_times(step, seconds_per_sample, counts)
        if self._sockets_due:
            self._sockets_due = False
            sockets, place = self.meter.sockets, self.run.place
            sockets.match(self.collectives.gather_objects(sockets.candidates()), place.rank, place.node_ranks)
        if is_found:
            self._begin_decisions()
        if ends:  # send this rank's row of the window
            times, self._times = self._times, []
            waited_s, self._waited_s = self._waited_s, None
            self.collectives.post_row(self.meter.take_row(times, run.held_out_accuracy, waited_s))
            of_step = run.schedule.counts_at(step), run.schedule.allocation_at(step)
            self._posted_window = position, *of_step, run.calm_times
        if is_timed:
            self._begin_exchange(step)
        if adopts:
            self._post_decision(ahead)
        clock.charged_s += time.perf_counter() - began

    def _observe_times(self, step: int, seconds_per_sample: list[float], counts: tuple[int, ...]) -> None:
        """Divide by the times that the ranks have shared, and count what this one has waited for slower ones."""
        run = self.run
        effective_step = step + run.options.margin_steps - 1  # one less than a decision: nothing has to be sent first
        self._assert_not_drawn(effective_step)
        run.schedule.drop_before(step)
        self._num_alike = self._num_alike + 1 if counts == self._counts_before else 0
        self._counts_before = counts
        # where times come late, the counts are those of the measured step only while they stand still
        measured = counts if self._num_alike >= self.meter.clock.late_steps else ()
        run.fast_loop.observe_times(seconds_per_sample, effective_step, measured)
        if not counts or any(
            count and not 0.0 < each < math.inf for each, count in zip(seconds_per_sample, counts, strict=True)
        ):
            self._shared_step = step
            return  # a rank did not know its time yet
        times_s = list(map(operator.mul, seconds_per_sample, counts))
        waited_s = max(times_s) - times_s[run.place.rank]
        number = min(step - self._shared_step, max(run.schedule.allocation_at(step).exchange.every, STEADY_EVERY))
        # also of the steps since the last that was measured
        self._waited_s = (self._waited_s or 0.0) + waited_s * number
        self._shared_step = step
        if run.last_timed is not None and step <= run.last_timed:
            self._timed_waits.append(waited_s)

    def complete_posted(self) -> None:
        """Complete what the last step posted; no new collective, so that a rank may do it alone, for a checkpoint."""
        if self._posted_window is not None:
            self._complete_window(*self._posted_window)
        if self._posted_decision is not None:
            self._complete_decision(*self._posted_decision)

    # --- windows -----------------------------------------------------------------------------------------------

    def _complete_window(self, position: Position, sizes: Counts, allocation: Allocation, longer: int) -> None:
        """Report the window whose rows have arrived."""
        self._posted_window, run = None, self.run
        rows = self.collectives.take_rows(ROWS)
        if self.losses is not None:
            self.losses.observe_window(
                [row.rank.num_samples for row in rows],
                [row.rank.loss_sum for row in rows],
                [row.noise.local_trace for row in rows],
            )
        differing = [rank for rank, row in enumerate(rows) if row.data_digest != rows[0].data_digest]
        if differing:
            self._fault = (
                f"rank {differing[0]} has read other samples of the stream than rank 0 by step {position.step}: "
                f"it {ONE_PART}"
            )
        run.noise.observe_window(window_moments(row.noise for row in rows))
        window = run.windows.window_of(position.step - 1)
        num_steps = run.windows.num_steps(window)
        totals = job_totals(
            rows, window=window, num_steps=num_steps, global_batch_size=sizes.total, noise=run.noise.value
        )
        slowest_s = max(math.inf if row.wall_s is None else row.wall_s for row in rows)
        script_size = run.options.base_global_batch_size
        is_other = run.options.global_batch == "adaptive" and allocation.global_batch_size != script_size
        self._gains.observe_window(rows, totals, run.fast_loop.filter.fixed, script_size, is_other=is_other)
        run.windows.measured(window, slowest_s / num_steps, longer)
        if run.place.local_rank == 0:
            report = run.reporter.report(
                position,
                rows,
                totals,
                sizes=sizes,
                pending=run.schedule.newest,
                total_samples=run.total_samples,
                num_reports_dropped=self.transport.num_reports_dropped,
                cookies=self.meter.sockets.cookies,
                view=None if run.traces is None else run.traces.view(run.place.node),
            )
            self.transport.publish(report)
        metrics: dict[str, float | str] = {
            "job": run.identity.job,
            "generation": run.identity.generation,
            "epoch": position.epoch,
            "samples_seen": position.samples_seen,
            **window_metrics(rows, totals, sizes.values),
            "split": allocation.split,
            "exchange": allocation.exchange.label,
            **({} if self.offers is None else self.offers.take_explanation(window)),
        }
        self.history.add_window(position.step, metrics)
        self._sockets_due = self._sockets_due or window == 0  # some back ends connect at first use

    def expect_sockets(self) -> None:
        """Match the sockets of all ranks again after this step, because there are new ones."""
        self._sockets_due = True

    # --- decisions ---------------------------------------------------------------------------------------------

    def _begin_decisions(self) -> None:
        """Take actions from now on, in rank 0, and publish the job: with the bounds by memory, if they are searched."""
        run = self.run
        if is_searched := run.search is not None:
            found = self.collectives.gather_objects(run.search.found())
            upper = largest_sizes(found, run.fast_loop.upper, run.identity.max_local_batch_sizes)
            run.identity = run.reporter.identity = run.identity._replace(max_local_batch_sizes=upper)
            run.fast_loop.upper, run.search = upper, None
            self._found = f"; memory permits {min(upper):,} to {max(upper):,} samples on a rank"
        if run.place.rank == 0:
            if self._found:
                _log.info("after the first steps%s", self._found)
            self.offers = Offers(run.identity, run.options, run.schedule.newest)
            if is_searched or run.last_timed is None:
                self.transport.publish(run.reporter.specification(total_samples=run.total_samples))

    def _begin_exchange(self, step: int) -> None:
        """Wait for rank 0's choice of an exchange, once; only now is the job's specification known."""
        run, allocation = self.run, None
        if run.place.rank == 0:
            timed = zip(self._times[-NUM_TIMED:], self._timed_waits, strict=False)  # all of them, or it does not begin
            exposed_s, rates = [each.sync_s - waited_s for each, waited_s in timed], run.fast_loop.filter.rates
            num_ranks = run.identity.num_replicas or len(run.schedule.newest.local_batch_sizes)
            if (begun := begun_exchange(run.options, rates, exposed_s, num_ranks)) is not None:
                run.reporter.begun = begun
                allocation = msgspec.structs.replace(run.schedule.newest, exchange=begun[0])
            if run.search is None:  # else the bounds that it finds in the next step belong to the specification
                self.transport.publish(run.reporter.specification(total_samples=run.total_samples))
        self.collectives.post_decision(allocation)
        if (chosen := self.collectives.take_decision()) is not None:
            run.schedule.revise_exchange(step + 1, chosen.exchange)

    def _post_decision(self, effective_step: int) -> None:
        """Send rank 0's newest action to all ranks, and this node's newest trace, for `effective_step` and later."""
        run, action = self.run, None
        if self.offers is not None:
            window = run.windows.window_of(effective_step)
            for offered in self.transport.take_actions():
                if (reason := self.offers.consider(offered, window)) is not None:
                    _log.info("refused the action of window %d: %s", offered.window, REFUSALS[reason])
            action = self.offers.adopt(window)
        self.collectives.post_decision(None if action is None else action.allocation)
        self._posted_decision = effective_step, action
        if run.traces is not None:
            trace = self.transport.newest_trace
            fits = trace is not None and (trace.job, trace.generation) == (run.identity.job, run.identity.generation)
            mine = {run.place.node: trace} if trace is not None and fits and run.place.local_rank == 0 else {}
            self.collectives.post_numbers(run.traces.numbers_of(mine))

    def _complete_decision(self, effective_step: int, action: Action | None) -> None:
        """Adopt, or not, what rank 0 sent: every rank the same, at the same step."""
        self._posted_decision, run = None, self.run
        window = run.windows.window_of(effective_step)
        if (decision := self.collectives.take_decision()) is not None:
            self._assert_not_drawn(effective_step)
            run.schedule.drop_before(effective_step - run.options.margin_steps)
            run.fast_loop.adopt(effective_step, decision)
        if action is not None and self.offers is not None:
            malformed = {"malformed": self.transport.num_malformed} if self.transport.num_malformed else {}
            receipt = run.reporter.receipt(
                action,
                effective_window=window,
                effective_step=effective_step,
                num_refused={**self.offers.num_refused, **malformed},
            )
            self.transport.publish(receipt)
        if run.traces is not None:  # behind the decision, which says of such a job that nothing was decided
            run.traces.take(self.collectives.take_numbers(), window)
            fewest, upper = run.options.min_local_batch_size, run.identity.max_local_batch_sizes
            run.traces.revise(run.schedule, effective_step, fewest, upper)

    def _assert_not_drawn(self, effective_step: int) -> None:
        drawn = self.sampler.last_drawn_step
        assert effective_step > drawn, f"step {effective_step} may change, but step {drawn} is drawn already"
