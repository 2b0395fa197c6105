"""Streams: data sets that can only be read from the beginning (`IterableDataset`).

Every rank reads the same stream, and in each step keeps the samples of its slice. It reads to the step's last sample,
also past its own: so all ranks find the end in the same step and know what is left. A worker reads the whole stream as
well. What a rank drops costs no more than reading: decode in `collate_fn`, which gets what is kept.

Every sample is digested where it is read. Each step goes on from the digest of the one before, of another worker or of
the saved run; the ranks compare theirs with each window's rows, and where an epoch ends.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import Dataset, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from .orders import ONE_PART, DataIdentity, Orders, RandomNumbers, Ranks, digest, seed_all
from .plan import Counts, Division, MicroBatch, PlanSampler, Position, StepPlan, divide_tail

ENDLESS = 1 << 62
"""Samples of an epoch whose end was not found yet."""

WAIT_S = 60.0
"""How long a rank at the end of a stream waits for the others, which are in the same step, before it fails."""


class StreamRead(NamedTuple):
    """Data read for a step: this rank's micro-batches, and how many samples all ranks have."""

    batches: list[Any]
    num_read: int
    before: int
    """Digest of the epoch's samples before the step."""
    digest: int
    """With the step's."""


class StreamOrders(Orders):
    """A stream's own order; how long an epoch is shows when its end is read."""

    def __init__(self, dataset: IterableDataset[Any], seed: int) -> None:
        num_samples = len(dataset) if isinstance(dataset, Sized) else 0
        super().__init__(DataIdentity(num_samples, seed, shuffle=False, sampler="stream"))
        self._dataset = dataset
        self._end: tuple[int, int] | None = None

    def connect(self, ranks: Ranks, _dataset: object, _loader_options: Mapping[str, Any]) -> None:
        """Read the first sample, and make sure that all ranks read the same stream; a collective call.

        Raises:
            ValueError: on all ranks, when it yields nothing, or begins otherwise than on another rank.
        """
        self._ranks = ranks
        with _as_if_alone():
            first = list(islice(begin_stream(self._dataset, self.identity.seed, 0), 1))
        found = ranks.gather_objects(digest(first))
        if len(set(found)) > 1:
            raise ValueError(f"the data set is a stream that differs between ranks: it {ONE_PART}")
        if not first:
            raise ValueError(f"the data set, a {type(self._dataset).__name__}, yields nothing")

    def count_by_tokens(self, _token_counts: Sequence[int], _dataset: object, *, most: int) -> None:  # noqa: ARG002
        """Refuse: samples are not known before they are read."""
        raise ValueError("token_counts needs a data set with __getitem__: with a stream use count_tokens")

    def end_epoch(self, epoch: int, num_samples: int, read: int) -> None:
        """An epoch's end was read, and samples with the digest `read`; a collective call.

        Raises:
            ValueError: when another rank has read other samples, or more.
        """
        if self._end == (epoch, num_samples):
            return
        self._end = (epoch, num_samples)
        at = f"the stream ends after {num_samples} samples of epoch {epoch} on rank {self._ranks.rank}"
        try:
            ends = self._ranks.gather_objects((num_samples, read), within_s=WAIT_S)
        except RuntimeError as error:
            raise ValueError(f"{at}, and other ranks still read {WAIT_S:g} s later: it {ONE_PART}") from error
        for rank, end in enumerate(ends):
            if end != ends[0]:
                raise ValueError(
                    f"rank {rank} has read {end[0]} samples in epoch {epoch} of the stream, and rank 0 other ones or "
                    f"another number ({ends[0][0]}): it {ONE_PART}"
                )

    def size_of(self, epoch: int) -> int:
        """Samples of an epoch, as far as is known."""
        if self._end is not None and self._end[0] == epoch:
            return self._end[1]
        return self.identity.num_samples or ENDLESS


