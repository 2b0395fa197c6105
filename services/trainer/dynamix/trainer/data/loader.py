"""The loader: batches for this rank, each with the plan of its step.

A thin shell over `torch.utils.data.DataLoader`, which may run workers and prefetch. The position moves when a step is
done, not when a batch is drawn, so that a saved state never counts what was only prefetched.
"""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from dynamix.schemas.spelling import nearest
from dynamix.trainer.arguments import AtLeast0, checked

from .orders import Orders
from .plan import Division, MicroBatch, PlanSampler, Position, Schedule
from .stream import StreamOrders, StreamReader, StreamSampler

_log = logging.getLogger("dynamix.trainer")


class LoaderOptions(TypedDict, total=False):
    """Options that are handed to `torch.utils.data.DataLoader` as they are."""

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory: bool
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None]
    multiprocessing_context: Any
    generator: Any
    timeout: float


class Source(NamedTuple):
    """The data set, the order of its samples and how they are loaded."""

    dataset: Dataset[Any]
    orders: Orders
    local_batch_size: Any
    """As `attach` takes it; of a script's loader the samples of a rank's step."""
    drop_last: bool
    options: LoaderOptions
    loader: DataLoader[Any] | None = None
    """The script's own."""


CountTokens = Callable[[Any], int | torch.Tensor]
"""The number of tokens of a batch that count in its loss."""

MOST_LEFT = 4
"""Loops without a step after which a rank warns."""
PREFETCH_FACTOR = 2
"""`DataLoader`'s own, when none is given."""


def check_loader_options(options: LoaderOptions, look_ahead: int, known: Iterable[str]) -> None:
    """Raise TypeError for options that are not the loader's, ValueError for a script that looks back.

    `known` are the other arguments of `attach`, of which one may be meant.
    """
    checked("look_ahead", look_ahead, AtLeast0)
    if unknown := sorted(set(options) - set(LoaderOptions.__annotations__)):
        if near := nearest(unknown[0], [*known, *LoaderOptions.__annotations__]):
            raise TypeError(f"attach does not know {unknown[0]}: did you mean {near}?")
        raise TypeError(
            f"attach does not know {', '.join(unknown)}; for the loader it takes "
            f"{', '.join(LoaderOptions.__annotations__)} - batches, order and sampler are its own"
        )


@dataclass(eq=False)
class _Loop:
    """A loop over the loader; the script may run another one inside of it, which only looks at batches."""

    began_at: Position
    position: Position
    is_open: bool = True
    """Whether the script can go on with it."""
    first: Callable[[], object] | None = None
    """The first tensor of its first batch, while that lives."""
    held: deque[MicroBatch] = field(default_factory=deque)
    """Batches that were handed out and not trained yet, oldest first; more than one if the script looks ahead."""
    is_exhausted: bool = False
    """Whether it reached the end of its epoch."""
    num_untrained: int = 0
    """Batches that were passed by without any training on them."""
    num_trained: int = 0
    """Batches of the steps that ended."""
    num_in_step: int = 0
    plans: tuple[Any, ...] = ()
    """State of the sampler when another loop began."""


