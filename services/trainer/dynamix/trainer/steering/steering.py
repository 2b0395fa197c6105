"""Steering of one rank: what is due after which step, equal on all ranks.

Two loops meet here: the slow one, decisions off the bus, and the fast one, which needs no bus: under tracking every
rank derives a new split from the compute times that the gradients brought along. Where the traces of agents are in
effect, all ranks derive sum and split from those, at the same steps as from decisions.

Steps are counted over the whole run, windows from the generation's first step. All ranks call `after_step` after the
same steps, and whether a collective is due depends on the step's number only: no rank ever waits for one that another
does not enter. Each collective is posted after one step and completed after the next.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamix.schemas.messages import Action, JobTotals
from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.bus_client import Transport
from dynamix.trainer.data.orders import ONE_PART
from dynamix.trainer.data.plan import Counts, PlanSampler, Position
from dynamix.trainer.gradient.losses import LossWarnings
from dynamix.trainer.gradient.noise import window_moments
from dynamix.trainer.loggers import MetricHistory, window_metrics
from dynamix.trainer.measurement.clock import AnyClock, StepTimes
from dynamix.trainer.measurement.meter import RankMeter, Row, job_totals, wall_s

from .collectives import AnyCollectives
from .offers import REFUSALS, Offers
from .run import Run

_log = logging.getLogger("dynamix.trainer")


class Adoption:
    """Adopts actions in one rank, and splits of the fast loop."""

    def __init__(self, run: Run, sampler: PlanSampler, collectives: AnyCollectives, transport: Transport) -> None:
        self._run = run
        self._sampler = sampler
        self._collectives = collectives
        self._transport = transport
        self._offers: Offers | None = None
        self._posted: tuple[int, Action | None] | None = None
        """Effective step of the decision that is on its way to all ranks, and its action, known in rank 0."""

    def begin(self) -> None:
        """Accept actions from now on: only rank 0 does."""
        run = self._run
        fixed = run.schedule.newest.global_batch_size if run.options.global_batch == "fixed" else None
        self._offers = Offers(run.identity, run.options, global_batch_size=fixed)

    @property
    def is_posted(self) -> bool:
        """Whether `complete` has work to do."""
        return self._posted is not None

    def post(self, effective_step: int) -> None:
        """Send rank 0's newest action to all ranks, and this node's newest trace, for `effective_step` and later."""
        action = self._newest_action(self._run.windows.window_of(effective_step))
        self._collectives.post_decision(None if action is None else action.allocation)
        self._posted = effective_step, action
        run = self._run
        if run.traces is not None:
            trace = self._transport.newest_trace
            fits = trace is not None and (trace.job, trace.generation) == (run.identity.job, run.identity.generation)
            mine = {run.place.node: trace} if trace is not None and fits and run.place.local_rank == 0 else {}
            self._collectives.post_numbers(run.traces.numbers_of(mine))

    def complete(self) -> None:
        """Adopt what rank 0 sent, if anything: every rank the same, at the same step."""
        posted, self._posted = self._posted, None
        if posted is None:
            return
        (effective_step, action), run = posted, self._run
        if (decision := self._collectives.take_decision()) is not None:
            self._assert_not_drawn(effective_step)
            run.schedule.drop_before(effective_step - run.options.margin_steps)
            run.fast_loop.adopt(effective_step, decision)
            if action is not None:
                self._publish_receipt(action, effective_step)
        if run.traces is not None:  # behind the decision, which says of such a job that nothing was decided
            run.traces.take(self._collectives.take_numbers(), run.windows.window_of(effective_step))
            fewest, upper = run.options.min_local_batch_size, run.identity.max_local_batch_sizes
            run.traces.revise(run.schedule, effective_step, fewest, upper)

    def track(self, position: Position, seconds_per_sample: list[float], counts: tuple[int, ...]) -> None:
        """Make the fast loop split again; one step less ahead than `post`, since nothing is sent first.

        `counts` are the samples of the step that ended, by rank.
        """
        effective_step = position.step - 1 + self._run.options.margin_steps - 1
        self._assert_not_drawn(effective_step)
        self._run.schedule.drop_before(position.step - 1)
        self._run.fast_loop.observe_times(seconds_per_sample, effective_step, counts)

    def _newest_action(self, effective_window: int) -> Action | None:
        """The action that rank 0 offers to all."""
        if self._offers is None:
            return None
        for action in self._transport.take_actions():
            if (reason := self._offers.consider(action, effective_window)) is not None:
                _log.info("refused the action of window %d: %s", action.window, REFUSALS[reason])
        adopted = self._offers.adopt(effective_window)
        self._run.decisions.note(effective_window, adopted, self._offers.last_refused)
        self._offers.last_refused = None
        return adopted

    def _publish_receipt(self, action: Action, effective_step: int) -> None:
        assert self._offers is not None
        malformed = self._transport.num_malformed
        receipt = self._run.reporter.receipt(
            action,
            effective_window=self._run.windows.window_of(effective_step),
            effective_step=effective_step,
            num_refused={**self._offers.num_refused, **({"malformed": malformed} if malformed else {})},
        )
        self._transport.publish(receipt)

    def _assert_not_drawn(self, effective_step: int) -> None:
        drawn = self._sampler.last_drawn_step
        assert effective_step > drawn, f"step {effective_step} may change, but step {drawn} is drawn already"


class WindowEnd:
    """Ends windows in one rank."""

    def __init__(
        self,
        run: Run,
        meter: RankMeter,
        collectives: AnyCollectives,
        transport: Transport,
        history: MetricHistory,
        *,
        losses: LossWarnings | None = None,
    ) -> None:
        self._run = run
        self._meter = meter
        self._collectives = collectives
        self._transport = transport
        self._history = history
        self._losses = losses
        self._posted: tuple[Position, Counts, Allocation] | None = None
        """Position at the end of the window whose rows are being gathered, and the allocation of its last step."""
        self._sockets_due = False
        self.differing: str | None = None
        """The error in the data, if the ranks have read different streams."""

    @property
    def is_posted(self) -> bool:
        """Whether `complete` or `match_sockets` has work to do."""
        return self._posted is not None or self._sockets_due

    def post(self, position: Position, times: list[StepTimes]) -> None:
        """Send this rank's row of the window that ended at `position`."""
        self._collectives.post_row(self._meter.take_row(times, self._run.held_out_accuracy))
        schedule, last = self._run.schedule, position.step - 1
        self._posted = position, schedule.counts_at(last), schedule.allocation_at(last)

    def complete(self) -> None:
        """Report the window whose rows have arrived. Nothing where nothing was posted."""
        posted, self._posted = self._posted, None
        if posted is None:
            return
        (position, sizes, ruling), run, rows = posted, self._run, self._collectives.take_rows()
        if self._losses is not None:
            self._losses.observe_window([row.num_samples for row in rows], [row.loss_sum or 0.0 for row in rows])
        differing = [rank for rank, row in enumerate(rows) if row.data_digest != rows[0].data_digest]
        if differing:
            self.differing = (
                f"rank {differing[0]} has read other samples of the stream than rank 0 by step {position.step}: "
                f"it {ONE_PART}"
            )
        run.noise.observe_window(window_moments(row.noise for row in rows))
        window = run.windows.window_of(position.step - 1)
        num_steps, stretch = run.windows.num_steps(window), run.windows.stretch(window)
        totals = job_totals(
            rows, window=window, num_steps=num_steps, global_batch_size=sizes.total, noise=run.noise.value
        )
        run.windows.measured(window, wall_s(rows) / num_steps)
        if run.place.local_rank == 0:
            report = run.reporter.report(
                position,
                rows,
                totals,
                stretch=stretch,
                sizes=sizes,
                pending=run.schedule.newest,
                total_samples=run.total_samples,
                num_reports_dropped=self._transport.num_reports_dropped,
                cookies=self._meter.sockets.cookies,
                view=None if run.traces is None else run.traces.view(run.place.node),
            )
            self._transport.publish(report)
        self._history.add_window(position.step, self._metrics(position, rows, totals, sizes, ruling))
        run.reporter.keep_window(rows, totals)
        self._sockets_due = self._sockets_due or window == 0

    def _metrics(
        self, position: Position, rows: Sequence[Row], totals: JobTotals, sizes: Counts, ruling: Allocation
    ) -> dict[str, float | str]:
        """The window's metrics: whose it is, what was measured, and in rank 0 why it had these sizes."""
        run = self._run
        metrics: dict[str, float | str] = {
            "job": run.identity.job,
            "generation": run.identity.generation,
            "epoch": position.epoch,
            "samples_seen": position.samples_seen,
            **window_metrics(rows, totals, sizes.values),
            "split": ruling.split,
            "exchange": ruling.exchange.label,
        }
        return metrics | run.decisions.take(totals.window) if run.place.rank == 0 else metrics

    def expect_sockets(self) -> None:
        """Match the sockets of all ranks again after this step, because there are new ones."""
        self._sockets_due = True

    def match_sockets(self) -> None:
        """Find the sockets to other ranks again after the first window: some back ends connect at first use."""
        if not self._sockets_due:
            return
        self._sockets_due = False
        sockets, place = self._meter.sockets, self._run.place
        listings = self._collectives.gather_objects(sockets.candidates())
        sockets.match(listings, place.rank, place.node_ranks)


