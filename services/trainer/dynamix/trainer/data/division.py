"""The division of a step: which of its samples each rank has, and in how many micro-batches. Pure.

Whole samples only, in the epoch's order, without gap or overlap. Where samples count by their tokens, sizes are in
tokens, and no rank gets more of them than its size.
"""

from typing import NamedTuple

from .orders import Order
from .schedule import Counts

Part = tuple[int, int, int]
"""Where a micro-batch begins and ends in the epoch's order, and its size in samples or tokens."""


class StepPlan(NamedTuple):
    """What one step uses: equal on all ranks."""

    step: int
    epoch: int
    offset: int
    """What the epoch used before this step: samples, or tokens."""
    counts: Counts
    """Samples or tokens per rank; their sum is the true B of the step."""
    starts: tuple[int, ...] | None = None
    """Where the ranks' samples begin in the epoch's order, one more than there are ranks; `None` without tokens."""
    digest: int | None = None
    """The digest of a stream's samples from the beginning of the epoch to the end of the step."""

    def samples_of(self, rank: int) -> tuple[int, int]:
        """Where a rank's samples begin and end in the epoch's order."""
        if self.starts is not None:
            return self.starts[rank], self.starts[rank + 1]
        return self.offset + self.counts.starts[rank], self.offset + self.counts.starts[rank + 1]


class Division(NamedTuple):
    """How one rank divides its part of a step into micro-batches."""

    rank: int
    micro_batch_size: int | None = None
    """Most samples or tokens in one; `None` without a bound."""
    equal_micro_steps: bool = False
    """Whether all ranks have equally many."""
    gradient_accumulation_steps: int = 1
    """How many each rank has where there is no such bound; the script divides each loss by it."""

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
            return [(start, stop, _tokens_between(ends, start, stop)) for start, stop, _ in parts]
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
        end = int(ends[stop - 1]) if stop else 0
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


def _tokens_between(ends: Order, start: int, stop: int) -> int:
    return int(ends[stop - 1] - (ends[start - 1] if start else 0)) if stop > start else 0


def _parts_in_tokens(ends: Order, start: int, stop: int, most: int) -> list[Part]:
    """Samples in parts of at most so many tokens."""
    parts, used = [], int(ends[start - 1]) if start else 0
    while start < stop:
        end = min(max(int(ends.searchsorted(used + most, "right")), start + 1), stop)
        parts.append((start, end, int(ends[end - 1]) - used))
        start, used = end, int(ends[end - 1])
    return parts
