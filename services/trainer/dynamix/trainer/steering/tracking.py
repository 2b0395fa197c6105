"""The fast loop: a new split of the same global batch from every step's compute times. Pure.

Every rank runs it on the same numbers and must come to the same sizes, on whatever machine. So it adds, multiplies,
divides, compares and takes roots of single float64, which IEEE 754 defines to the last bit: no logarithm, no
exponential, no sum whose order a compiler or a library chooses. Real training and virtual cluster share it.

A rank's time for b samples is about c (K + b): what it does once per step takes as long as K samples more. K is fitted
per rank from the times at different sizes (`FixedCost`) and is 0 until they tell something; c, time over K + b, is
averaged over as many steps as its noise asks for (`RankRate`). It would be too high for a small b where K is too low.
Yet c (K + b) is the time itself, so the only split that stays is the one in which all ranks take equally long, whatever
K was taken for. On the way there a wrong size spoils the next c by a share that is below 1 and has the error's own
sign: errors shrink by that factor per split and never change sides, at any delay. A K that is too high, fitted to
noise, could make splits swing for ever: it is dropped when a sample costs clearly more on a larger size, or less on a
smaller one.

A split is replaced at once where that shortens the step by more than the dead band. Where fixed costs dominate, sizes
can be far from equal times and cost next to nothing: such a split is replaced too, every few steps.

To carry and filter times costs half a millisecond of a processor, whatever the step (docs/overhead.md). So where all
ranks compute for less than `SHORT_S`, only one of `SHORT_EVERY` steps is measured, after the first ones.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from dynamix.schemas.apportion import divide_by_time
from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.data.schedule import Schedule

from .rates import RateFilter

FAR = 0.1
"""Share of a size by which it must be off for that."""

SETTLE_STEPS = 8
"""Steps between two looks at it."""

SHORT_S = 0.02
"""Compute time of the slowest rank below which not every step is measured."""

SHORT_EVERY = 4
"""Steps between two measurements then: a change by three is followed after eight steps, some 0.2 s."""

SCATTER = 0x9E3779B1
"""2^32 over the golden ratio: of every four steps another one is measured, all equally often, whatever a script does in
every second, fourth or fifth step."""

FIRST_MEASURED = 32
"""Measurements before that."""

DEAD_BAND = 0.03
"""A new split must shorten the slowest rank's predicted time by more than this share: batches keep their shapes."""


