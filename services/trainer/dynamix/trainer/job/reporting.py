"""Builds the messages of the training side from what the ranks agreed on and measured."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch.distributed.elastic.multiprocessing import SignalException

from dynamix.schemas.messages import Action, Applied, FieldView, Job, JobTotals, Report
from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.data.sampler import Position
from dynamix.trainer.data.schedule import Counts
from dynamix.trainer.measurement.rows import Row, energy_j, held_out_accuracy, rank_row

from .identity import JobIdentity, Place
from .options import JobOptions

MAX_REASON = 1024
"""Most characters of `Job.end_reason`."""

ASKED_TO_STOP = (KeyboardInterrupt, SignalException)
"""A user stopped the run: no launcher is meant to start it again, however many restarts are left."""

LEFT = "left"
"""The script ended, or let go of its session, without `close`."""


class Reporter:
    """Builds this rank's messages; it remembers one window, so that the readers of its reports need not."""

    def __init__(self, options: JobOptions, identity: JobIdentity, place: Place, initial: Allocation) -> None:
        self._options = options
        self._initial = initial
        self._identity = identity
        self._place = place
        self._rows_before: Sequence[Row] | None = None
        self._totals_before: JobTotals | None = None

    def specification(self, *, total_samples: int | None, end_reason: str | None = None) -> Job:
        """The job's specification: running, or ended for a reason."""
        options, initial = self._options, self._initial
        return Job(
            job=self._identity.job,
            generation=self._identity.generation,
            phase="running" if end_reason is None else "ended",
            world_size=len(initial.local_batch_sizes),
            nodes=self._identity.nodes,
            window_steps=options.window_steps,
            initial_local_batch_sizes=initial.local_batch_sizes,
            base_global_batch_size=options.base_global_batch_size,
            min_local_batch_size=options.min_local_batch_size,
            max_local_batch_sizes=self._identity.max_local_batch_sizes,
            optimizer_family=options.optimizer_family,
            policy=options.policy,
            seed=options.seed,
            total_samples=total_samples,
            max_lag_windows=options.max_lag_windows,
            policy_options=dict(options.policy_options),
            end_reason=(end_reason or "")[:MAX_REASON],
            supports_tracking=options.supports_tracking,
            initial_split=initial.split,
            learning_rate_rule=options.learning_rate_rule,
            global_batch=options.global_batch,
            exchange=options.exchange,
            initial_exchange=initial.exchange,
            supports_exchange=options.supports_exchange and options.lasting_exchange is None,
            table_share=options.table_share,
            family=options.family,
            explores=options.explores,
            objective=options.objective,
        )

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
        stretch: int = 1,
        cookies: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
        view: FieldView | None = None,
    ) -> Report:
        """The report of this node on the window that ended at `position`.

        `cookies` are those of the sockets of its ranks; they need no place in the rows, since they hardly ever change.
        `view` is for this node's agent, where agents rule. The window lasted `stretch` times the job's `window_steps`.
        """
        return Report(
            job=self._identity.job,
            generation=self._identity.generation,
            window=totals.window,
            node=self._place.node,
            optimizer_family=self._options.optimizer_family,
            first_step=position.step - totals.num_steps,
            epoch=position.epoch,
            samples_seen=position.samples_seen,
            rows=tuple(
                rank_row(
                    rank,
                    rows[rank],
                    None if self._rows_before is None else self._rows_before[rank],
                    local_batch_size=sizes.values[rank],
                    pending_local_batch_size=pending.local_batch_sizes[rank],
                    cookies=cookies.get(rank, ()),
                )
                for rank in self._place.node_ranks
            ),
            totals=totals,
            totals_before=self._totals_before,
            total_samples=total_samples,
            held_out_accuracy=held_out_accuracy(rows),
            num_reports_dropped=num_reports_dropped,
            field=view,
            energy_j=energy_j(rows),
            stretch=stretch,
        )

    def keep_window(self, rows: Sequence[Row], totals: JobTotals) -> None:
        """Keep a window for the next one's report."""
        self._rows_before, self._totals_before = rows, totals

    def receipt(
        self, action: Action, *, effective_window: int, effective_step: int, num_refused: Mapping[str, int]
    ) -> Applied:
        """The receipt of an adopted action, with its own sizes: under tracking the windows say which were used."""
        return Applied(
            job=self._identity.job,
            generation=self._identity.generation,
            decided_window=action.window,
            effective_window=effective_window,
            effective_step=effective_step,
            local_batch_sizes=action.local_batch_sizes,
            action_hash=action.hash,
            num_refused=dict(num_refused),
            exchange=action.exchange,
        )


def reason_after(error: BaseException | None, *, may_restart: bool) -> str | None:
    """Why the job is over after an error, or none; `None` when a launcher starts it again."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return LEFT
    if may_restart and not isinstance(error, ASKED_TO_STOP):
        return None
    return f"{type(error).__name__}: {error}".removesuffix(": ")
