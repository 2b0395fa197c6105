"""Steering of one rank: what is due after which step, equal on all ranks.

Two loops meet here: the slow one, decisions off the bus, and the fast one, which needs no bus: under tracking every
rank derives a new split from the compute times that the gradients brought along. Where the traces of agents rule, all
ranks derive sum and split from those, at the same steps as from decisions.

Steps are counted over the whole run, windows from the generation's first step. All ranks call `after_step` after the
same steps, and whether a collective is due depends on the step's number only: no rank ever waits for one that another
does not enter. Each collective is posted after one step and completed after the next.
"""

import time
from dataclasses import dataclass, field

from dynamix.trainer.data.sampler import Position
from dynamix.trainer.measurement.clock import AnyClock
from dynamix.trainer.wire.transport import Transport

from .adoption import Adoption
from .collectives import AnyCollectives
from .field_exchange import FieldExchange
from .run import Run
from .window_end import WindowEnd


@dataclass(kw_only=True)
class Steering:
    """One rank's side of both loops."""

    run: Run
    window_end: WindowEnd
    adoption: Adoption
    clock: AnyClock
    collectives: AnyCollectives
    transport: Transport
    _field_exchange: FieldExchange = field(init=False)
    _counts_before: tuple[int, ...] = field(default=(), init=False)
    _num_alike: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Be ready for traces, where they rule."""
        self._field_exchange = FieldExchange(self.run, self.collectives, self.transport)

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
            self._field_exchange.post(ahead)
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
        self._field_exchange.complete()
