"""Steering of one rank: ends windows, reports them, and adopts actions on the same step as all other ranks.

Two loops meet here: the slow one, decisions off the bus, and the fast one, which needs no bus: under tracking every
rank derives a new split from the compute times that the gradients brought along.

Steps are counted over the whole run, windows from the generation's first step. All ranks call `after_step` after the
same steps, and whether a collective is due depends on the step's number only: no rank ever waits for one that another
does not enter.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from dynamix.schemas.messages import Action, Message
from dynamix.trainer.data.sampler import PlanSampler, Position
from dynamix.trainer.data.schedule import Schedule
from dynamix.trainer.data.split import Counts
from dynamix.trainer.gradient.noise import NoiseAverage, window_moments
from dynamix.trainer.job.identity import Place
from dynamix.trainer.job.options import JobOptions
from dynamix.trainer.job.reporting import JobIdentity, Reporter
from dynamix.trainer.measurement.clock import AnyClock, StepTimes
from dynamix.trainer.measurement.memory import device_memory
from dynamix.trainer.measurement.process import ProcessIdentity
from dynamix.trainer.measurement.rows import Row, job_totals, make_row
from dynamix.trainer.measurement.sockets import PeerSockets
from dynamix.trainer.measurement.window import WindowRecorder

from .collectives import BroadcastDecision, Exchange
from .fast_loop import FastLoop
from .offers import Offers, Terms
from .tracking import Tracker

SPECIFIED_EVERY = 64
"""Windows after which the job's specification is published again. While the broker remembers it, it drops this one as a
duplicate; one that lost or evicted the entry has it back."""

_log = logging.getLogger("dynamix.trainer")


class Parts(NamedTuple):
    """What steering works with."""

    exchange: Exchange
    schedule: Schedule
    sampler: PlanSampler
    clock: AnyClock
    recorder: WindowRecorder
    sockets: PeerSockets
    device: torch.device
    times_split: bool
    """Whether a hook sees the gradient's buckets, and so where waiting for others begins."""


class Wire(NamedTuple):
    """The way to the bus and back: plain calls that never wait."""

    publish: Callable[[Message], None]
    actions: deque[Action]
    """Received and not yet looked at, oldest first."""
    num_reports_dropped: Callable[[], int]
    num_malformed: Callable[[], int]


class _EndedWindow(NamedTuple):
    """A window whose rows are on their way."""

    position: Position
    sizes: Counts


class _Adoption(NamedTuple):
    """A decision that is on its way."""

    effective_step: int
    action: Action | None
    """Known in rank 0."""


