"""The plan of each step: which samples every rank uses, from one order and one schedule that all ranks share. Pure.

`Schedule` has the allocation of each step, `Division` cuts a rank's part of a step into micro-batches, `PlanSampler`
plans the steps of an epoch, `ReferenceSteps` counts progress in steps of the script's own batch. Whole samples only, in
the epoch's order, without gap or overlap: each is used once per epoch. Where samples count by their tokens, sizes are
in tokens.

The rest of an epoch is divided in proportion, or left out. While the global batch is fixed, it is one step, as in plain
training. Where it changes, the last two steps share it: a step on two samples takes a stride as long as one on a
thousand (seen: validation accuracy from 0.86 to 0.70 by one such step).
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from torch.utils.data import Sampler

from dynamix.schemas.messages.allocation import Allocation, Exchange

from .orders import Order, Orders


class Counts:
    """Samples per rank of one step, in rank order, with the sums that every step needs."""

    __slots__ = ("num_active", "starts", "total", "values")

    def __init__(self, values: Sequence[int]) -> None:
        self.values = tuple(values)
        self.starts = (0, *accumulate(self.values))
        """Bounds of the ranks' slices in the step's samples; one more than ranks."""
        self.total = self.starts[-1]
        """B: samples of the step over all ranks."""
        self.num_active = sum(value > 0 for value in self.values)
        """Ranks that have at least one sample."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counts) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)


class Schedule:
    """Append-only list of entries; steps count optimizer steps of the whole run from 0."""

    def __init__(self, allocation: Allocation, first_step: int = 0) -> None:
        self._entries: list[tuple[int, Allocation, Counts]] = []
        """From which step on which allocation is active, with its samples per rank."""
        self._world_size: int
        self.num_changes = 0
        """Increases with every change of a step's allocation, so that a user of an older one can notice."""
        self.reset(first_step, allocation)

    def reset(self, first_step: int, allocation: Allocation) -> None:
        """Start over with an allocation that is active from `first_step` on, perhaps for another number of ranks."""
        self._entries.clear()
        self._world_size = len(allocation.local_batch_sizes)
        self._append(first_step, allocation)

    def revise(self, effective_step: int, allocation: Allocation) -> None:
        """Activate an allocation from a step on, in place of one for that very step: nothing may be drawn by it yet.

        Raises:
            ValueError: when a later step is scheduled, the number of sizes is not the world's, or no rank would have a
                sample.
        """
        newest, _, _ = self._entries[-1]
        if effective_step < newest:
            raise ValueError(
                f"an allocation for step {effective_step} comes too late: step {newest} is already scheduled"
            )
        if effective_step == newest:
            del self._entries[-1]
        self._append(effective_step, allocation)

    def revise_exchange(self, effective_step: int, exchange: Exchange) -> None:
        """Activate an exchange from a step on, also where other sizes are scheduled; batches may be drawn already."""
        later = self.entries_since(effective_step)
        while self._entries and self._entries[-1][0] >= effective_step:
            del self._entries[-1]
        for step, allocation in later:
            self._append(max(step, effective_step), replace(allocation, exchange=exchange))

    def counts_at(self, step: int) -> Counts:
        """Samples per rank of a step, by its allocation. Raises ValueError for a step before the schedule's first."""
        return self._entry(step)[2]

    def allocation_at(self, step: int) -> Allocation:
        """The active allocation of a step. Raises as `counts_at`."""
        first, allocation, _ = self._entries[-1]
        return allocation if step >= first else self._entry(step)[1]  # several times in each step

    @property
    def newest(self) -> Allocation:
        """The last entry's allocation, active or pending."""
        return self._entries[-1][1]

    def next_change(self, step: int) -> int | None:
        """The first step after `step` at which another allocation becomes active; `None` if none is scheduled."""
        later = self._entries[self._num_begun(step) :]
        return later[0][0] if later else None

    def entries_since(self, step: int) -> list[tuple[int, Allocation]]:
        """The allocations that are active at `step` or later, each with its first step: what a resumed run needs."""
        return [entry[:2] for entry in self._entries[max(self._num_begun(step) - 1, 0) :]]

    def drop_before(self, step: int) -> None:
        """Drop the entries that no step from `step` on needs: a long run would fill the memory with them."""
        del self._entries[: max(self._num_begun(step) - 1, 0)]

    def _entry(self, step: int) -> tuple[int, Allocation, Counts]:
        if (num_begun := self._num_begun(step)) == 0:
            raise ValueError(f"step {step} lies before the schedule's first step {self._entries[0][0]}")
        return self._entries[num_begun - 1]

    def _num_begun(self, step: int) -> int:
        """Entries that are active from `step` or an earlier step on."""
        if step >= self._entries[-1][0]:  # nearly always
            return len(self._entries)
        return bisect_right(self._entries, step, key=itemgetter(0))

    def _append(self, step: int, allocation: Allocation) -> None:
        sizes: Sequence[int] = allocation.local_batch_sizes
        if len(sizes) != self._world_size:
            raise ValueError(f"{len(sizes)} sizes for {self._world_size} ranks")
        if min(sizes) < 0 or sum(sizes) < 1:
            raise ValueError(f"sizes {list(sizes)[:16]} leave a step without samples")
        self.num_changes += 1
        self._entries.append((step, allocation, Counts(sizes)))


