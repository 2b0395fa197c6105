"""The schedule: which local batch sizes rule from which step on, and who chose them. Every rank holds the same one."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from dynamix.schemas.policies import Split

from .split import Counts


class Entry(NamedTuple):
    """What rules from one step on: plain numbers, for comparing ranks and for a checkpoint."""

    effective_step: int
    local_batch_sizes: tuple[int, ...]
    split: Split = "fixed"


class Schedule:
    """Append-only list of entries; steps count optimizer steps of the whole run from 0."""

    def __init__(self, sizes: Sequence[int], first_step: int = 0, *, split: Split = "fixed") -> None:
        self._steps: list[int] = []
        self._counts: list[Counts] = []
        self._splits: list[Split] = []
        self._world_size = len(sizes)
        self.reset(first_step, sizes, split)

    def reset(self, first_step: int, sizes: Sequence[int], split: Split = "fixed") -> None:
        """Begin anew with `sizes` ruling from `first_step` on: a run goes on from a saved state."""
        self._truncate(0)
        self._append(first_step, sizes, split)

    def add(self, effective_step: int, sizes: Sequence[int], split: Split = "fixed") -> None:
        """Let `sizes` rule from `effective_step` on.

        Raises:
            ValueError: when the step is not after the last entry's, the number of sizes is not the world's, or no rank
                would have a sample.
        """
        if effective_step <= self._steps[-1]:
            raise ValueError(
                f"sizes for step {effective_step} come too late: step {self._steps[-1]} is already scheduled"
            )
        self._append(effective_step, sizes, split)

    def revise(self, effective_step: int, sizes: Sequence[int], split: Split = "fixed") -> None:
        """The same, also in place of what was scheduled for that very step: nothing may have been drawn by it yet."""
        if effective_step != self._steps[-1]:
            self.add(effective_step, sizes, split)
            return
        self._truncate(len(self._steps) - 1)
        self._append(effective_step, sizes, split)

    def at(self, step: int) -> Counts:
        """The sizes that rule a step.

        Raises:
            ValueError: when the step lies before the schedule's first.
        """
        return self._counts[self._index(step)]

    def split_at(self, step: int) -> Split:
        """How the sizes that rule a step came about. Raises as `at`."""
        return self._splits[self._index(step)]

    @property
    def newest(self) -> Counts:
        """The sizes of the last entry, in force or pending."""
        return self._counts[-1]

    @property
    def newest_split(self) -> Split:
        """How they came about."""
        return self._splits[-1]

    def next_change(self, step: int) -> int | None:
        """The first step after `step` at which other sizes begin to rule; `None` when none is scheduled."""
        index = bisect_right(self._steps, step)
        return self._steps[index] if index < len(self._steps) else None

    def since(self, step: int) -> list[Entry]:
        """The entry that rules `step` and all later ones: what a resumed run needs."""
        first = self._first_for(step)
        return [
            Entry(effective, counts.values, split)
            for effective, counts, split in zip(
                self._steps[first:], self._counts[first:], self._splits[first:], strict=True
            )
        ]

    def forget_before(self, step: int) -> None:
        """Drop the entries that no step from `step` on needs: a long run would fill the memory with them."""
        first = self._first_for(step)
        del self._steps[:first], self._counts[:first], self._splits[:first]

    def _index(self, step: int) -> int:
        index = bisect_right(self._steps, step) - 1
        if index < 0:
            raise ValueError(f"step {step} lies before the schedule's first step {self._steps[0]}")
        return index

    def _first_for(self, step: int) -> int:
        return max(bisect_right(self._steps, step) - 1, 0)

    def _truncate(self, length: int) -> None:
        del self._steps[length:], self._counts[length:], self._splits[length:]

    def _append(self, step: int, sizes: Sequence[int], split: Split) -> None:
        if len(sizes) != self._world_size:
            raise ValueError(f"{len(sizes)} sizes for {self._world_size} ranks")
        if min(sizes) < 0 or sum(sizes) < 1:
            raise ValueError(f"sizes {list(sizes)[:16]} leave a step without samples")
        self._steps.append(step)
        self._counts.append(Counts(sizes))
        self._splits.append(split)