class Steering:
    """One rank's side of the loop."""

    def __init__(
        self,
        *,
        options: JobOptions,
        identity: JobIdentity,
        place: Place,
        process: ProcessIdentity,
        parts: Parts,
        wire: Wire,
    ) -> None:
        self.identity = identity
        self.noise = NoiseAverage(options.noise_decay)
        self.held_out_accuracy: float | None = None
        self.total_samples: int | None = None
        self.first_step = 0
        """The generation's first step, from which windows are counted."""
        self.started = False
        self.ended = False
        self.fast_loop: FastLoop
        self._options = options
        self._place = place
        self._process = process
        self._parts = parts
        self._wire = wire
        self._reporter = Reporter(options, identity, place)
        self._initial = options.initial_allocation
        self._offers: Offers | None = None
        self._ended: _EndedWindow | None = None
        self._adopting: _Adoption | None = None
        self._sockets_due = False
        self.reset_bounds()

    def reset_bounds(self) -> None:
        """Track anew within the bounds of `identity`."""
        tracker = Tracker(self._options.min_local_batch_size, self.identity.max_local_batch_sizes)
        self.fast_loop = FastLoop(self._parts.schedule, tracker)

    def start(self, position: Position) -> None:
        """Begin the generation: all ranks make sure that they stand at the same place, rank 0 publishes the job."""
        stands = (*position, *self._parts.schedule.entries_since(position.step), self.fast_loop.tracker.filter.state)
        self._parts.exchange.agree("where the run stands", (self.identity.generation, *stands))
        self.first_step = position.step
        self.started = True
        self._reporter = Reporter(self._options, self.identity, self._place)
        self._initial = self._parts.schedule.allocation_at(position.step)
        if self._place.rank == 0:
            self._offers = Offers(self._terms())
            self._publish_job("running")

    def end(self, reason: str | None) -> None:
        """End the job, once; rank 0 publishes the reason, `None` tells nobody. Waits for nothing: `finish` does."""
        if self.started and not self.ended and self._place.rank == 0 and reason is not None:
            self._publish_job("ended", reason)
        self.ended = True

    def window_of(self, step: int) -> int:
        """The window that a step belongs to."""
        return (step - self.first_step) // self._options.window_steps

    def after_step(self, position: Position, seconds_per_sample: list[float] | None = None) -> None:
        """Do what is due after the step that led to `position`; its time counts as the next step's update.

        `seconds_per_sample` is what the ranks told each other in that step; all have the same, or none has.
        """
        done = position.step - self.first_step
        ends = done % self._options.window_steps == 0
        adopts = (done - 1 + self._options.margin_steps) % self._options.window_steps == 0
        tracks = seconds_per_sample is not None
        if not (ends or adopts or tracks or self._ended or self._adopting or self._sockets_due):
            return
        times = self._parts.clock.take() if ends else []  # waits for a GPU: before the time that is charged
        began = time.perf_counter()
        self.finish()
        if seconds_per_sample is not None:  # after `finish`, which may have run before this step: all ranks alike
            self._track(position, seconds_per_sample)
        if self._sockets_due:
            self._match_sockets()
        if ends:
            self._end_window(position, times)
        if adopts:
            self._begin_adoption(position.step - 1 + self._options.margin_steps)
        self._parts.clock.charge(time.perf_counter() - began)

    def finish(self) -> None:
        """Take what the last step posted; no new collective, so that a rank may do it alone, for a checkpoint."""
        ended, self._ended = self._ended, None
        if ended is not None:
            self._report_window(ended)
        adopting, self._adopting = self._adopting, None
        if adopting is not None:
            self._adopt(adopting)

    def _end_window(self, position: Position, times: list[StepTimes]) -> None:
        self._parts.exchange.post_row(self._row(times))
        self._ended = _EndedWindow(position, self._parts.schedule.counts_at(position.step - 1))

    def _report_window(self, ended: _EndedWindow) -> None:
        rows = self._parts.exchange.take_rows()
        self.noise.add(window_moments(row.noise for row in rows))
        window = self.window_of(ended.position.step - 1)
        steps, total = self._options.window_steps, ended.sizes.total
        totals = job_totals(rows, window=window, num_steps=steps, global_batch_size=total, noise=self.noise.value)
        if self._place.local_rank == 0:
            report = self._reporter.report(
                ended.position,
                rows,
                totals,
                sizes=ended.sizes,
                pending=self._parts.schedule.newest,
                total_samples=self.total_samples,
                num_reports_dropped=self._wire.num_reports_dropped(),
                cookies=self._parts.sockets.cookies,
            )
            self._wire.publish(report)
        if self._place.rank == 0 and (window + 1) % SPECIFIED_EVERY == 0:
            self._publish_job("running")
        self._reporter.remember(rows, totals)
        self._sockets_due = window == 0

    def _publish_job(self, phase: Literal["running", "ended"], reason: str = "") -> None:
        job = self._reporter.job(
            phase,
            initial=self._initial,
            total_samples=self.total_samples,
            end_reason=reason,
        )
        self._wire.publish(job)

    def _row(self, times: list[StepTimes]) -> Row:
        sums = self._parts.recorder.take()
        return make_row(
            self._place,
            self._process,
            num_samples=sums.num_samples,
            loss_sum=sums.loss_sum,
            num_correct=sums.num_correct,
            times=times,
            times_split=self._parts.times_split,
            noise=sums.noise,
            sockets=self._parts.sockets.read(),
            device=device_memory(self._parts.device),
            held_out_accuracy=self.held_out_accuracy,
        )

    def _match_sockets(self) -> None:
        """Once more after the first window: some back ends connect at their first collective."""
        self._sockets_due = False
        listings = self._parts.exchange.gather_objects(self._parts.sockets.candidates())
        self._parts.sockets.match(listings, self._place.rank, self._place.node_ranks)

    def _begin_adoption(self, effective_step: int) -> None:
        """Send the newest action to all ranks, to rule from `effective_step` on."""
        action = self._newest_action(self.window_of(effective_step))
        offered = None if action is None else BroadcastDecision(action.window, action.allocation)
        self._parts.exchange.post_decision(offered)
        self._adopting = _Adoption(effective_step, action)

    def _adopt(self, adopting: _Adoption) -> None:
        """Adopt, or not, what rank 0 sent: every rank the same, at the same step."""
        decision = self._parts.exchange.take_decision()
        if decision is None:
            return
        effective_step = adopting.effective_step
        self._assert_not_drawn(effective_step)
        self._parts.schedule.drop_before(effective_step - self._options.margin_steps)
        self.fast_loop.adopt(effective_step, decision.allocation)
        if adopting.action is not None:
            applied = self._reporter.applied(
                adopting.action,
                effective_window=self.window_of(effective_step),
                effective_step=effective_step,
                num_refused=self._num_refused(),
            )
            self._wire.publish(applied)

    def _track(self, position: Position, seconds_per_sample: list[float]) -> None:
        """One step less than `margin_steps` ahead, since nothing has to be sent round first."""
        effective_step = position.step - 1 + self._options.margin_steps - 1
        self._assert_not_drawn(effective_step)
        self._parts.schedule.drop_before(position.step - 1)
        self.fast_loop.observe_times(seconds_per_sample, effective_step)

    def _assert_not_drawn(self, effective_step: int) -> None:
        drawn = self._parts.sampler.last_drawn_step
        assert effective_step > drawn, f"step {effective_step} may change, but step {drawn} is drawn already"

    def _newest_action(self, effective_window: int) -> Action | None:
        """In rank 0, the action to offer to all."""
        if self._offers is None:
            return None
        while self._wire.actions:
            action = self._wire.actions.popleft()
            if (reason := self._offers.add(action, effective_window)) is not None:
                _log.info("refused the action of window %d: %s", action.window, reason)
        return self._offers.take(effective_window)

    def _num_refused(self) -> dict[str, int]:
        assert self._offers is not None
        malformed = self._wire.num_malformed()
        return {**self._offers.num_refused, **({"malformed": malformed} if malformed else {})}

    def _terms(self) -> Terms:
        return Terms(
            self.identity.job,
            self.identity.generation,
            self._options.min_local_batch_size,
            self.identity.max_local_batch_sizes,
            self._options.max_lag_windows,
            self._options.supports_tracking,
        )
