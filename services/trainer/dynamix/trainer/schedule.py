"""The schedule: which local batch sizes rule from which step on. Every rank holds the same one."""

from bisect import bisect_right
from collections.abc import Sequence

from .split import Counts


class Schedule:
    """Append-only list of (effective step, sizes); steps count optimizer steps of the whole run from 0."""

    def __init__(self, sizes: Sequence[int], first_step: int = 0) -> None:
        self._steps: list[int] = []
        self._counts: list[Counts] = []
        self._world_size = len(sizes)
        self.reset(first_step, sizes)

    def reset(self, first_step: int, sizes: Sequence[int]) -> None:
        """Begin anew with `sizes` ruling from `first_step` on: a run goes on from a saved state."""
        self._steps.clear()
        self._counts.clear()
        self._append(first_step, sizes)

    def add(self, effective_step: int, sizes: Sequence[int]) -> None:
        """Let `sizes` rule from `effective_step` on.

        Raises:
            ValueError: when the step is not after the last entry's, the number of sizes is not the world's, or no rank
                would have a sample.
        """
        if effective_step <= self._steps[-1]:
            raise ValueError(
                f"sizes for step {effective_step} come too late: step {self._steps[-1]} is already scheduled"
            )
        self._append(effective_step, sizes)

    def at(self, step: int) -> Counts:
        """The sizes that rule a step.

        Raises:
            ValueError: when the step lies before the schedule's first.
        """
        index = bisect_right(self._steps, step) - 1
        if index < 0:
            raise ValueError(f"step {step} lies before the schedule's first step {self._steps[0]}")
        return self._counts[index]

    @property
    def newest(self) -> Counts:
        """The sizes of the last entry, in force or pending."""
        return self._counts[-1]

    def next_change(self, step: int) -> int | None:
        """The first step after `step` at which other sizes begin to rule; `None` when none is scheduled."""
        index = bisect_right(self._steps, step)
        return self._steps[index] if index < len(self._steps) else None

    def since(self, step: int) -> list[tuple[int, tuple[int, ...]]]:
        """The entry that rules `step` and all later ones: what a resumed run needs."""
        first = max(bisect_right(self._steps, step) - 1, 0)
        return [
            (effective, counts.values)
            for effective, counts in zip(self._steps[first:], self._counts[first:], strict=True)
        ]

    def forget_before(self, step: int) -> None:
        """Drop the entries that no step from `step` on needs: a long run would fill the memory with them."""
        first = max(bisect_right(self._steps, step) - 1, 0)
        del self._steps[:first], self._counts[:first]

    def _append(self, step: int, sizes: Sequence[int]) -> None:
        if len(sizes) != self._world_size:
            raise ValueError(f"{len(sizes)} sizes for {self._world_size} ranks")
        if min(sizes) < 0 or sum(sizes) < 1:
            raise ValueError(f"sizes {list(sizes)[:16]} leave a step without samples")
        self._steps.append(step)
        self._counts.append(Counts(sizes))
