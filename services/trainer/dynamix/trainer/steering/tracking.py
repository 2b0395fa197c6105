"""The fast loop: a new split of the same global batch from every step's compute times. Pure.

Every rank runs it on the same numbers and must come to the same sizes, on whatever machine. So it adds, multiplies,
divides and compares single float64, which IEEE 754 defines to the last bit: no logarithm, no exponential, no sum whose
order a compiler or a library chooses. Real training and virtual cluster share it.

A rank's time for b samples is about c (K + b): what it does once per step takes as long as K samples more. K is fitted
per rank from the times at different sizes (`FixedCost`) and is 0 until they tell something; c, time over K + b, is
filtered. It would be too high for a small b where K is too low. Yet c (K + b) is the time itself, so the only split
that stays is the one in which all ranks take equally long, whatever K was taken for. On the way there a wrong size
spoils the next c by a share that is below 1 and has the error's own sign: errors shrink by that factor per split and
never change sides, at any delay. A K that is too high, fitted to noise, could make splits swing for ever: it is dropped
when a sample costs clearly more on a larger size, or less on a smaller one.

A split is replaced at once where that shortens the step by more than the dead band. Where fixed costs dominate, sizes
can be far from equal times and cost next to nothing: such a split is replaced too, by what a longer average says.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from dynamix.schemas.apportion import divide_by_time
from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.data.schedule import Schedule

WEIGHT = 0.3
"""Weight of the newest measurement in the moving average."""

SLOWER = 1.2214027581601699
"""e^0.2: a ratio above it is a change, not noise."""

FASTER = 0.8187307530779818
"""e^-0.2."""

SLOW_WEIGHT = 0.05
"""Weight in the longer average, by which a split is put right that costs nothing."""

FAR = 0.1
"""Share of a size by which it must be off for that."""

SETTLE_STEPS = 8
"""Steps between two looks at it."""

FIT_WINDOW = 20
"""Measurements that a fit of the fixed costs remembers, about."""

MIN_SPREAD = 0.05
"""Standard deviation of the sizes, over their mean, from which on times tell what is fixed."""

MIN_EXPLAINED = 0.5
"""Share of the variance of the times that sizes must explain."""

MAX_FIXED = 16
"""Most fixed costs, in mean sizes of all ranks: beyond it they cannot be told from noise."""

DEAD_BAND = 0.03
"""A new split must shorten the slowest rank's predicted time by more than this share: batches keep their shapes."""


class FilterState(NamedTuple):
    """All that a filter remembers, in rank order: plain numbers for a checkpoint."""

    rates: tuple[float, ...]
    suspects: tuple[int, ...]
    slow_rates: tuple[float, ...] = ()
    fixed: tuple[int, ...] = ()
    is_fitted: tuple[bool, ...] = ()
    moments: tuple[float, ...] = ()


class FixedCost:
    """Fits what one rank does once per step, in samples, from its times at different sizes.

    A line through the newest measurements, weighted: number, means of sizes and times, and their (co)variances.
    """

    NUM_MOMENTS = 9

    def __init__(self) -> None:
        self._number = self._size = self._time_s = self._size_2 = self._both = self._time_2 = 0.0
        self._newest_size = self._slowdown = self._slowdown_age = 0.0

    def observe(self, size: int, time_s: float) -> None:
        """Take in the time of a step."""
        self._newest_size = float(size)
        self._slowdown_age += 1.0
        self._number += 1.0 if self._number < FIT_WINDOW else 0.0
        weight = 1.0 / self._number
        off_size, off_time = size - self._size, time_s - self._time_s
        self._size += weight * off_size
        self._time_s += weight * off_time
        kept = 1.0 - weight
        self._size_2 = kept * (self._size_2 + weight * off_size * off_size)
        self._both = kept * (self._both + weight * off_size * off_time)
        self._time_2 = kept * (self._time_2 + weight * off_time * off_time)

    def observe_jump(self, size: int, time_s: float, factor: float) -> bool:
        """The rate jumped by `factor`, to `time_s` for `size` samples: because the speed changed, or the size did?

        At the same size it was the speed: fixed costs change with it. At another one it is what fixed costs look like,
        unless a slowdown just before has ended: then the time without it is back.

        Returns:
            Whether the fixed costs that the rates were taken with are too high: a sample costs more with more of them.
        """
        if self._number == 0.0:
            return False
        if size == self._newest_size:
            self._change_speed(factor)
            self._slowdown, self._slowdown_age = factor, 0.0
            return False
        if self._slowdown and self._slowdown_age < 2 * FIT_WINDOW:
            back_s = self._time_s / self._slowdown
            if FASTER * back_s < time_s < SLOWER * back_s:
                self._change_speed(1.0 / self._slowdown)
                self._slowdown = 0.0
                return False
        return (size > self._newest_size) == (factor > 1.0)

    def _change_speed(self, factor: float) -> None:
        self._time_s *= factor
        self._both *= factor
        self._time_2 *= factor * factor

    def samples(self, most: float) -> int | None:
        """Fixed costs over the cost of a sample, not above `most`; `None` while the measurements do not tell."""
        spread = MIN_SPREAD * self._size
        if self._size_2 <= spread * spread or self._both <= 0.0:
            return None
        if self._both * self._both < MIN_EXPLAINED * self._size_2 * self._time_2:
            return None
        fixed = self._time_s * self._size_2 / self._both - self._size
        return int(min(max(fixed, 0.0), most))

    @property
    def moments(self) -> tuple[float, ...]:
        """What `restore` takes."""
        return (
            *(self._number, self._size, self._time_s, self._size_2, self._both, self._time_2),
            *(self._newest_size, self._slowdown, self._slowdown_age),
        )

    def restore(self, moments: Sequence[float]) -> None:
        """Go on from saved moments."""
        self._number, self._size, self._time_s, self._size_2, self._both, self._time_2 = moments[:6]
        self._newest_size, self._slowdown, self._slowdown_age = moments[6:]