@dataclass(kw_only=True)
class Steering:
    """Both loops in one rank."""

    run: Run
    window_end: WindowEnd
    adoption: Adoption
    clock: AnyClock
    collectives: AnyCollectives
    transport: Transport
    _counts_before: tuple[int, ...] = field(default=(), init=False)
    _num_alike: int = field(default=0, init=False)

    def start(self, position: Position) -> None:
        """Begin the generation: all ranks make sure that they stand at the same place, rank 0 publishes the job."""
        run = self.run
        speeds = run.fast_loop.tracker.filter.state, run.fast_loop.pace
        stands = (*position, *run.schedule.entries_since(position.step), *speeds)
        self.collectives.agree("where the run stands", (run.identity.generation, *stands))
        run.begin(position.step)
        if run.place.rank == 0:
            self.adoption.begin()
            self.transport.publish(run.specification())

    def end(self, reason: str | None) -> None:
        """End the job, once; rank 0 publishes the reason, `None` publishes nothing. Waits for nothing."""
        run = self.run
        if run.started and not run.ended and run.place.rank == 0 and reason is not None:
            self.transport.publish(run.specification(reason))
        run.ended = True

    def after_step(
        self, position: Position, seconds_per_sample: list[float] | None = None, counts: tuple[int, ...] = ()
    ) -> None:
        """Do what is due after the step that led to `position`; its time counts as the next step's update.

        Raises ValueError, on all ranks, when these have read different streams.

        `seconds_per_sample` is what the ranks exchanged in that step; all have the same, or none has.
        `counts` are its samples by rank.
        """
        windows, ahead = self.run.windows, position.step - 1 + self.run.options.margin_steps
        ends, adopts = windows.is_start(position.step), windows.is_start(ahead)
        tracks = seconds_per_sample is not None
        if not (ends or adopts or tracks or self.window_end.is_posted or self.adoption.is_posted):
            return
        times = self.clock.take_times() if ends else []  # waits for a GPU: before the time that is charged
        began = time.perf_counter()
        self.complete_posted()
        if self.window_end.differing:
            raise ValueError(self.window_end.differing)
        if seconds_per_sample is not None:  # after `complete_posted`, which may have run before this step on all ranks
            self.adoption.track(position, seconds_per_sample, self._measured_counts(counts))
        self.window_end.match_sockets()
        if ends:
            self.window_end.post(position, times)
        if adopts:
            self.adoption.post(ahead)
        self.clock.charge(time.perf_counter() - began)

    def _measured_counts(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Samples by rank of the step whose times came back; where times come late, only while counts stand still."""
        self._num_alike = self._num_alike + 1 if counts == self._counts_before else 0
        self._counts_before = counts
        return counts if self._num_alike >= self.clock.late_steps else ()

    def complete_posted(self) -> None:
        """Complete what the last step posted; no new collective, so that a rank may do it alone, for a checkpoint."""
        self.window_end.complete()
        self.adoption.complete()