class Tracker:
    """Divides a global batch in proportion to filtered speeds, within each rank's bounds."""

    def __init__(self, min_local_batch_size: int, max_local_batch_sizes: Sequence[int]) -> None:
        self.filter = RateFilter(len(max_local_batch_sizes))
        self._min_local_batch_size = min_local_batch_size
        self._upper = tuple(max_local_batch_sizes)
        self._no_saturations = (0,) * len(self._upper)
        self._num_kept = 0
        """Steps since the split was changed."""

    def better_split(
        self, seconds_per_sample: Sequence[float], sizes: Sequence[int], counts: tuple[int, ...] = ()
    ) -> tuple[int, ...] | None:
        """Take in one step's compute times and return the sizes that shall replace `sizes`, or `None`.

        Args:
            seconds_per_sample: compute time over samples, by rank; 0 where a rank had no samples or knows no time.
            sizes: the newest split, in force or scheduled; a new one has the same sum.
            counts: samples by rank of the step that was measured, without which fixed costs are not learned.
        """
        self.filter.observe(seconds_per_sample, counts)
        rates = self.filter.rates
        if rates is None:
            return None
        better = self._faster_split(sizes, rates) or self._settled_split(sizes, rates)
        self._num_kept = 0 if better else self._num_kept + 1
        return better

    def divide(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The first split of a global batch that was decided as `sizes`: those themselves until a rate is known."""
        rates = self.filter.rates
        return tuple(sizes) if rates is None else self._divide(sum(sizes), rates)

    def longest_s(self, sizes: Sequence[int]) -> float:
        """The slowest rank's predicted compute time; infinite until all ranks' speeds are known."""
        rates = self.filter.rates
        return math.inf if rates is None else max(self._times_s(sizes, rates))

    def _faster_split(self, sizes: Sequence[int], rates: Sequence[float]) -> tuple[int, ...] | None:
        """A split by which the slowest rank is predicted to be faster by more than the dead band."""
        times = self._times_s(sizes, rates)
        enough = (1.0 - DEAD_BAND) * max(times)
        if min(times) >= enough:  # samples taken from one rank go to another, which then takes longer than the fastest
            return None
        proposed = self._divide(sum(sizes), rates)
        return proposed if max(self._times_s(proposed, rates)) < enough else None

    def _settled_split(self, sizes: Sequence[int], rates: Sequence[float]) -> tuple[int, ...] | None:
        """The split into equal times, where sizes that cost next to nothing are far from it."""
        if self._num_kept % SETTLE_STEPS != SETTLE_STEPS - 1 or not any(self.filter.fixed):
            return None
        proposed = self._divide(sum(sizes), rates)
        is_far = any(abs(size - new) > FAR * size + 1.0 for size, new in zip(sizes, proposed, strict=True))
        return proposed if is_far else None

    def _divide(self, total: int, rates: Sequence[float]) -> tuple[int, ...]:
        """Every rank gets a sample where there are enough: one that had none would never be measured again.

        A saturation needs no fit here: below it a rank takes as long with fewer samples, so that it has few, and the
        others have as many as they can take in that time. The step is as short as it can be.
        """
        fewest, fixed = self._min_local_batch_size, self.filter.fixed
        if fewest == 0 and total >= len(rates):
            fewest = 1
        lower = [min(fewest, most) for most in self._upper]
        return divide_by_time(
            *(total, [1.0 / rate for rate in rates], lower, self._upper), fixed=fixed, saturations=self._no_saturations
        )

    def _times_s(self, sizes: Sequence[int], rates: Sequence[float]) -> list[float]:
        """Predicted compute times; only their extremes are used, which have neither rounding nor order."""
        return [(size + more) * rate for size, more, rate in zip(sizes, self.filter.fixed, rates, strict=True)]


class LoopPace(NamedTuple):
    """Which steps are measured; plain numbers for a checkpoint."""

    num_measured: int = 0
    """Measurements under tracking, up to `FIRST_MEASURED`."""
    is_short: bool = False
    """Whether the slowest rank computed for less than `SHORT_S`, by the newest measurement."""


class FastLoop:
    """Writes allocations into a schedule: which from a decision, and from which step on a better split.

    The slow loop decides sizes (`fixed`), or a global batch (`tracking`) that is divided again whenever measurements
    say so, until the slow loop decides again.
    """

    def __init__(self, schedule: Schedule, tracker: Tracker) -> None:
        self.tracker = tracker
        self._schedule = schedule
        self.pace = LoopPace()

    def measures(self, step: int) -> bool:
        """Whether the ranks shall exchange their times in a step that an allocation with `tracking` rules.

        All ranks ask before the step, and have the same answer: it changes with measurements only.
        """
        if not self.pace.is_short or self.pace.num_measured < FIRST_MEASURED:
            return True
        number, place = divmod(step, SHORT_EVERY)
        return place == (number * SCATTER >> 30) % SHORT_EVERY

    def adopt(self, effective_step: int, decided: Allocation) -> None:
        """Let a decision of the slow loop rule from a step on.

        Under tracking its sum is divided by the speeds known so far; its sizes stand while there are none, and the
        sizes in use stay when the global batch does. Where traces rule, no decision moves the sizes.
        """
        newest = self._schedule.newest
        if decided.split == newest.split == "traces":
            decided = decided.with_sizes(newest.local_batch_sizes)
        if decided.split == "tracking":
            kept = newest.split == "tracking" and decided.global_batch_size == newest.global_batch_size
            sizes = newest.local_batch_sizes if kept else self.tracker.divide(decided.local_batch_sizes)
            decided = decided.with_sizes(sizes)
        if decided != newest:
            self._schedule.revise(effective_step, decided)

    def observe_times(
        self, seconds_per_sample: Sequence[float], effective_step: int, counts: tuple[int, ...] = ()
    ) -> None:
        """Take in the compute times of a step; under tracking a better split rules from `effective_step` on.

        That is the first step that no rank has drawn a batch for. `counts` are the samples of the step that was
        measured, by rank. While the slow loop has fixed the sizes, times are only remembered.
        """
        newest = self._schedule.newest
        if newest.split != "tracking":
            self.tracker.filter.observe(seconds_per_sample, counts)
            return
        better = self.tracker.better_split(seconds_per_sample, newest.local_batch_sizes, counts)
        if better is not None:
            self._schedule.revise(effective_step, newest.with_sizes(better))
        is_short = self.tracker.longest_s(better or newest.local_batch_sizes) < SHORT_S
        self.pace = LoopPace(min(self.pace.num_measured + 1, FIRST_MEASURED), is_short)
