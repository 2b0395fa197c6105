"""Streams: data sets that can only be read from the beginning (`IterableDataset`).

Every rank reads the same stream, and in each step keeps the samples of its slice. It reads to the step's last sample,
also past its own: so all ranks find the end in the same step and know what is left. A worker reads the whole stream as
well. What a rank drops costs no more than reading: decode in `collate_fn`, which gets what is kept.

Every sample is digested where it is read. Each step goes on from the digest of the one before, of another worker or of
the saved run; the ranks compare theirs with each window's rows, and where an epoch ends.
"""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, NamedTuple, Unpack

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import Dataset, IterableDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from dynamix.schemas.subjects import new_run_id

from .orders import (
    ONE_PART,
    DataIdentity,
    Order,
    OrderExchange,
    Orders,
    RandomNumbers,
    digest,
    divides_by_rank,
    makes_batches,
    seed_all,
    seeds_of,
)
from .plan import Counts, Division, PlanSampler, Position, SamplerOptions, Schedule, StepPlan, divide_tail

ENDLESS = 1 << 62
"""Samples of an epoch whose end was not found yet."""

FIX = f"it {ONE_PART}"

_log = logging.getLogger("dynamix.trainer")


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
        self._agreement: StreamEnds | None = None

    def connect(self, exchange: OrderExchange, _dataset: object, _loader_options: Mapping[str, Any]) -> None:
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
        if exchange.world_size > 1:
            self._agreement = StreamEnds(exchange)

    def disconnect(self) -> None:
        """Release the store."""
        self._agreement = None

    def count_by_tokens(self, _token_counts: Sequence[int], _dataset: object, *, most: int) -> None:  # noqa: ARG002
        """Refuse: samples are not known before they are read."""
        raise ValueError("token_counts needs a data set with __getitem__: with a stream use count_tokens")

    def pass_on(self, epoch: int, num_samples: int) -> None:
        """A step is handed out that is full: the epoch has that many samples at least."""
        if self._agreement is not None:
            self._agreement.passed = (epoch, num_samples)

    def end_epoch(self, epoch: int, num_samples: int, read: int) -> None:
        """An epoch's end was read, and samples with the digest `read`; a collective call.

        Raises:
            ValueError: when another rank has read other samples, or more.
        """
        if self._end != (epoch, num_samples) and self._agreement is not None:
            self._agreement.agree(epoch, num_samples, read)
        self._end = (epoch, num_samples)

    def size_of(self, epoch: int) -> int:
        """Samples of an epoch, as far as is known."""
        if self._end is not None and self._end[0] == epoch:
            return self._end[1]
        return self.num_samples or ENDLESS

    def _make_order(self, _epoch: int) -> Order:
        raise AssertionError("a stream is not indexed")


WATCH_S = 0.5
"""Between two looks of a rank whether another one is at an end that it has passed."""


class StreamEnds:
    """Tells ranks that read streams of different lengths of it, so that they do not wait for each other.

    A rank at the end waits for the others to be there, one that reads on for the others' gradients. So each rank has a
    thread that looks into the store of torch.distributed for an end that this rank has passed, and says so there.
    """

    def __init__(self, exchange: OrderExchange) -> None:
        """Begin to watch; a collective call."""
        self.passed = (0, 0)
        """Epoch, and how many samples of it this rank has at least."""
        self._exchange = exchange
        prefix = exchange.gather_objects(new_run_id())[0]  # sessions of a process follow each other
        self._store = dist.PrefixStore(f"stream-{prefix}", distributed_c10d._get_default_store())  # type: ignore[attr-defined]  # noqa: SLF001
        stop = threading.Event()
        thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), stop), name="dynamix end of stream", daemon=True
        )
        self._stop = weakref.finalize(self, _end_watch, stop, thread)
        thread.start()

    def agree(self, epoch: int, num_samples: int, read: int) -> None:
        """Make sure that all ranks are at the end of an epoch with the same samples; a collective call.

        Raises:
            ValueError: when they are not.
        """
        mine = (num_samples, self._exchange.rank)
        first = _numbers(self._store.compare_set(f"end/{epoch}", "", f"{num_samples} {self._exchange.rank}"))
        if first[0] != num_samples:  # `first` is of the rank that got there before all others
            self._tell(epoch, min(first, mine)[0], max(first, mine))

        def look() -> None:
            if self._store.check([f"passed/{epoch}"]):
                raise ValueError(self._store.get(f"passed/{epoch}").decode())

        ends = self._exchange.gather_numbers((num_samples, read), look)
        for rank, end in enumerate(ends):
            if end[0] != ends[0][0]:
                raise ValueError(_differing_ends(epoch, ends[0][0], f"rank {rank} has read {end[0]}"))
            if end != ends[0]:
                raise ValueError(
                    f"rank {rank} has read other samples than rank 0 in epoch {epoch} of the stream: {FIX}"
                )

    def watch(self) -> None:
        """If another rank is at an end that this one has passed, report it to that rank and in the log."""
        epoch, num_samples = self.passed
        if self._store.check([f"end/{epoch}"]):
            end, _ = _numbers(self._store.get(f"end/{epoch}"))
            if end < num_samples:
                self._tell(epoch, end, (num_samples, self._exchange.rank))
                self._stop()

    def _tell(self, epoch: int, end: int, more: tuple[int, int]) -> None:
        """Report to a rank that waits at the end of an epoch how many samples another one has read, and log it."""
        text = _differing_ends(epoch, end, f"rank {more[1]} has read {more[0]}")
        self._store.set(f"passed/{epoch}", text)
        _log.error("%s", text)


