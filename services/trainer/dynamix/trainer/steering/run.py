"""The run: what is true of this job on this rank right now. Session, steering and checkpoint share this one state.

`Windows` are where windows end, `Reporter` builds this rank's messages, `Run` holds both with schedule and speeds.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from dynamix.schemas.apportion import apportion
from dynamix.schemas.messages import Action, Applied, FieldView, Job, JobTotals, NetworkMetrics, Report, Summary
from dynamix.schemas.messages.allocation import Allocation, Exchange
from dynamix.schemas.policies import RATE_EXPONENTS, STIGMERGY, STIGMERGY_OPTIONS
from dynamix.trainer.data.orders import DataIdentity
from dynamix.trainer.data.plan import Counts, Position, ReferenceSteps, Schedule
from dynamix.trainer.gradient.noise import NoiseAverage
from dynamix.trainer.job.identity import JobIdentity, Place
from dynamix.trainer.job.options import JobOptions
from dynamix.trainer.measurement.memory import MemorySearch
from dynamix.trainer.measurement.meter import Row, held_out_accuracy

from .beginning import NUM_TIMED, is_timed
from .fast_loop import FastLoop
from .field import TraceField

FIRST_WINDOWS = 8
"""Windows that are never stretched."""
MOST_STRETCH = 16
"""Longest window, in `window_steps`: steps that suddenly take much longer still end one in time."""
CALM_TIMES = 4
"""Factor on the length of windows, and on the steps between two measurements of the noise, of a calm job."""


class Windows:
    """The starts of windows, counted from a generation's first step."""

    def __init__(self, window_steps: int, margin_steps: int, min_window_s: float = 0.0, first_step: int = 0) -> None:
        self._window_steps = window_steps
        self._margin_steps = margin_steps
        self._min_window_s = min_window_s
        self._starts = [first_step]
        """Starts of the windows that still matter, in order; before the last one lie all whose lengths are decided."""
        self._first = 0
        """The number of the window that starts at the first of them."""
        self._plan(first_step, 1)

    def window_of(self, step: int) -> int:
        """The window that a step belongs to, from the one before the last that was measured on."""
        place = bisect_right(self._starts, step) - 1
        assert place >= 0, f"step {step} is of a window that was forgotten"
        return self._first + place

    def is_start(self, step: int) -> bool:
        """Whether a window starts at a step, which is no later than `margin_steps` from now."""
        return self._starts[bisect_right(self._starts, step) - 1] == step

    def num_steps(self, window: int) -> int:
        """Steps of a window that has ended."""
        place = window - self._first
        return self._starts[place + 1] - self._starts[place]

    def measured(self, window: int, step_time_s: float, longer: int = 1) -> None:
        """Plan ahead after a window: all ranks give the same time per step, evaluations between steps included."""
        end = self._starts[window + 1 - self._first]
        forgotten = window - self._first
        del self._starts[:forgotten]
        self._first += forgotten
        stretch, window_s = 1, self._window_steps * step_time_s
        if window + 1 >= FIRST_WINDOWS and 0.0 < window_s < self._min_window_s * longer:  # not an unknown time either
            stretch = min(math.ceil(self._min_window_s * longer / window_s), MOST_STRETCH * longer)
        self._plan(end, stretch)

    def _plan(self, end: int, stretch: int) -> None:
        """Set the length of the window that begins at `end`, and of all that may start before the next plan."""
        starts, shortest = self._starts, self._window_steps
        if starts[-1] <= end:
            starts.append(end + shortest * stretch)
        following = starts[bisect_right(starts, end)]
        while starts[-1] + shortest <= following + self._margin_steps:
            starts.append(starts[-1] + shortest * stretch)


MAX_REASON = 1024
"""Most characters of `Job.end_reason`."""

LEFT = "left"
"""The script ended, or let go of its session, without `close`."""


