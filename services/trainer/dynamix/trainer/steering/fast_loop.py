"""The fast loop: a new split of the same global batch from every step's compute times. Pure.

Every rank runs it on the same numbers and must come to the same sizes, on whatever machine. So it uses only operations
on single float64 that IEEE 754 defines to the last bit: no logarithm, no sum whose order a library chooses.

A rank's time for b samples is about c (K + b): its work once per step takes as long as K samples. K is fitted per rank
from the times at different sizes (`FixedCost`); c is averaged over as many steps as its noise asks for (`RankRate`).
A K that is too low cannot mislead: errors shrink with each split. One that is too high could make splits swing for
ever, so it is dropped when a sample costs clearly more on a larger size, or less on a smaller one.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from dynamix.schemas.apportion import divide_by_time
from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.data.plan import Schedule

PRECISION_2 = 0.01 * 0.01
"""Square of the relative error of a rate that is small enough: the average is as short as that allows."""

SHORTEST, LONGEST = 0.3, 1 / 64
"""Weights of the newest measurement between which the average is as short as that."""

LEAST_NOISE_2 = 0.08 * 0.08
"""Deviations are judged as if the square of the noise were never below it."""

OUTLIER = 2.5
"""Noises by which a measurement must be off to be an outlier, or a change that two in a row show."""

ALLOWANCE, EVIDENCE = 0.5, 8.0
"""In standard deviations of the noise: deduction from each deviation, and the sum that counts as a change."""

FIRST_NOISE_2 = 0.02 * 0.02
"""Taken for granted before any was measured."""

NOISE_WINDOW = 16
"""Measurements that the noise is averaged over."""

CAUTION = 2.0
"""Share of the differences between ranks that is left out, over the share of them that noise explains."""

MOST_OFF = 9.0
"""Squares of deviations count as so many times the noise's at most."""

FIT_WINDOW = 20
"""Measurements that a fit of the fixed costs remembers, about."""

MIN_SPREAD = 0.05
"""Standard deviation of the sizes, over their mean, from which on times tell what is fixed."""

MIN_EXPLAINED = 0.5
"""Share of the variance of the times that sizes must explain."""

MAX_FIXED = 16
"""Largest fixed cost, in mean sizes of all ranks; larger ones cannot be told from noise."""

MOST_NOISE_2 = 0.3 * 0.3
"""Above it times tell nothing of fixed costs: a line through them would be one through noise."""

SAME = 0.2
"""Relative distance below which a time is the one from before a slowdown."""


