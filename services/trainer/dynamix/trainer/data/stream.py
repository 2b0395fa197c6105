"""Streams: data sets that can only be read from the beginning (`IterableDataset`).

Every rank reads the same stream, and in each step keeps the samples of its slice. It reads to the step's last sample,
also past its own: so all ranks find the end in the same step and know what is left, without a message. A worker reads
the whole stream as well. What a rank drops costs no more than reading: decode in `collate_fn`, which gets what is kept.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple, Unpack

from torch.utils.data import Dataset, IterableDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from .division import Division, StepPlan
from .fingerprint import ONE_PART, digest, divides_by_rank, makes_batches, seeds_of
from .orders import DataIdentity, Order, OrderExchange, Orders
from .random_numbers import RandomNumbers, seed_all
from .sampler import MicroBatch, PlanSampler, Position, SamplerOptions
from .schedule import Counts, Schedule, divide_tail

ENDLESS = 1 << 62
"""Samples of an epoch whose end was not found yet."""


class StreamRead(NamedTuple):
    """What was read for a step: this rank's micro-batches, and how many samples all ranks have."""

    batches: list[Any]
    num_read: int
    first_digest: int
    """Digest of the epoch's first sample."""


class StreamOrders(Orders):
    """A stream's own order; how long an epoch is shows when its end is read."""

    def __init__(self, dataset: IterableDataset[Any], seed: int) -> None:
        num_samples = len(dataset) if isinstance(dataset, Sized) else 0
        super().__init__(DataIdentity(num_samples, seed, shuffle=False, sampler="stream"))
        self._dataset = dataset
        self._end: tuple[int, int] | None = None
        self._begun: tuple[int, int] | None = None

    def connect(self, exchange: OrderExchange) -> None:
        """Read the first sample, and make sure that all ranks read the same stream; a collective call.

        Raises:
            ValueError: on all ranks, when it divides itself by rank, makes batches, yields nothing, or begins
                otherwise than on another rank.
        """
        if exchange.world_size > 1 and (by := divides_by_rank(self._dataset)):
            fix = "pass nodesplitter=None to it" if by == "single_node_only" else "leave that out"
            raise ValueError(
                f"the stream divides itself by rank ({by}), but every rank must read all of it, session.loader gives "
                f"each its part: {fix}"
            )
        if makes_batches(self._dataset):
            raise ValueError("the stream makes batches (batched), session.loader makes them itself: leave that out")
        with _as_if_alone():
            first = list(islice(begin_stream(self._dataset, self.identity.seed, 0), 1))
        found = exchange.gather_objects(digest([*first, *seeds_of(self._dataset)]) if first else 0)
        if not any(found):
            raise ValueError(f"the data set, a {type(self._dataset).__name__}, yields nothing")
        if len(set(found)) > 1:
            raise ValueError(f"the data set is a stream that differs between ranks: it {ONE_PART}")

    def count_by_tokens(self, _token_counts: Sequence[int], _dataset: object, *, most: int) -> None:  # noqa: ARG002
        """Refuse: samples are not known before they are read."""
        raise ValueError("token_counts needs a data set with __getitem__: with a stream use count_tokens")

    def end_epoch(self, epoch: int, num_samples: int) -> None:
        """An epoch's end was read."""
        self._end = (epoch, num_samples)

    def begin_epoch(self, epoch: int, first_digest: int) -> None:
        """An epoch's first sample was read, by this process or by one of its workers.

        Raises:
            ValueError: when it was another one before, in the saved run or in another worker.
        """
        before = self.digest_of(epoch)
        if before is not None and before != first_digest:
            raise ValueError(
                f"the stream begins epoch {epoch} with another sample than before (in the saved run, or in another "
                "worker), so samples would be repeated or left out: its order may depend on set_epoch and on the "
                "random numbers of torch, numpy and Python only, not on how often it was read"
            )
        self._begun = (epoch, first_digest)

    def digest_of(self, epoch: int) -> int | None:
        """Digest of the first sample of an epoch that was begun, here or in the saved run."""
        return next((known[1] for known in (self._expected, self._begun) if known and known[0] == epoch), None)

    def size_of(self, epoch: int) -> int:
        """Samples of an epoch, as far as is known."""
        if self._end is not None and self._end[0] == epoch:
            return self._end[1]
        return self.num_samples or ENDLESS

    def _make_order(self, _epoch: int) -> Order:
        raise AssertionError("a stream is not indexed")