@dataclass
class Reporter:
    """Builds this rank's messages; it remembers one window, so that the readers of its reports need not."""

    options: JobOptions
    identity: JobIdentity
    place: Place
    initial: Allocation
    begun: tuple[Exchange, float] | None = None
    """The exchange that the ranks began with by themselves, and the exposed time of an exact one."""
    _rows_before: Sequence[Row] | None = None
    _totals_before: JobTotals | None = None

    def specification(
        self, *, total_samples: int | None, end_reason: str | None = None, summary: Summary | None = None
    ) -> Job:
        """The job's specification: running, or ended for a reason."""
        options, initial = self.options, self.initial
        exchange, exact_exposed_s = self.begun or (initial.exchange, None)
        shared = {name: getattr(options, name) for name in Job.__struct_fields__ if hasattr(options, name)}
        own: dict[str, Any] = {
            "job": self.identity.job,
            "generation": self.identity.generation,
            "phase": "running" if end_reason is None else "ended",
            "world_size": len(initial.local_batch_sizes),
            "nodes": self.identity.nodes,
            "initial_local_batch_sizes": initial.local_batch_sizes,
            "max_local_batch_sizes": self.identity.max_local_batch_sizes,
            "total_samples": total_samples,
            "policy_options": dict(options.policy_options),
            "end_reason": (end_reason or "")[:MAX_REASON],
            "initial_split": initial.split,
            "initial_exchange": exchange,
            "exact_exposed_s": exact_exposed_s,
            "summary": summary,
            "num_replicas": self.identity.num_replicas,
        }
        return Job(**shared | own)

    def report(
        self,
        position: Position,
        rows: Sequence[Row],
        totals: JobTotals,
        *,
        sizes: Counts,
        pending: Allocation,
        total_samples: int | None,
        num_reports_dropped: int,
        cookies: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
        view: FieldView | None = None,
    ) -> Report:
        """The report of this node on the window that ended at `position`.

        `cookies` are those of the sockets of its ranks; they need no place in the rows, since they hardly ever change.
        `view` is for this node's agent, where there is one.
        """
        ranks = []
        for rank in self.place.node_ranks:
            row, before = rows[rank].rank, None if self._rows_before is None else self._rows_before[rank]
            uncounted = None if row.sockets is None else NetworkMetrics(tx_bytes=0, rx_bytes=0, retransmits=0)
            known = msgspec.structs.replace(
                row,
                local_batch_size=sizes.values[rank],
                pending_local_batch_size=pending.local_batch_sizes[rank],
                sockets_before=uncounted if before is None else before.rank.sockets,
                accuracy_before=None if before is None else before.accuracy,
                cookies=cookies.get(rank, ()),
            )
            ranks.append(known)
        totals_before = self._totals_before
        self._rows_before, self._totals_before = rows, totals
        return Report(
            job=self.identity.job,
            generation=self.identity.generation,
            window=totals.window,
            node=self.place.node,
            optimizer_family=self.options.optimizer_family,
            samples_seen=position.samples_seen,
            rows=tuple(ranks),
            totals=totals,
            totals_before=totals_before,
            total_samples=total_samples,
            held_out_accuracy=held_out_accuracy(rows),
            num_reports_dropped=num_reports_dropped,
            field=view,
            stretch=totals.num_steps // self.options.window_steps,
        )

    def receipt(
        self, action: Action, *, effective_window: int, effective_step: int, num_refused: Mapping[str, int]
    ) -> Applied:
        """The receipt of an adopted action, with its own sizes: under tracking the windows say which were used."""
        return Applied(
            job=self.identity.job,
            generation=self.identity.generation,
            decided_window=action.window,
            effective_window=effective_window,
            effective_step=effective_step,
            local_batch_sizes=action.local_batch_sizes,
            action_hash=action.hash,
            num_refused=dict(num_refused),
            exchange=action.allocation.exchange,
        )