def _numbers(stored: bytes | str) -> tuple[int, int]:
    """The number of samples that a rank has read, and the rank."""
    num_samples, rank = stored.split()
    return int(num_samples), int(rank)


def _watch(held: "weakref.ref[StreamEnds]", stop: threading.Event) -> None:
    with suppress(RuntimeError):  # the store is gone, with the process group
        while not stop.wait(WATCH_S) and (ends := held()) is not None:
            ends.watch()
            del ends


def _end_watch(stop: threading.Event, thread: threading.Thread) -> None:
    """Also at the end of the process: no thread may be in the store while the interpreter is taken down."""
    stop.set()
    if thread is not threading.current_thread():
        thread.join(WATCH_S)


def _differing_ends(epoch: int, end: int, more: str) -> str:
    return f"the stream ends after {end} samples of epoch {epoch} on one rank, but {more}: {FIX}"


class StreamSampler(PlanSampler):
    """Draws the plans of steps, for a `StreamReader`."""

    def __init__(self, orders: StreamOrders, schedule: Schedule, **options: Unpack[SamplerOptions]) -> None:
        super().__init__(orders, schedule, **options)
        self.stream = orders
        self.start = Position()
        """The position at which drawing started."""
        self._plans: deque[StepPlan] = deque()

    def rewind(self, position: Position) -> None:
        """Draw on from `position`; what was drawn ahead and not used is forgotten."""
        super().rewind(position)
        self.start = position
        self._plans.clear()

    def __iter__(self) -> Iterator[Any]:
        while not self.is_over(self._position):
            plan = self.plan_at(self._position)
            self._position = self._position.after(plan)
            self.last_drawn_step = max(self.last_drawn_step, plan.step)
            self._plans.append(plan)
            yield plan

    def take_step(self, read: StreamRead, before: int) -> StepPlan | None:
        """The oldest plan as far as its samples could be read; none after the end. `before` is the digest until then.

        Raises:
            ValueError: when the samples before it were others, or other ranks have read others or more.
        """
        plan = self._plans.popleft()
        if plan.offset >= self.stream.size_of(plan.epoch):  # drawn before the end was found
            return None
        if read.before != before:
            raise ValueError(
                f"the first {plan.offset} samples of epoch {plan.epoch} of the stream are others than before (in the "
                "saved run, or in another worker), so samples would be repeated or left out: its order may depend on "
                "set_epoch and on the random numbers of torch, numpy and Python only, not on how often it was read"
            )
        end = plan.offset + read.num_read
        if read.num_read == plan.counts.total:
            self.stream.pass_on(plan.epoch, end)
        else:
            self.stream.end_epoch(plan.epoch, end, read.digest)
            if read.num_read == 0 or self.is_over(Position(plan.step, plan.epoch, plan.offset)):
                return None
        return shortened(plan, read.num_read)._replace(digest=read.digest)

    def num_batches_left(self, position: Position) -> int:
        """Batches to the end of the epoch.

        Raises:
            TypeError: when the stream has no length.
        """
        if self.orders.size_of(position.epoch) == ENDLESS:
            raise TypeError("the stream has no length: give its class a __len__, or stop by session.progress")
        return self._num_batches_by_plan(position)


class StepSamples(NamedTuple):
    """Data read for a step, before it is collated."""

    parts: list[list[Any]]
    num_read: int
    before: int
    digest: int


class StreamReader(Dataset[Any]):
    """Stands for a stream in a `DataLoader`: reads what a rank needs for a step, in a worker or without one."""

    def __init__(self, dataset: IterableDataset[Any], seed: int, division: Division) -> None:
        self._dataset = dataset
        self._seed = seed
        self._division = division
        self._at = (-1, 0)
        """Epoch, and samples of it that were read."""
        self._samples: Iterator[Any] = iter(())
        self._digest = 0
        """The digest of the epoch's samples that were read."""
        self._numbers: RandomNumbers | None = None
        """The stream's own, so that it is the same on all ranks and in all workers."""

    def __getitems__(self, plan: StepPlan) -> StepSamples:
        """This rank's samples of a step; fewer than planned where the stream ends."""
        with _as_if_alone():
            if self._at[0] != plan.epoch or self._at[1] > plan.offset:
                self._begin(plan.epoch)
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
            return StepSamples([], 0, before, before)
        parts = self._division.parts(shortened(plan, len(samples)))
        mine = [samples[start - plan.offset : stop - plan.offset] or samples[:1] * 2 for start, stop, _ in parts]
        return StepSamples(mine, len(samples), before, self._digest)

    def _begin(self, epoch: int) -> None:
        self._samples, self._at, self._digest = begin_stream(self._dataset, self._seed, epoch), (epoch, 0), 0


class CollateParts:
    """Collates each micro-batch of a step."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._collate_fn = collate_fn or default_collate

    def __call__(self, samples: StepSamples) -> StreamRead:
        """The step's batches."""
        batches = [self._collate_fn(part) for part in samples.parts]
        return StreamRead(batches, *samples[1:])


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