class StreamSampler(PlanSampler):
    """Draws the plans of steps, for a `StreamReader`."""

    def __init__(self, orders: StreamOrders, schedule: Schedule, **options: Unpack[SamplerOptions]) -> None:
        super().__init__(orders, schedule, **options)
        self.stream = orders
        self._plans: deque[StepPlan] = deque()

    def rewind(self, position: Position) -> None:
        """Draw on from `position`; what was drawn ahead and not used is forgotten."""
        super().rewind(position)
        self._plans.clear()

    def __iter__(self) -> Iterator[Any]:
        while not self.is_over(self._position):
            plan = self.plan_at(self._position)
            self._position = self._position.after(plan)
            self.last_drawn_step = max(self.last_drawn_step, plan.step)
            self._plans.append(plan)
            yield plan

    def take_step(self, num_read: int, first_digest: int) -> list[MicroBatch]:
        """This rank's micro-batches of the oldest plan, of which so many samples were read; none after the end."""
        plan = self._plans.popleft()
        if num_read:
            self.stream.begin_epoch(plan.epoch, first_digest)
        if num_read < plan.counts.total:
            self.stream.end_epoch(plan.epoch, plan.offset + num_read)
            if num_read == 0 or self.is_over(Position(plan.step, plan.epoch, plan.offset)):
                return []
        return list(self.micro_batches(shortened(plan, num_read)))

    def num_batches_left(self, position: Position) -> int:
        """Batches to the end of the epoch.

        Raises:
            TypeError: when the stream has no length.
        """
        if self.orders.size_of(position.epoch) == ENDLESS:
            raise TypeError("the stream has no length: give its class a __len__, or stop by session.progress")
        return self._num_batches_by_plan(position)


class StepSamples(NamedTuple):
    """What was read for a step, before it is collated."""

    parts: list[list[Any]]
    num_read: int
    first_digest: int


class StreamReader(Dataset[Any]):
    """Stands for a stream in a `DataLoader`: reads what a rank needs for a step, in a worker or without one."""

    def __init__(self, dataset: IterableDataset[Any], seed: int, division: Division) -> None:
        self._dataset = dataset
        self._seed = seed
        self._division = division
        self._at = (-1, 0)
        """Epoch, and samples of it that were read."""
        self._samples: Iterator[Any] = iter(())
        self._first_digest = 0
        self._numbers: RandomNumbers | None = None
        """The stream's own, so that it is the same on all ranks and in all workers."""

    def __getitems__(self, plan: StepPlan) -> StepSamples:
        """This rank's samples of a step; fewer than planned where the stream ends."""
        with _as_if_alone():
            if self._at[0] != plan.epoch or self._at[1] > plan.offset:
                self._begin(plan.epoch)
            elif self._numbers is not None:
                self._numbers.restore()
            deque(islice(self._samples, plan.offset - self._at[1]), maxlen=0)
            samples = list(islice(self._samples, plan.counts.total))
            self._at, self._numbers = (plan.epoch, plan.offset + len(samples)), RandomNumbers.capture()
        if not samples:
            return StepSamples([], 0, 0)
        parts = self._division.parts(shortened(plan, len(samples)))
        mine = [samples[start - plan.offset : stop - plan.offset] or samples[:1] * 2 for start, stop, _ in parts]
        return StepSamples(mine, len(samples), self._first_digest)

    def _begin(self, epoch: int) -> None:
        samples = begin_stream(self._dataset, self._seed, epoch)
        first = list(islice(samples, 1))
        self._samples, self._at, self._first_digest = chain(first, samples), (epoch, 0), digest(first)


class CollateParts:
    """Collates each micro-batch of a step."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._collate_fn = collate_fn or default_collate

    def __call__(self, samples: StepSamples) -> StreamRead:
        """The step's batches."""
        batches = [self._collate_fn(part) for part in samples.parts]
        return StreamRead(batches, samples.num_read, samples.first_digest)


def shortened(plan: StepPlan, num_read: int) -> StepPlan:
    """The plan of a step for which so many samples are left."""
    if num_read == plan.counts.total:
        return plan
    return plan._replace(counts=Counts(divide_tail(num_read, plan.counts.values)))


def begin_stream(dataset: IterableDataset[Any], seed: int, epoch: int) -> Iterator[Any]:
    """A stream from the beginning, under random numbers that are the same on all ranks."""
    seed_all(seed, epoch)
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    return iter(dataset)


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """Hide that this is a worker, for which a stream would yield a part, and put random numbers back afterwards."""
    outside, info = RandomNumbers.capture(), torch_worker._worker_info  # noqa: SLF001 - no public way to set it
    torch_worker._worker_info = None  # noqa: SLF001
    try:
        yield
    finally:
        torch_worker._worker_info = info  # noqa: SLF001
        outside.restore()
