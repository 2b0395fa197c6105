"""The loader: batches for this rank, each with the plan of its step.

A thin shell over `torch.utils.data.DataLoader`, which may run workers and prefetch. The position moves when a step is
done, not when a batch is drawn, so that a saved state never counts what was only prefetched.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypedDict

from torch.utils.data import DataLoader, Dataset

from .sampler import PlanSampler, Position, StepPlan


class LoaderOptions(TypedDict, total=False):
    """Options that are handed to `torch.utils.data.DataLoader` as they are."""

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory: bool
    collate_fn: Callable[[list[Any]], Any]
    worker_init_fn: Callable[[int], None]
    multiprocessing_context: Any
    generator: Any
    timeout: float


PREFETCH_FACTOR = 2
"""`DataLoader`'s own, when none is given."""


def drawn_ahead(options: LoaderOptions) -> int:
    """Batches that a loader draws before they are asked for: workers times prefetch factor."""
    prefetch_factor = options.get("prefetch_factor")
    return options.get("num_workers", 0) * (PREFETCH_FACTOR if prefetch_factor is None else prefetch_factor)


class Loader:
    """Iterating over it yields the rest of the current epoch, then the next epoch, and so on."""

    def __init__(self, dataset: Dataset[Any], sampler: PlanSampler, *, options: LoaderOptions) -> None:
        self.position = Position()
        """Where the run stands: moves with `finish_step`."""
        self.plan: StepPlan | None = None
        """The plan of the batch in the user's hands; `None` between two steps."""
        self._sampler = sampler
        self._on_start: Callable[[], None] = _nothing
        self._on_ask: Callable[[], None] = _nothing
        self._on_batch: Callable[[StepPlan], None] = _nothing
        self._batches: DataLoader[Any] = DataLoader(dataset, batch_sampler=sampler, **options)

    def bind(
        self, *, on_start: Callable[[], None], on_ask: Callable[[], None], on_batch: Callable[[StepPlan], None]
    ) -> None:
        """Call `on_start` before anything is drawn, `on_ask` and `on_batch` before and after each batch is."""
        self._on_start, self._on_ask, self._on_batch = on_start, on_ask, on_batch

    def __len__(self) -> int:
        """Steps left in the epoch, if no further size is scheduled."""
        return self._sampler.num_steps_left(self._next_start())

    def __iter__(self) -> Iterator[Any]:
        """Yield batches.

        Raises:
            RuntimeError: when a batch is asked for before `session.step` ended the last one.
        """
        self._on_start()
        self.position = self._next_start()
        self.plan = None
        self._sampler.rewind(self.position)
        batches = iter(self._batches)
        while True:
            self._require_step()
            self._on_ask()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.plan = self._sampler.plans.popleft()
            self._on_batch(self.plan)
            yield batch

    @property
    def epoch_is_over(self) -> bool:
        """Whether the position's epoch has no step left."""
        return self._sampler.is_over(self.position)

    def begin_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; inside of it, stay."""
        if self.position.epoch != epoch:
            self.position = self.position.at_epoch(epoch)

    def finish_step(self) -> StepPlan:
        """Move the position past the current batch and return its plan.

        Raises:
            RuntimeError: when no batch is in the user's hands.
        """
        if self.plan is None:
            raise RuntimeError("session.step() without a batch: call it once after each batch of session.loader")
        plan, self.plan = self.plan, None
        self.position = self.position.after(plan)
        return plan

    def _next_start(self) -> Position:
        return self.position.at_epoch(self.position.epoch + 1) if self.epoch_is_over else self.position

    def _require_step(self) -> None:
        if self.plan is not None:
            raise RuntimeError(
                f"step {self.plan.step} is not finished: call session.step(loss) once after each batch, also when the "
                "batch was skipped; all ranks must take the same number of steps"
            )


def _nothing(*_: object) -> None:
    """What an unbound loader calls."""