def largest_remainder(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Divide `total` in proportion to `weights`; equal remainders favour the lower rank.

    In integers throughout, so that all ranks come to the same result. A weight of zero gets nothing, and with
    `total` at most the sum of the weights no rank gets more than its weight.
    """
    if total == 0:
        return (0,) * len(weights)
    whole = sum(weights)
    shares = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (-(total * weights[rank] % whole), rank))
    for rank in by_remainder[: total - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)


def divide_tail(total: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Divide the last samples of an epoch, fewer than `sizes` in all, in proportion to the sizes.

    While there are enough, each rank that has a size gets two at least, or one: less is a batch on which BatchNorm
    fails, or a dummy, which a script that counts `len(inputs)` would count.
    """
    shares = largest_remainder(total, sizes)
    fewest = min(2, total // sum(size > 0 for size in sizes))
    lowest = [min(size, fewest) for size in sizes]
    if all(share >= low for share, low in zip(shares, lowest, strict=True)):
        return shares
    above = [size - low for size, low in zip(sizes, lowest, strict=True)]
    more = largest_remainder(total - sum(lowest), above)
    return tuple(low + each for low, each in zip(lowest, more, strict=True))


Part = tuple[int, int, int]
"""Start and end of a micro-batch in the epoch's order, and its size in samples or tokens."""


class StepPlan(NamedTuple):
    """The plan of one step: equal on all ranks."""

    step: int
    epoch: int
    offset: int
    """Samples or tokens of the epoch that were used before this step."""
    counts: Counts
    """Samples or tokens per rank; their sum is the true B of the step."""
    starts: tuple[int, ...] | None = None
    """Bounds of the ranks' samples in the epoch's order, one more than ranks; `None` without tokens."""
    digest: int | None = None
    """The digest of a stream's samples from the beginning of the epoch to the end of the step."""

    def samples_of(self, rank: int) -> tuple[int, int]:
        """Start and end of a rank's samples in the epoch's order."""
        if self.starts is not None:
            return self.starts[rank], self.starts[rank + 1]
        return self.offset + self.counts.starts[rank], self.offset + self.counts.starts[rank + 1]


class Division(NamedTuple):
    """Division of one rank's part of a step into micro-batches."""

    rank: int
    micro_batch_size: int | None = None
    """Most samples or tokens in one; `None` without a bound."""
    equal_micro_steps: bool = False
    """Whether all ranks have the same number of micro-batches."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per rank if there is no bound; the script divides each loss by it."""

    def num_parts(self, counts: Counts) -> int:
        """Micro-batches of a step in samples."""
        if self.micro_batch_size is None:
            return self.gradient_accumulation_steps
        count = max(counts.values) if self.equal_micro_steps else counts.values[self.rank]
        return max(-(-count // self.micro_batch_size), 1)

    def parts(self, plan: StepPlan, ends: Order | None = None) -> list[Part]:
        """This rank's micro-batches: as equal in samples as possible, the smaller first, or as many tokens as fit.

        `ends` are the tokens of the epoch up to and with each sample.
        """
        first, last = plan.samples_of(self.rank)
        if ends is None:
            return _equal_parts(first, last, self.num_parts(plan.counts))
        most = self.micro_batch_size
        if most is None:
            parts = _equal_parts(first, last, self.gradient_accumulation_steps)
            return [(start, stop, _tokens_before(ends, stop) - _tokens_before(ends, start)) for start, stop, _ in parts]
        parts = _parts_in_tokens(ends, first, last, most)
        number = max(len(parts), 1)
        if self.equal_micro_steps:
            every = map(plan.samples_of, range(len(plan.counts.values)))
            number = max(number, *(len(_parts_in_tokens(ends, start, stop, most)) for start, stop in every))
        return [(first, first, 0)] * (number - len(parts)) + parts


def divide_tokens(ends: Order, offset: int, wanted: Counts, sizes: Counts) -> tuple[tuple[int, ...], Counts]:
    """Divide whole samples among ranks: where each one's begin, and its tokens.

    Each rank gets what is `wanted` of it, rounded up to a sample's end as far as its size allows: no rank gets more
    tokens than its size. Only a sample that is longer than every size goes to the rank with the largest, alone.

    Args:
        ends: tokens of the epoch up to and with each sample.
        offset: tokens of the epoch before the step.
        wanted: tokens for each rank.
        sizes: the most tokens of each rank.
    """
    first = int(ends.searchsorted(offset, "right")) if offset else 0
    starts, used, tokens = [first], offset, []
    for size, target in zip(sizes.values, wanted.starts[1:], strict=True):
        stop = int(ends.searchsorted(used + size, "right"))
        if wanted.total < sizes.total:
            enough = min(int(ends.searchsorted(offset + target)), len(ends) - 1)
            stop = min(stop, int(ends.searchsorted(ends[enough], "right")))
        stop = max(stop, starts[-1])
        end = _tokens_before(ends, stop)
        starts.append(stop)
        tokens.append(end - used)
        used = end
    if used == offset:
        longest = max(range(len(tokens)), key=sizes.values.__getitem__)
        used = int(ends[int(ends.searchsorted(offset, "right"))])
        stop = int(ends.searchsorted(used, "right"))
        starts = [first] * (longest + 1) + [stop] * (len(tokens) - longest)
        tokens[longest] = used - offset
    return tuple(starts), Counts(tokens)


def _equal_parts(first: int, last: int, number: int) -> list[Part]:
    each, more = divmod(last - first, number)
    parts = []
    for index in range(number):
        stop = first + each + (index >= number - more)
        parts.append((first, stop, stop - first))
        first = stop
    return parts


def _tokens_before(ends: Order, index: int) -> int:
    return int(ends[index - 1]) if index else 0


def _parts_in_tokens(ends: Order, start: int, stop: int, most: int) -> list[Part]:
    """Samples in parts of at most so many tokens."""
    parts, used = [], _tokens_before(ends, start)
    while start < stop:
        end = min(max(int(ends.searchsorted(used + most, "right")), start + 1), stop)
        parts.append((start, end, int(ends[end - 1]) - used))
        start, used = end, int(ends[end - 1])
    return parts


class MicroBatch(NamedTuple):
    """Input of one gradient on a rank: its samples of a step, or a part of them that fits its memory."""

    plan: StepPlan
    start: int
    """First index of its samples in the epoch's order."""
    num_samples: int
    """Its samples; 0 when the batch is a dummy that counts for nothing."""
    size: int
    """Its size as batch sizes count: samples, or their tokens."""
    weight: int
    """Weight of its mean loss in the step: its size, or the tokens that the script counted in it."""
    is_first: bool
    """Whether it is the first micro-batch of the step."""
    is_last: bool
    """Whether it is the last micro-batch of the step, after which gradients are exchanged."""
    loss_divisor: int = 1
    """The divisor of the script's loss."""


class Position(NamedTuple):
    """The position of the run in its data: all that a resumed run needs."""

    step: int = 0
    """Optimizer steps so far; the next step's number."""
    epoch: int = 0
    offset: int = 0
    """Samples or tokens of the epoch that are used."""
    samples_seen: int = 0
    """The same over all epochs."""

    def after(self, plan: StepPlan) -> "Position":
        """The position once a plan is carried out."""
        total = plan.counts.total
        return Position(plan.step + 1, plan.epoch, plan.offset + total, self.samples_seen + total)

    def at_epoch(self, epoch: int) -> "Position":
        """The position at the beginning of an epoch."""
        return self._replace(epoch=epoch, offset=0)


MOST_PLANNED = 16
"""Steps that are planned at once. After a step of training nothing of ours is in the caches any more: the first plan
takes ten times as long as the next."""

MOST_PLANNED_SAMPLES = 8192
"""This rank's samples in them, some 32 bytes each."""


class PlanSampler(Sampler[list[int]]):
    """A batch sampler for `torch.utils.data.DataLoader`; it runs in the training process, ahead of the training.

    `drawn` holds every micro-batch drawn and not yet handed out, in order. A rank without samples draws one sample
    twice, which counts for nothing: models fail on empty tensors (`view(x.size(0), -1)`), and BatchNorm on a single
    sample.

    With `drop_last` an epoch ends before a step that it cannot fill. Its first step is always taken: sizes above the
    data set's would else leave no step at all.
    """

    def __init__(
        self,
        orders: Orders,
        schedule: Schedule,
        *,
        division: Division,
        drop_last: bool = False,
        shares_tail: bool = True,
    ) -> None:
        """Draw each epoch's samples in its order; where they count by their tokens, sizes are in tokens.

        `shares_tail`: whether the last two steps of an epoch share what is left.
        """
        self.drawn: deque[Any] = deque()
        self.last_drawn_step = -1
        """The last step that a loop has drawn which is under way: its sizes cannot change any more."""
        self.orders = orders
        self._schedule = schedule
        self._drop_last = drop_last
        self._shares_tail = shares_tail and not drop_last
        self.division = division
        self._position = Position()

    def rewind(self, position: Position) -> None:
        """Draw on from `position`; what was drawn ahead and not used is forgotten."""
        self.orders.begin(position.epoch)
        self._position, self.last_drawn_step = position, position.step - 1
        self.drawn = deque()  # a new one: a loop around this one may go on with its own

    @property
    def state(self) -> tuple[Any, ...]:
        """State of a loop, for when it goes on after another one."""
        return self._position, self.last_drawn_step, self.drawn

    @state.setter
    def state(self, left: tuple[Any, ...]) -> None:
        self._position, self.last_drawn_step, self.drawn = left

    def __iter__(self) -> Iterator[list[int]]:
        planned: deque[tuple[Position, list[tuple[MicroBatch, list[int]]]]] = deque()
        num_changes, num_ahead = -1, 1
        while True:
            if num_changes != self._schedule.num_changes:
                planned.clear()
                num_changes, num_ahead = self._schedule.num_changes, 1
            if not planned:  # each time twice as many steps, as long as no size changes
                position, num_samples = self._position, 0
                while len(planned) < num_ahead and num_samples < MOST_PLANNED_SAMPLES and not self.is_over(position):
                    plan = self.plan_at(position)
                    position = position.after(plan)
                    batches = [(each, self._indices(each)) for each in self.micro_batches(plan)]
                    num_samples += sum(len(indices) for _, indices in batches)
                    planned.append((position, batches))
                num_ahead = min(2 * num_ahead, MOST_PLANNED)
            if not planned:
                return
            self._position, batches = planned.popleft()  # before the yield: a saved state must not repeat the batch
            self.last_drawn_step = max(self.last_drawn_step, self._position.step - 1)
            for micro_batch, indices in batches:
                self.drawn.append(micro_batch)
                yield indices

    def take(self, read: Iterable[Any], _digest: int | None) -> Iterator[tuple[MicroBatch, Any]]:
        """This rank's batches to the end of the epoch, as a `DataLoader` has `read` what was drawn."""
        for batch in read:
            yield self.drawn.popleft(), batch

    def is_over(self, position: Position) -> bool:
        """Whether the epoch of the position has no further step."""
        if position.offset == 0:
            return False
        left = self.orders.size_of(position.epoch) - position.offset
        if self._drop_last:
            return self._schedule.counts_at(position.step).total > left
        return left <= 0

    def plan_at(self, position: Position) -> StepPlan:
        """The plan of the step at a position."""
        sizes = self._schedule.counts_at(position.step)
        left = self.orders.size_of(position.epoch) - position.offset
        total = self._num_taken(sizes.total, left)
        counts = sizes if total == sizes.total else Counts(divide_tail(total, sizes.values))
        plan = StepPlan(position.step, position.epoch, position.offset, counts)
        if (ends := self.orders.ends_of(position.epoch)) is None:
            return plan
        starts, in_tokens = divide_tokens(ends, position.offset, counts, sizes)
        return plan._replace(counts=in_tokens, starts=starts)

    def micro_batches(self, plan: StepPlan) -> Iterator[MicroBatch]:
        """This rank's part of a step."""
        parts = self.division.parts(plan, self.orders.ends_of(plan.epoch))
        for index, (start, stop, size) in enumerate(parts):
            is_first, is_last = index == 0, index == len(parts) - 1
            yield MicroBatch(
                plan, start, stop - start, size, size, is_first, is_last, self.division.gradient_accumulation_steps
            )

    def num_batches_left(self, position: Position) -> int:
        """Batches that this rank draws to the end of the epoch, if no further size is scheduled."""
        num_batches, left = 0, self.orders.size_of(position.epoch) - position.offset
        if (ends := self.orders.ends_of(position.epoch)) is not None:
            while not self.is_over(position):
                plan = self.plan_at(position)
                num_batches += len(self.division.parts(plan, ends))
                position = position.after(plan)
            return num_batches
        step, is_first = position.step, position.offset == 0
        while left > 0:
            counts = self._schedule.counts_at(step)
            taken = self._num_taken(counts.total, left)
            if self._drop_last and taken < counts.total and not is_first:
                break
            num_alike = left // counts.total
            if self._shares_tail and left % counts.total:
                num_alike -= 1  # the last two steps share what is left
            if (change := self._schedule.next_change(step)) is not None:
                num_alike = min(num_alike, change - step)
            num_alike = max(num_alike, 1)
            if taken < counts.total:
                counts = Counts(divide_tail(taken, counts.values))
            num_batches += num_alike * self.division.num_parts(counts)
            step, left, is_first = step + num_alike, left - num_alike * taken, False
        return num_batches

    def _num_taken(self, scheduled: int, left: int) -> int:
        """Samples of a step that is to have `scheduled` of the `left` ones of its epoch."""
        if left <= scheduled:
            return left
        return -(-left // 2) if left < 2 * scheduled and self._shares_tail else scheduled

    def _indices(self, micro_batch: MicroBatch) -> list[int]:
        plan, start, stride = micro_batch.plan, micro_batch.start, self.orders.stride
        order = self.orders.order_of(plan.epoch)
        if micro_batch.num_samples == 0:
            return [int(order[plan.samples_of(0)[0]])] * 2
        if stride > 1 and plan.starts is None:
            step = order[plan.offset : plan.offset + plan.counts.total]
            order, start = np.concatenate([step[rank::stride] for rank in range(stride)]), start - plan.offset
        indices: list[int] = order[start : start + micro_batch.num_samples].tolist()
        return indices


class ReferenceSteps(NamedTuple):
    """Reference steps of one job."""

    num_samples: int
    """Samples or tokens of an epoch, as batch sizes count; 0 if the length of a stream is unknown."""
    global_batch_size: int
    """The global batch size of the script."""
    drop_last: bool

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch in plain training. Raises TypeError when the length of an epoch is not known."""
        if not self.num_samples:
            raise TypeError("the stream has no length: give its class a __len__, or stop by session.progress")
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return max(whole, 1) if self.drop_last or rest == 0 else whole + 1

    def before(self, position: Position) -> float:
        """Reference steps from the beginning of the run to a position, in parts of one."""
        if not self.num_samples:
            return position.samples_seen / self.global_batch_size
        if position.offset >= self.num_samples:
            return float((position.epoch + 1) * self.per_epoch)
        return position.epoch * self.per_epoch + min(position.offset / self.global_batch_size, self.per_epoch)
