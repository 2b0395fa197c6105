"""The schedule: which allocation rules from which step on. Every rank holds the same one, and divides samples alike."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from dynamix.schemas.messages.allocation import Allocation


class Counts:
    """Samples per rank of one step, in rank order, with the sums that every step needs."""

    __slots__ = ("num_active", "starts", "total", "values")

    def __init__(self, values: Sequence[int]) -> None:
        self.values = tuple(values)
        self.starts = (0, *accumulate(self.values))
        """Where each rank's slice begins in the step's samples; one more than there are ranks."""
        self.total = self.starts[-1]
        """B: samples of the step over all ranks."""
        self.num_active = sum(value > 0 for value in self.values)
        """Ranks that have at least one sample."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counts) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)

    def __repr__(self) -> str:
        return f"Counts({list(self.values)})"


class ScheduleEntry(NamedTuple):
    """What rules from one step on."""

    effective_step: int
    allocation: Allocation


class Schedule:
    """Append-only list of entries; steps count optimizer steps of the whole run from 0."""

    def __init__(self, allocation: Allocation, first_step: int = 0) -> None:
        self._entries: list[ScheduleEntry] = []
        self._counts: list[Counts] = []
        """Samples per rank, by entry."""
        self._world_size = len(allocation.local_batch_sizes)
        self.num_changes = 0
        """Grows with every change of what rules a step, so that who has computed with it can tell."""
        self.reset(first_step, allocation)

    def reset(self, first_step: int, allocation: Allocation) -> None:
        """Start over with an allocation that rules from `first_step` on, for example from a saved state."""
        self._entries.clear()
        self._counts.clear()
        self._append(first_step, allocation)

    def schedule(self, effective_step: int, allocation: Allocation) -> None:
        """Let an allocation rule from `effective_step` on.

        Raises:
            ValueError: when the step is not after the last entry's, the number of sizes is not the world's, or no rank
                would have a sample.
        """
        newest = self._entries[-1].effective_step
        if effective_step <= newest:
            raise ValueError(
                f"an allocation for step {effective_step} comes too late: step {newest} is already scheduled"
            )
        self._append(effective_step, allocation)

    def revise(self, effective_step: int, allocation: Allocation) -> None:
        """The same, also in place of what was scheduled for that very step: nothing may have been drawn by it yet."""
        if effective_step == self._entries[-1].effective_step:
            del self._entries[-1], self._counts[-1]
            self._append(effective_step, allocation)
        else:
            self.schedule(effective_step, allocation)

    def counts_at(self, step: int) -> Counts:
        """Samples per rank of a step, as its allocation says.

        Raises:
            ValueError: when the step lies before the schedule's first.
        """
        return self._counts[self._index(step)]

    def allocation_at(self, step: int) -> Allocation:
        """The allocation that rules a step. Raises as `counts_at`."""
        return self._entries[self._index(step)].allocation

    @property
    def newest(self) -> Allocation:
        """The last entry's allocation, in force or pending."""
        return self._entries[-1].allocation

    def next_change(self, step: int) -> int | None:
        """The first step after `step` at which another allocation begins to rule; `None` when none is scheduled."""
        later = self._entries[self._num_begun(step) :]
        return later[0].effective_step if later else None

    def entries_since(self, step: int) -> list[ScheduleEntry]:
        """The entry that rules `step` and all later ones: what a resumed run needs."""
        return self._entries[max(self._num_begun(step) - 1, 0) :]

    def drop_before(self, step: int) -> None:
        """Drop the entries that no step from `step` on needs: a long run would fill the memory with them."""
        first = max(self._num_begun(step) - 1, 0)
        del self._entries[:first], self._counts[:first]

    def _index(self, step: int) -> int:
        index = self._num_begun(step) - 1
        if index < 0:
            raise ValueError(f"step {step} lies before the schedule's first step {self._entries[0].effective_step}")
        return index

    def _num_begun(self, step: int) -> int:
        """Entries that rule from `step` or an earlier one on."""
        if step >= self._entries[-1].effective_step:  # nearly always
            return len(self._entries)
        return bisect_right(self._entries, step, key=itemgetter(0))

    def _append(self, step: int, allocation: Allocation) -> None:
        sizes: Sequence[int] = allocation.local_batch_sizes
        if len(sizes) != self._world_size:
            raise ValueError(f"{len(sizes)} sizes for {self._world_size} ranks")
        if min(sizes) < 0 or sum(sizes) < 1:
            raise ValueError(f"sizes {list(sizes)[:16]} leave a step without samples")
        self.num_changes += 1
        self._entries.append(ScheduleEntry(step, allocation))
        self._counts.append(Counts(sizes))


def largest_remainder(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Divide `total` in proportion to `weights`; equal remainders favour the lower rank.

    In integers throughout, so that all ranks come to the same result. A weight of zero gets nothing, and with
    `total` at most the sum of the weights no rank gets more than its weight.

    Raises:
        ValueError: when the total is negative, a weight is negative, or there is something to divide and no weight.
    """
    whole = sum(weights)
    if total < 0 or min(weights, default=0) < 0 or (whole == 0 and total > 0):
        raise ValueError(f"cannot divide {total} samples by the weights {list(weights)[:16]}")
    if total == 0:
        return (0,) * len(weights)
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
