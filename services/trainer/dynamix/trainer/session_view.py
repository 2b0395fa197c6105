"""The view of a session: what a script may ask it at any time."""

from dynamix.schemas.messages.allocation import Allocation

from .data.loader import Loader
from .data.sampler import MicroBatch
from .loggers.history import MetricHistory
from .measurement.clock import StepTimes
from .measurement.meter import RankMeter
from .steering.run import Run


class SessionView:
    """The questions that a session answers; none changes anything."""

    _run: Run
    _loader: Loader
    _meter: RankMeter
    _history: MetricHistory

    @property
    def job(self) -> str:
        """The job's id on the bus."""
        return self._run.identity.job

    @property
    def generation(self) -> int:
        """Which start of the job this is, from 0; never the same twice, but numbers may be left out."""
        return self._run.identity.generation

    @property
    def step_index(self) -> int:
        """Optimizer steps done so far, over all generations: the number of the current or next step."""
        return self._loader.position.step

    @property
    def window(self) -> int:
        """Window of the current or next step, from 0 in each generation."""
        return self._run.windows.window_of(self.step_index)

    @property
    def position(self) -> int:
        """Samples used so far, over all epochs and ranks."""
        return self._loader.position.samples_seen

    @property
    def progress(self) -> float:
        """Reference steps so far: optimizer steps of plain training on as many samples. For loops that count steps."""
        return self._run.reference_steps.before(self._loader.position)

    @property
    def num_reference_steps(self) -> int:
        """Reference steps of an epoch: what `len(loader)` is in plain training, whatever the batch does."""
        return self._run.reference_steps.per_epoch

    @property
    def allocation(self) -> Allocation:
        """What rules the current or next step: sizes, who divides them, how gradients travel."""
        return self._run.schedule.allocation_at(self.step_index)

    @property
    def local_batch_sizes(self) -> tuple[int, ...]:
        """The sizes that rule the current or next step, by rank."""
        return self.allocation.local_batch_sizes

    @property
    def global_batch_size(self) -> int:
        """Samples of the current step over all ranks: at the end of an epoch less than the sizes say."""
        batch = self._loader.current
        return sum(self.local_batch_sizes) if batch is None else batch.plan.counts.total

    @property
    def num_samples(self) -> int:
        """This rank's samples in the current batch, or in the last one; 0 in a dummy that counts for nothing."""
        return (self._loader.current or self._loader.last_finished or self._current()).num_samples

    @property
    def times(self) -> StepTimes | None:
        """Times of the newest step that was timed; on a GPU that is a window's last."""
        return self._meter.clock.last

    def metrics(self) -> list[dict[str, float | str]]:
        """The windows so far, the newest 4,096, as the loggers get them: `pandas.DataFrame(session.metrics())`.

        Sizes, times, throughput, noise, loss; what is not known is left out. In global rank 0 also the decision and
        its reason, and where a reward service runs, its rewards.
        """
        return self._history.rows()

    def _current(self) -> MicroBatch:
        if self._loader.current is None:
            raise RuntimeError("there is no current batch: this is known between a batch and session.step()")
        return self._loader.current
