"""The end of a window: all ranks gather their rows, and the first rank of each node reports them.

Two phases, one step apart, as in `adoption`: `post` after the window's last step sends this rank's row, `complete`
after the next step has the rows of all ranks and publishes the report.
"""

from collections.abc import Sequence

from dynamix.schemas.messages import JobTotals
from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.data.fingerprint import ONE_PART
from dynamix.trainer.data.sampler import Position
from dynamix.trainer.data.schedule import Counts
from dynamix.trainer.gradient.losses import LossWarnings
from dynamix.trainer.gradient.noise import window_moments
from dynamix.trainer.loggers.history import MetricHistory
from dynamix.trainer.loggers.window_metrics import window_metrics
from dynamix.trainer.measurement.clock import StepTimes
from dynamix.trainer.measurement.meter import RankMeter
from dynamix.trainer.measurement.rows import Row, job_totals, wall_s
from dynamix.trainer.wire.transport import Transport

from .collectives import AnyCollectives
from .run import Run

SPECIFIED_EVERY = 64
"""Windows after which the job's specification is published again. While the broker remembers it, it drops this one as a
duplicate; one that lost or evicted the entry has it back."""


class WindowEnd:
    """One rank's side of ending windows."""

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
        """Where the window ended whose rows are on their way, and what ruled its last step."""
        self._sockets_due = False
        self.differing: str | None = None
        """What is wrong with the data, where the ranks have read different streams."""

    @property
    def is_posted(self) -> bool:
        """Whether `complete` or `match_sockets` has something to do."""
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
            self._losses.observe_window([row.num_samples for row in rows], [row.loss_sum for row in rows])
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
        if run.place.rank == 0 and (window + 1) % SPECIFIED_EVERY == 0:
            self._transport.publish(run.specification())
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
        """Let all ranks find their sockets again after this step: they have made new ones."""
        self._sockets_due = True

    def match_sockets(self) -> None:
        """Find the sockets to other ranks again after the first window: some back ends connect at first use."""
        if not self._sockets_due:
            return
        self._sockets_due = False
        sockets, place = self._meter.sockets, self._run.place
        listings = self._collectives.gather_objects(sockets.candidates())
        sockets.match(listings, place.rank, place.node_ranks)