def reason_after(error: BaseException | None, *, may_restart: bool) -> str | None:
    """Reason of the job's end after an error; `None` if a launcher restarts it."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return LEFT
    from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415 - only a launcher has it

    asked_to_stop = isinstance(error, KeyboardInterrupt | SignalException)  # by a user, whatever restarts are left
    if may_restart and not asked_to_stop:
        return None
    return f"{type(error).__name__}: {error}".removesuffix(": ")


@dataclass(kw_only=True)
class Run:
    """One generation of a job, in this rank.

    `data` and `place` never change. Before the first step a loaded state may raise `identity` to a later generation,
    lower its upper bounds, and keep the global batch size that `options` was written for.
    """

    options: JobOptions
    data: DataIdentity
    place: Place
    identity: JobIdentity
    search: MemorySearch | None = None
    """Where upper bounds are found by memory, until they are."""
    schedule: Schedule = field(init=False)
    noise: NoiseAverage = field(default_factory=NoiseAverage, init=False)
    fast_loop: FastLoop = field(init=False)
    traces: TraceField | None = field(init=False)
    """The traces of the agents of all nodes, under `stigmergy`."""
    reporter: Reporter = field(init=False)
    """Once the generation has begun."""
    windows: Windows = field(init=False)
    """Counted from the generation's first step."""
    last_timed: int | None = None
    """The step after which rank 0 looks at the times of the first steps, if it does."""
    started: bool = False
    ended: bool = False
    held_out_accuracy: float | None = None
    """The newest that the script reported."""
    num_epochs: int | None = None
    """As passed to `session.epochs`, by this script or in the saved run."""
    total_samples: int | None = None
    """Samples of the whole planned run, all epochs; `None` when the end is open."""

    def __post_init__(self) -> None:
        """Begin with the options of `attach`, within the bounds that all ranks know."""
        initial = self.options.initial_allocation
        self.schedule = Schedule(self.bounded(initial, self.identity.max_local_batch_sizes))
        self.windows = self._windows_from(0)
        self.use_identity(self.identity)

    def use_identity(self, identity: JobIdentity) -> None:
        """Take another generation or other upper bounds; speeds tracked so far are dropped."""
        self.identity = identity
        fewest, most = self.options.min_local_batch_size, identity.max_local_batch_sizes
        self.fast_loop = FastLoop(self.schedule, fewest, most)
        self.traces = field_of(self.options, identity)

    @property
    def calm_times(self) -> int:
        """`CALM_TIMES` if no decision is due, and the division stands: less is measured and reported; else 1."""
        return CALM_TIMES if self.options.policy == "split" and self.fast_loop.is_calm else 1

    @property
    def reference_steps(self) -> ReferenceSteps:
        """Converts samples to steps of the script's global batch."""
        options = self.options
        return ReferenceSteps(self.data.size, options.base_global_batch_size, options.drop_last)

    def bounded(self, allocation: Allocation, caps: tuple[int, ...]) -> Allocation:
        """An allocation with no size above its rank's bound.

        Where only the sum was decided, or the sum is fixed, what is above one rank's bound goes to the others.
        """
        sizes, lower = allocation.local_batch_sizes, self.options.min_local_batch_size
        if allocation.split != "fixed" or self.options.global_batch == "fixed":
            return allocation.with_sizes(apportion(sum(sizes), sizes, [min(lower, cap) for cap in caps], caps))
        return allocation.with_sizes(tuple(map(min, sizes, caps)))

    def begin(self, first_step: int) -> None:
        """Count windows from a step; the initial allocation in the job's specification becomes active."""
        self.windows, self.started = self._windows_from(first_step), True
        initial = self.schedule.allocation_at(first_step)
        in_first = self.windows.window_of(first_step + NUM_TIMED) == 0
        self.last_timed = first_step + NUM_TIMED - 1 if in_first and is_timed(self.options, initial) else None
        self.reporter = Reporter(self.options, self.identity, self.place, initial)
        if self.search is not None:
            self.fast_loop.upper = initial.local_batch_sizes

    def before_update(self) -> None:
        """An optimizer begins to step."""
        if self.search is not None:
            self.search.before_update()

    def _windows_from(self, first_step: int) -> Windows:
        options = self.options
        return Windows(options.window_steps, options.margin_steps, options.min_window_s, first_step)


def field_of(options: JobOptions, identity: JobIdentity) -> TraceField | None:
    """The empty field of a job under `stigmergy`; `None` in all other jobs."""
    if options.policy != STIGMERGY:
        return None
    view = FieldView(
        activity=(),
        own=None,
        keeps_global_batch=options.global_batch == "fixed",
        rate_exponent=RATE_EXPONENTS[options.learning_rate_rule],
        options={name: float(value) for name, value in {**STIGMERGY_OPTIONS, **options.policy_options}.items()},
        base_global_batch_size=options.base_global_batch_size,
    )
    return TraceField(identity.nodes, view)