class Loader:
    """Batches for this rank; each loop over it is an epoch, or the rest of one after a resume.

    Its other attributes are those of the script's `DataLoader`: `loader.sampler`, `loader.batch_size`.
    """

    def __init__(
        self,
        source: Source,
        schedule: Schedule,
        *,
        division: Division,
        shares_tail: bool,
        look_ahead: int,
        count_tokens: CountTokens | None,
    ) -> None:
        self._given = source.loader
        self.dataset = dataset = source.dataset
        """The script's data set."""
        self.last_finished: MicroBatch | None = None
        self.on_start: Callable[[], None]
        """Called before anything is drawn."""
        self.on_trained: Callable[[], bool]
        """Called before a batch is drawn; returns whether it has finished the batch that was trained on, if any was."""
        self.on_ask: Callable[[], None]
        """Called before a batch to train on is drawn."""
        self.on_step: Callable[[], None] = lambda: None
        """Called before the first batch of a step is drawn; it may go elsewhere."""
        self.on_batch: Callable[[MicroBatch], None]
        """Called with each batch to train on."""
        self.on_exhausted: Callable[[], None]
        """Called when a loop came to the end of its epoch and all of its steps have ended."""
        self._num_left = 0
        """Loops that began since a batch was finished."""
        self._loop = _Loop(Position(), Position(), is_open=False)
        self._is_stale = False
        """Whether the position has moved under a loop: what it has drawn does not count."""
        self._digest: int | None = None
        """The digest of a stream's samples in the position's epoch, up to the position."""
        self._look_ahead = look_ahead
        self._count_tokens = count_tokens
        orders, options = source.orders, source.options
        how: Any = {"division": division, "drop_last": source.drop_last, "shares_tail": shares_tail}
        self.plans: PlanSampler
        if isinstance(orders, StreamOrders):
            assert isinstance(dataset, IterableDataset), "as its orders"
            self.plans = StreamSampler(orders, schedule, **how)
            collate = options.get("collate_fn") or default_collate
            dataset = StreamReader(dataset, orders.identity.seed, division, collate)
            options = {**options, "collate_fn": _as_it_is}
        else:
            self.plans = PlanSampler(orders, schedule, **how)
        self._batches: DataLoader[Any] = DataLoader(dataset, batch_sampler=self.plans, **options)

    def __len__(self) -> int:
        """Batches of the loop that runs, or else of the next one, if no further size is scheduled.

        As many as iterating yields, which progress bars and conditions on the last batch rely on. Right after a resume
        within an epoch these are the batches that are left of it; schedules of a whole run are sized by
        `session.num_reference_steps`, or before the state is loaded.
        """
        num_trained = self._loop.num_trained
        if num_trained and self.epoch_is_over and not self._loop.held:  # in the loop still, after its last step
            return num_trained
        start = self.position if num_trained else self.next_start()  # of the loop that runs
        return num_trained + self.plans.num_batches_left(start)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the script's own loader."""
        given = self.__dict__.get("_given")
        if given is None or name.startswith("_"):
            raise AttributeError(f"session.loader has no {name}: it is no DataLoader, and makes its batches itself")
        return getattr(given, name)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches."""
        self.on_trained()
        outer, mine = self._begin_loop()
        epoch = self.position.epoch
        drawn = self.plans.take(self._batches, self._digest)
        try:
            while True:
                if self._loop is not mine:
                    self._go_back_to(mine)
                if not self.on_trained() and self.is_full:  # nothing was done with it
                    mine.held.popleft()
                    mine.num_untrained += 1
                if not mine.held:  # else it is fetched in the time of another step
                    drawn = self._ask(drawn, epoch)
                try:
                    micro_batch, batch = next(drawn)
                except StopIteration:
                    mine.is_exhausted = True
                    if not mine.held and not self._can_go_back_to(outer):
                        self.on_exhausted()
                    return
                self._hold(micro_batch, batch)
                yield batch
        finally:  # also when the script leaves the loop
            mine.is_open = False
            if self._loop is mine:
                mine.num_trained = 0
                self.plans.last_drawn_step = mine.held[-1].plan.step if mine.held else self.position.step - 1
                if self._can_go_back_to(outer):
                    self._go_back_to(outer)
                    self.begin_held()

    def _ask(self, drawn: Iterator[tuple[MicroBatch, Any]], epoch: int) -> Iterator[tuple[MicroBatch, Any]]:
        """Ask for the next batch of an epoch; returns from where: another place if the position has moved."""
        if not self.epoch_is_over:
            self.on_step()
        if self._is_stale:
            again = self._batches if self.position.epoch == epoch else ()
            self._is_stale, drawn = False, self.plans.take(again, self._digest)
        self.on_ask()
        return drawn

    def _begin_loop(self) -> tuple[_Loop, _Loop]:
        """Begin a loop; returns the one before, and the new one."""
        outer = self._loop
        if outer.held and outer.is_exhausted:  # the script looks ahead past the end of an epoch
            newest = outer.held[-1].plan
            self._loop = _Loop(outer.began_at, outer.position, held=outer.held)
            self.plans.rewind(self.position.after(newest).at_epoch(newest.epoch + 1))
        else:
            self.on_start()
            outer.plans, start = self.plans.state, self.next_start()
            self._loop = _Loop(start, start)
            self.plans.rewind(start)
            self._num_left += 1
            if self._num_left == MOST_LEFT:
                _log.warning(
                    "the loop over the loader began %d times without a step of an optimizer, so that the same batches "
                    "are repeated: attach with the optimizers whose step() is called, or call session.step(loss)",
                    MOST_LEFT,
                )
        return outer, self._loop

    def _hold(self, micro_batch: MicroBatch, batch: Any) -> None:
        """Take a batch that the script gets."""
        if self._count_tokens is not None and micro_batch.num_samples:
            counted: float = checked("count_tokens(batch)", self._count_tokens(batch), float)
            if counted < 0.0 or not counted.is_integer():
                raise ValueError(f"count_tokens(batch) is {counted:g}: return the whole number of tokens that count")
            micro_batch = micro_batch._replace(weight=int(counted))
        self._loop.held.append(micro_batch)
        if len(self._loop.held) == 1:
            self.on_batch(micro_batch)
        if self._loop.first is None:
            tensors = (weakref.ref(each) for each in tree_leaves(batch) if isinstance(each, torch.Tensor))
            self._loop.first = next(tensors, lambda: None)

    def _can_go_back_to(self, loop: _Loop) -> bool:
        """Whether the script may go on with a loop: it has only looked at batches since, and was not within a step."""
        return loop.is_open and self.position.step == loop.position.step and not loop.num_in_step

    def _go_back_to(self, loop: _Loop) -> None:
        if not self._can_go_back_to(loop):
            raise RuntimeError(
                "two loops over the loader are under way, and both train, or one is in the middle of a step: give the "
                "inner one a DataLoader of its own"
            )
        self._loop.plans, self._loop = self.plans.state, loop
        self.plans.state = loop.plans

    @property
    def position(self) -> Position:
        """The position of the run; `finish_batch` advances it after the last micro-batch of a step."""
        return self._loop.position

    @property
    def num_untrained(self) -> int:
        """Batches of the loop that were passed by without any training on them."""
        return self._loop.num_untrained

    @property
    def current(self) -> MicroBatch | None:
        """The batch to train on now; `None` before the first one, and after `session.step` until the next is drawn."""
        return self._loop.held[0] if self._loop.held else None

    @property
    def are_kept(self) -> bool:
        """Whether the script still has the first batch of a loop that is over, as `itertools.cycle` and lists do."""
        return self._loop.is_exhausted and self._loop.first is not None and self._loop.first() is not None

    @property
    def is_full(self) -> bool:
        """Whether the oldest batch must be done with before the script can have another."""
        return len(self._loop.held) > self._look_ahead

    def saved(self, is_updated: bool) -> tuple[Position | None, int | None]:
        """For a checkpoint: the position, and a digest of its epoch's order, or of what was read of a stream's.

        The step under way counts if it `is_updated`; else the position is `None` where a resumed run would repeat its
        samples. A prefetched batch begins no step.
        """
        current = self.current
        if is_updated and current is not None:
            position, read = self.position.after(current.plan), current.plan.digest
        elif current is not None and (self._look_ahead == 0 or not current.is_first):
            return None, None
        else:
            position, read = self.position, self._digest
        drawn = self.plans.orders.digest_of(position.epoch)
        return position, read if drawn is None else drawn

    @property
    def epoch_is_over(self) -> bool:
        """Whether the epoch of the position has no further step."""
        return self.plans.is_over(self.position)

    def go_to(self, position: Position, order_digest: int | None) -> None:
        """Go on where a saved run was; its epoch's order must have this digest."""
        self._loop.position = self._loop.began_at = position
        self._digest = order_digest
        self.plans.orders.expected = None if order_digest is None else (position.epoch, order_digest)

    def draw_again(self) -> None:
        """Begin again at the position: what was drawn since does not count."""
        self._loop.held.clear()
        self.plans.rewind(self.position)
        self._is_stale = True

    def begin_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; inside of it, stay."""
        if self.position.epoch != epoch:
            self._loop.position, self._loop.is_exhausted = self.position.at_epoch(epoch), False

    def finish_batch(self) -> None:
        """Be done with the current batch; with a step's last one the position moves past the step."""
        loop, self._num_left = self._loop, 0
        self.last_finished = done = loop.held.popleft()
        loop.num_in_step += 1
        if done.is_last:
            loop.position, self._digest = loop.position.after(done.plan), done.plan.digest
            loop.num_trained, loop.num_in_step = loop.num_trained + loop.num_in_step, 0

    def begin_held(self) -> None:
        """Begin with the next batch if the script has it already."""
        if (batch := self.current) is not None:
            self.on_ask()
            self.on_batch(batch)

    def next_start(self) -> Position:
        """Where a loop begins: one that was left after a step has ended its epoch, as one over a `DataLoader`."""
        was_left = self.position.offset > 0 and self.position != self._loop.began_at
        return self.position.at_epoch(self.position.epoch + 1) if was_left or self.epoch_is_over else self.position


def _as_it_is(read: Any) -> Any:
    """In place of `collate_fn`: a stream's batches are collated where they are read."""
    return read