class RateFilter:
    """Cost of a sample on each rank: a moving average that jumps at a change point.

    A measurement off the average by more than `SLOWER` or `FASTER` leaves it as it is; a second one in a row to the
    same side is a change, and the average becomes that measurement. One outlier, a page fault or the short tail of an
    epoch, therefore moves nothing, and a lasting change costs one step more.
    """

    def __init__(self, world_size: int) -> None:
        self._rates = [0.0] * world_size
        self._slow_rates = [0.0] * world_size
        self._suspects = [0] * world_size
        """Side to which the newest measurement was off: 1 slower, -1 faster, 0 it was not."""
        self.fixed = [0] * world_size
        """Fixed costs of each rank in samples; one that is not fitted has the least of the others, once half are."""
        self._is_fitted = [False] * world_size
        self._fits = [FixedCost() for _ in range(world_size)]
        self._counts: tuple[int, ...] = ()

    def observe(self, seconds_per_sample: Sequence[float], counts: tuple[int, ...] = ()) -> None:
        """Take in one step's measurements; what is not a positive number is unknown and changes nothing.

        `counts` are the samples of that step by rank; without them fixed costs are neither learned nor taken off, and
        ranks that have some keep their rates.
        """
        self._counts = counts
        for rank, measured in enumerate(seconds_per_sample):
            if not 0.0 < measured < math.inf:
                continue
            fixed = self.fixed[rank]
            if not fixed:
                self._observe_rate(rank, measured, counts[rank] if counts else 0)
            elif counts:
                self._observe_rate(rank, measured * counts[rank] / (fixed + counts[rank]), counts[rank])

    def _observe_rate(self, rank: int, measured: float, count: int) -> None:
        rates, rate = self._rates, self._rates[rank]
        side = (measured > rate * SLOWER) - (measured < rate * FASTER)
        if side == 0:
            rates[rank] = rate + WEIGHT * (measured - rate)
            self._slow_rates[rank] += SLOW_WEIGHT * (measured - self._slow_rates[rank])
        elif side == self._suspects[rank] or rate == 0.0:
            rates[rank] = self._slow_rates[rank] = measured
            side = 0
            if rate and count:
                time_s = measured * (self.fixed[rank] + count)
                if self._fits[rank].observe_jump(count, time_s, measured / rate) and self.fixed[rank]:
                    self._forget_fixed(rank, count, time_s)
                    measured = rates[rank]
        self._suspects[rank] = side
        if side == 0 and count:
            self._fit(rank, count, measured * (self.fixed[rank] + count))

    def _fit(self, rank: int, count: int, time_s: float) -> None:
        fit, before = self._fits[rank], self.fixed[rank]
        fit.observe(count, time_s)
        found = fit.samples(MAX_FIXED * sum(self._counts) / len(self._counts))
        if found is None or (self._is_fitted[rank] and abs(found - before) <= MIN_SPREAD * (before + count)):
            return
        self._is_fitted[rank] = True
        self._use_fixed(rank, found)
        fitted = [fixed for fixed, is_fitted in zip(self.fixed, self._is_fitted, strict=True) if is_fitted]
        if 2 * len(fitted) >= len(self.fixed):
            for other, is_fitted in enumerate(self._is_fitted):
                if not is_fitted:
                    self._use_fixed(other, min(fitted))

    def _forget_fixed(self, rank: int, count: int, time_s: float) -> None:
        """Drop fixed costs that a time at another size disproves: too high ones make splits swing for ever."""
        self._fits[rank] = FixedCost()
        self.fixed[rank], self._is_fitted[rank] = 0, False
        self._rates[rank] = self._slow_rates[rank] = time_s / count

    def _use_fixed(self, rank: int, fixed: int) -> None:
        """Take other fixed costs for a rank: what its steps cost stays the same."""
        before, count = self.fixed[rank], self._counts[rank]
        self.fixed[rank] = fixed
        self._rates[rank] *= (before + count) / (fixed + count) if fixed + count else 1.0
        self._slow_rates[rank] = self._rates[rank]

    @property
    def rates(self) -> list[float] | None:
        """Per rank; one never measured counts as the slowest that was. `None` before any was."""
        slowest = max(self._rates)
        return [rate or slowest for rate in self._rates] if slowest else None

    @property
    def slow_rates(self) -> list[float]:
        """The same from the longer average; there must be one."""
        slowest = max(self._slow_rates)
        return [rate or slowest for rate in self._slow_rates]

    @property
    def state(self) -> FilterState:
        """What `restore` takes."""
        moments = tuple(value for fit in self._fits for value in fit.moments)
        return FilterState(
            tuple(self._rates),
            tuple(self._suspects),
            tuple(self._slow_rates),
            tuple(self.fixed),
            tuple(self._is_fitted),
            moments,
        )

    def restore(self, state: FilterState) -> None:
        """Go on from a saved state.

        Raises:
            ValueError: when it is of another number of ranks.
        """
        if len(state.rates) != len(self._rates) or len(state.suspects) != len(self._rates):
            raise ValueError(f"rates of {len(state.rates)} ranks for a world of {len(self._rates)}")
        self._rates, self._suspects = list(state.rates), list(state.suspects)
        self._slow_rates = list(state.slow_rates or state.rates)
        if state.fixed:
            self.fixed, self._is_fitted = list(state.fixed), list(state.is_fitted)
        for fit, first in zip(self._fits, range(0, len(state.moments), FixedCost.NUM_MOMENTS), strict=False):
            fit.restore(state.moments[first : first + FixedCost.NUM_MOMENTS])


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
        better = self._faster_split(sizes, rates) or self._settled_split(sizes)
        self._num_kept = 0 if better else self._num_kept + 1
        return better

    def divide(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The first split of a global batch that was decided as `sizes`: those themselves until a rate is known."""
        rates = self.filter.rates
        return tuple(sizes) if rates is None else self._divide(sum(sizes), rates)

    def _faster_split(self, sizes: Sequence[int], rates: Sequence[float]) -> tuple[int, ...] | None:
        """A split by which the slowest rank is predicted to be faster by more than the dead band."""
        times = self._times_s(sizes, rates)
        enough = (1.0 - DEAD_BAND) * max(times)
        if min(times) >= enough:  # samples taken from one rank go to another, which then takes longer than the fastest
            return None
        proposed = self._divide(sum(sizes), rates)
        return proposed if max(self._times_s(proposed, rates)) < enough else None

    def _settled_split(self, sizes: Sequence[int]) -> tuple[int, ...] | None:
        """The split by the longer average, where sizes that cost next to nothing are far from it."""
        if self._num_kept % SETTLE_STEPS != SETTLE_STEPS - 1 or not any(self.filter.fixed):
            return None
        proposed = self._divide(sum(sizes), self.filter.slow_rates)
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


class FastLoop:
    """Writes allocations into a schedule: which from a decision, and from which step on a better split.

    The slow loop decides sizes (`fixed`), or a global batch (`tracking`) that is divided again whenever measurements
    say so, until the slow loop decides again.
    """

    def __init__(self, schedule: Schedule, tracker: Tracker) -> None:
        self.tracker = tracker
        self._schedule = schedule

    def adopt(self, effective_step: int, decided: Allocation) -> None:
        """Let a decision of the slow loop rule from a step on.

        Under tracking its sum is divided by the speeds known so far; its sizes stand while there are none, and the
        sizes in use stay when the global batch does.
        """
        newest = self._schedule.newest
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