class StreamSampler(PlanSampler):
    """Draws the plans of steps, for a `StreamReader`; these are what is `drawn`."""

    orders: StreamOrders

    def __iter__(self) -> Iterator[Any]:
        while not self.is_over(self._position):
            plan = self.plan_at(self._position)
            self._position = self._position.after(plan)
            self.last_drawn_step = max(self.last_drawn_step, plan.step)
            self.drawn.append(plan)
            yield plan

    def take(self, read: Iterable[StreamRead], digest: int | None) -> Iterator[tuple[MicroBatch, Any]]:
        """This rank's batches as far as their samples could be read; `digest` is that of the epoch's until now.

        Raises:
            ValueError: when the samples before were others, or other ranks have read others or more.
        """
        epoch, offset = self._position.epoch, self._position.offset
        before = (digest or 0) if offset else 0
        for step in read:
            plan = self.drawn.popleft()
            if plan.offset >= self.orders.size_of(epoch):  # drawn before the end was found
                return
            if step.before != before:
                raise ValueError(
                    f"the first {plan.offset} samples of epoch {epoch} of the stream are others than before (in the "
                    "saved run, or in another worker), so samples would be repeated or left out: its order may depend "
                    "on set_epoch and on the random numbers of torch, numpy and Python only, not on how often it was "
                    "read"
                )
            before, offset = step.digest, plan.offset + step.num_read
            if step.num_read < plan.counts.total:
                self.orders.end_epoch(epoch, offset, before)
                if step.num_read == 0 or self.is_over(Position(plan.step, epoch, plan.offset)):
                    return
            plan = shortened(plan, step.num_read)._replace(digest=before)
            yield from zip(self.micro_batches(plan), step.batches, strict=True)
        self.orders.end_epoch(epoch, offset, before)

    def num_batches_left(self, position: Position) -> int:
        """Batches to the end of the epoch. Raises TypeError when the stream has no length."""
        if self.orders.size_of(position.epoch) == ENDLESS:
            raise TypeError("the stream has no length: give its class a __len__, or stop by session.progress")
        return super().num_batches_left(position)


@dataclass
class StreamReader(Dataset[Any]):
    """Stands for a stream in a `DataLoader`: reads what a rank needs for a step, in a worker or without one."""

    dataset: IterableDataset[Any]
    seed: int
    division: Division
    collate_fn: Callable[[list[Any]], Any]
    _at: tuple[int, int] = (-1, 0)
    """Epoch, and samples of it that were read."""
    _samples: Iterator[Any] = field(default_factory=lambda: iter(()))
    _digest: int = 0
    """The digest of the epoch's samples that were read."""
    _numbers: RandomNumbers | None = None
    """The stream's own, so that it is the same on all ranks and in all workers."""

    def __getitems__(self, plan: StepPlan) -> StreamRead:
        """This rank's batches of a step; fewer samples than planned where the stream ends."""
        with _as_if_alone():
            if self._at[0] != plan.epoch or self._at[1] > plan.offset:
                self._samples = begin_stream(self.dataset, self.seed, plan.epoch)
                self._at, self._digest = (plan.epoch, 0), 0
            elif self._numbers is not None:
                self._numbers.restore()
            for sample in islice(self._samples, plan.offset - self._at[1]):
                self._digest = digest(sample, self._digest)
            samples = list(islice(self._samples, plan.counts.total))
            self._at, self._numbers = (plan.epoch, plan.offset + len(samples)), RandomNumbers.capture()
        before = self._digest
        for sample in samples:
            self._digest = digest(sample, self._digest)
        if not samples:
            return StreamRead([], 0, before, before)
        parts = self.division.parts(shortened(plan, len(samples)))
        mine = [samples[start - plan.offset : stop - plan.offset] or samples[:1] * 2 for start, stop, _ in parts]
        return StreamRead([self.collate_fn(part) for part in mine], len(samples), before, self._digest)


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