@dataclass(slots=True)
class RankRate:
    """Seconds per sample of one rank.

    A measurement x is off the average m by 2 (x - m) / (x + m), near log(x / m). The noise is how far a measurement is
    off the one before it, which a lasting change spoils only once. One that is off by more than `OUTLIER` noises (a
    page fault, the short tail of an epoch) moves nothing; a second one in a row to the same side is a change, and the
    new average. Smaller deviations are summed up while they are to one side (a CUSUM chart): beyond `EVIDENCE` all
    since the sum was zero are the new average.
    """

    value: float = 0.0
    """0: never measured."""
    noise_2: float = FIRST_NOISE_2
    """Square of the noise, relative."""
    _number: float = 0.0
    """Measurements since the last change."""
    _num_seen: float = 0.0
    _newest: float = 0.0
    _suspect: float = 0.0
    """Side to which the newest measurement was an outlier: 1 slower, -1 faster, 0 it was none."""
    _sum: float = 0.0
    _run_length: float = 0.0
    _run_total: float = 0.0

    def begin(self, value: float, number: float = 1.0) -> None:
        """Become the mean of so many measurements."""
        self.value, self._number = value, number
        self._suspect = self._sum = self._run_length = self._run_total = 0.0

    def rescale(self, factor: float) -> None:
        """Express it with other fixed costs."""
        if factor != 1.0:
            self.value *= factor
            self._newest *= factor
            self._sum = self._run_length = self._run_total = 0.0

    def observe(self, measured: float) -> float:
        """Take in one measurement.

        Returns:
            The factor by which the rate changed; 1 where it was averaged, 0 for an outlier.
        """
        before = self.value
        if before == 0.0:
            self.begin(measured)
            self._newest = measured
            return 1.0
        noise_2 = max(self.noise_2, LEAST_NOISE_2)
        noises = 2.0 * (measured - before) / (measured + before) / math.sqrt(noise_2)
        side = float((noises > OUTLIER) - (noises < -OUTLIER))
        if side and side == self._suspect:
            self.begin(measured)
            self._newest = measured
            return measured / before
        self._num_seen += 1.0
        off = 2.0 * (measured - self._newest) / (measured + self._newest)
        weight = max(1.0 / (self._num_seen + 2.0), 1.0 / NOISE_WINDOW)
        self.noise_2 += weight * (min(0.5 * off * off, MOST_OFF * noise_2) - self.noise_2)
        self._newest = measured
        self._suspect = side
        if side:
            return 0.0
        total = self._sum + noises
        if self._run_length == 0.0 or total * self._sum < 0.0:
            total, self._run_length, self._run_total = noises, 0.0, 0.0
        if abs(total) <= ALLOWANCE:
            self._sum = self._run_length = self._run_total = 0.0
        else:
            self._sum = total - math.copysign(ALLOWANCE, total)
            self._run_length += 1.0
            self._run_total += measured
        if abs(self._sum) > EVIDENCE:
            self.begin(self._run_total / self._run_length, self._run_length)
            return self.value / before
        self._number += 1.0
        weight = 2.0 * PRECISION_2 / (self.noise_2 + PRECISION_2)  # an average with it has that error
        self.value += max(1.0 / self._number, min(weight, SHORTEST), LONGEST) * (measured - before)
        return 1.0

    @property
    def is_suspect(self) -> bool:
        """Whether the newest measurement was an outlier."""
        return self._suspect != 0.0

    @property
    def error_2(self) -> float:
        """Square of the rate's standard error."""
        return self.value * self.value * self.noise_2 * max(1.0 / self._number, 0.5 * LONGEST)


@dataclass(slots=True)
class FixedCost:
    """Fits what one rank does once per step, in samples, from its times at different sizes.

    A line through the newest measurements, weighted: number, means of sizes and times, and their (co)variances.
    """

    _number: float = 0.0
    _size: float = 0.0
    _time_s: float = 0.0
    _size_2: float = 0.0
    _both: float = 0.0
    _time_2: float = 0.0
    _newest_size: float = 0.0
    _slowdown: float = 0.0
    _slowdown_age: float = 0.0

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
            if abs(time_s - back_s) < SAME * back_s:
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


class RateFilter:
    """Cost of a sample on each rank, and what each does once per step."""

    def __init__(self, world_size: int) -> None:
        self._rates = [RankRate() for _ in range(world_size)]
        self.fixed = [0] * world_size
        """Fixed costs of each rank in samples; one that is not fitted has the least of the others, once half are."""
        self._is_fitted = [False] * world_size
        self._fits = [FixedCost() for _ in range(world_size)]
        self._counts: tuple[int, ...] = ()
        self._most_fixed = 0.0
        self.has_suspect = False
        """Whether a rank's newest measurement was an outlier: a second one to that side is a change."""

    def observe(self, seconds_per_sample: Sequence[float], counts: tuple[int, ...] = ()) -> None:
        """Take in one step's measurements; what is not a positive number is unknown and changes nothing.

        `counts` are the samples of that step by rank; without them fixed costs are neither learned nor taken off, and
        ranks that have some keep their rates.
        """
        self._counts = counts
        self._most_fixed = MAX_FIXED * sum(counts) / len(counts) if counts else 0.0
        for rank, measured in enumerate(seconds_per_sample):
            if not 0.0 < measured < math.inf:
                continue
            fixed = self.fixed[rank]
            if not fixed:
                self._observe_rate(rank, measured, counts[rank] if counts else 0)
            elif counts:
                self._observe_rate(rank, measured * counts[rank] / (fixed + counts[rank]), counts[rank])
        self.has_suspect = any([rate.is_suspect for rate in self._rates])  # noqa: C419 - a third of the time

    def _observe_rate(self, rank: int, measured: float, count: int) -> None:
        rate = self._rates[rank]
        factor = rate.observe(measured)
        if not count or factor == 0.0:
            return
        if factor != 1.0:
            time_s = rate.value * (self.fixed[rank] + count)
            if self._fits[rank].observe_jump(count, time_s, factor) and self.fixed[rank]:
                self._forget_fixed(rank, count, time_s)
                measured = rate.value
        fit, before = self._fits[rank], self.fixed[rank]
        fit.observe(count, measured * (before + count))
        found = fit.samples(self._most_fixed)
        if rate.noise_2 > MOST_NOISE_2:
            if before:
                self._forget_fixed(rank, count, rate.value * (before + count))
            return
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
        self._rates[rank].begin(time_s / count)

    def _use_fixed(self, rank: int, fixed: int) -> None:
        """Take other fixed costs for a rank: what its steps cost stays the same."""
        before, count = self.fixed[rank], self._counts[rank]
        self.fixed[rank] = fixed
        self._rates[rank].rescale((before + count) / (fixed + count) if fixed + count else 1.0)

    @property
    def rates(self) -> list[float] | None:
        """Per rank; one never measured counts as the slowest that was. `None` before any was.

        They are drawn together as far as noise explains how they differ (James and Stein): ranks that are equal but
        for noise become equal, and those that clearly differ stay as they were measured.
        """
        slowest, total, error_2, number = 0.0, 0.0, 0.0, 0
        for rate in self._rates:
            if rate.value:
                slowest = max(slowest, rate.value)
                total += rate.value
                error_2 += rate.error_2
                number += 1
        if number == 0:
            return None
        mean, spread_2 = total / number, 0.0
        for rate in self._rates:
            if rate.value:
                spread_2 += (rate.value - mean) * (rate.value - mean)
        by_noise = CAUTION * error_2 * (number - 1)
        kept = 1.0 - by_noise / (spread_2 * number) if by_noise < spread_2 * number else 0.0
        return [mean + kept * ((rate.value or slowest) - mean) for rate in self._rates]

    @property
    def state(self) -> list[list[Any]]:
        """Plain numbers by rank, for `restore`."""
        return [list(map(astuple, self._rates)), [*self.fixed], [*self._is_fitted], list(map(astuple, self._fits))]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Go on from a saved state of as many ranks."""
        rates, fixed, is_fitted, fits = state
        self._rates, self._fits = [RankRate(*each) for each in rates], [FixedCost(*each) for each in fits]
        self.fixed, self._is_fitted = [*fixed], [*is_fitted]
        self.has_suspect = any(rate.is_suspect for rate in self._rates)


FAR = 0.1
"""Share of a size by which it is far from equal times. Where fixed costs dominate that costs next to nothing."""

SETTLE_STEPS = 8
"""Steps between two looks for such sizes."""

SHORT_S = 0.02
"""Compute time of the slowest rank below which not every step is measured: sharing and filtering take 0.1 ms."""

STEADY_AFTER, STEADY_EVERY = 32, 4
"""Measurements without another division, from which on one step of four is measured where steps are short."""

CALM_AFTER = 64
"""Measurements without another division, from which on the division stands."""

SCATTER = 0x9E3779B1
"""2^32 over the golden ratio: of every four steps another one is measured, all equally often, whatever a script does in
every second, fourth or fifth step."""


DEAD_BAND = 0.03
"""A new split must shorten the slowest rank's predicted time by more than this share: batches keep their shapes."""


class FastLoop:
    """Writes allocations into a schedule: decisions, and better splits between them.

    The slow loop decides sizes (`fixed`), or a global batch (`tracking`) that is divided in proportion to filtered
    speeds, within each rank's bounds, again whenever measurements say so, until the slow loop decides again.
    """

    def __init__(self, schedule: Schedule, min_local_batch_size: int, max_local_batch_sizes: Sequence[int]) -> None:
        self.filter = RateFilter(len(max_local_batch_sizes))
        self._schedule = schedule
        self._min_local_batch_size = min_local_batch_size
        self.upper = tuple(max_local_batch_sizes)
        self._num_kept = 0
        """Steps since the split was changed."""
        self._num_calm = 0
        """Measurements without another division, up to `CALM_AFTER`."""
        self._longest_s = 0.0
        """The slowest rank's predicted compute time; 0 until speeds are known."""

    @property
    def state(self) -> list[Any]:
        """Plain numbers for a checkpoint, and for `restore`."""
        return [self.filter.state, self._num_calm, self._longest_s]

    def restore(self, state: Sequence[Any]) -> None:
        """Go on from a saved state of as many ranks."""
        filtered, self._num_calm, self._longest_s = state
        self.filter.restore(filtered)

    def measures(self, step: int) -> bool:
        """Whether the ranks exchange their times in a step with `tracking`.

        All ranks ask before the step, and have the same answer: it changes with measurements only.
        """
        if self._longest_s >= SHORT_S or self._num_calm < STEADY_AFTER or self.filter.has_suspect:
            return True
        turn, place = divmod(step, STEADY_EVERY)
        return place == (turn * SCATTER >> 30) % STEADY_EVERY

    @property
    def is_calm(self) -> bool:
        """Whether the division stands: less is measured and reported."""
        return self._num_calm >= CALM_AFTER

    def adopt(self, effective_step: int, decided: Allocation) -> None:
        """Activate a decision of the slow loop from a step on.

        Under tracking its sum is divided by the speeds known so far; its sizes stand while there are none, and the
        sizes in use stay when the global batch does. Where traces rule, no decision moves the sizes.
        """
        newest = self._schedule.newest
        if decided.split == newest.split == "traces":
            decided = decided.with_sizes(newest.local_batch_sizes)
        if decided.split == "tracking":
            kept = newest.split == "tracking" and decided.global_batch_size == newest.global_batch_size
            sizes = newest.local_batch_sizes if kept else self.divide(decided.local_batch_sizes)
            decided = decided.with_sizes(sizes)
        if decided != newest:
            self._schedule.revise(effective_step, decided)

    def observe_times(
        self, seconds_per_sample: Sequence[float], effective_step: int, counts: tuple[int, ...] = ()
    ) -> None:
        """Process the compute times of a step; under tracking a better split is active from `effective_step` on.

        That is the first step that no rank has drawn a batch for. `counts` are the samples of the step that was
        measured, by rank. While the slow loop has fixed the sizes, times are only remembered.
        """
        newest = self._schedule.newest
        if newest.split != "tracking":
            self.filter.observe(seconds_per_sample, counts)
            return
        better = self.better_split(seconds_per_sample, newest.local_batch_sizes, counts)
        self._num_calm = min(self._num_calm + 1, CALM_AFTER)
        if better is not None:
            self._schedule.revise(effective_step, newest.with_sizes(better))
            self._num_calm = 0

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
        self._num_kept += 1
        times = self._times_s(sizes, rates)
        self._longest_s = max(times)
        enough = (1.0 - DEAD_BAND) * self._longest_s
        may_be_faster = min(times) < enough  # samples taken from one rank make another one slower than the fastest
        may_settle = self._num_kept % SETTLE_STEPS == 0 and any(self.filter.fixed)
        if not (may_be_faster or may_settle):
            return None
        proposed = self.divide(sizes)
        is_faster = may_be_faster and max(self._times_s(proposed, rates)) < enough
        is_far = may_settle and any(
            abs(size - new) > FAR * size + 1.0 for size, new in zip(sizes, proposed, strict=True)
        )
        if not (is_faster or is_far):
            return None
        self._num_kept = 0
        return proposed

    def divide(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The split of a global batch that was decided as `sizes`; `sizes` until a rate is known.

        A saturation needs no fit: below it a rank takes as long with fewer samples, so that it has few, and the others
        have as many as they can take in that time.
        """
        rates, total = self.filter.rates, sum(sizes)
        if rates is None:
            return tuple(sizes)
        fewest, fixed = self._min_local_batch_size, self.filter.fixed
        if fewest == 0 and total >= len(rates):
            fewest = 1  # a rank that had none would never be measured again
        lower = [min(fewest, most) for most in self.upper]
        return divide_by_time(
            *(total, [1.0 / rate for rate in rates], lower, self.upper), fixed=fixed, saturations=(0,) * len(rates)
        )

    def _times_s(self, sizes: Sequence[int], rates: Sequence[float]) -> list[float]:
        """Predicted compute times; only their extremes are used, which have neither rounding nor order."""
        return [(size + more) * rate for size, more, rate in zip(sizes, self.filter.fixed, rates, strict=True)]
