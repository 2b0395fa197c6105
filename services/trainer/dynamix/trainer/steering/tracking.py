"""The fast loop: a new split of the same global batch from every step's compute times. Pure.

Every rank runs it on the same numbers and must come to the same sizes, on whatever machine. So it adds, multiplies,
divides and compares single float64, which IEEE 754 defines to the last bit: no logarithm, no exponential, no sum whose
order a compiler or a library chooses. Real training and virtual cluster share it.

Where it settles. A rank's time for b samples is about o + b c. Its rate, time per sample, is o/b + c: too high for a
small b. Yet sizes times rates are the times themselves, so the only split that stays is the one in which all ranks take
equally long, whatever their o. On the way there a wrong size spoils the next rate by the share o/(o + b c), which is
below 1 and has the error's own sign: errors shrink by that factor per split and never change sides, at any delay. A
rank that is mostly overhead is approached slowly.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from dynamix.schemas.apportion import apportion
from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.data.schedule import Schedule

WEIGHT = 0.3
"""Weight of the newest measurement in the moving average."""

SLOWER = 1.2214027581601699
"""e^0.2: a ratio above it is a change, not noise."""

FASTER = 0.8187307530779818
"""e^-0.2."""

DEAD_BAND = 0.03
"""A new split must shorten the slowest rank's predicted time by more than this share: batches keep their shapes."""


class FilterState(NamedTuple):
    """All that a filter remembers, in rank order: plain numbers for a checkpoint."""

    rates: tuple[float, ...]
    suspects: tuple[int, ...]


class RateFilter:
    """Seconds per sample of each rank: a moving average that jumps at a change point.

    A measurement off the average by more than `SLOWER` or `FASTER` leaves it as it is; a second one in a row to the
    same side is a change, and the average becomes that measurement. One outlier, a page fault or the short tail of an
    epoch, therefore moves nothing, and a lasting change costs one step more.
    """

    def __init__(self, world_size: int) -> None:
        self._rates = [0.0] * world_size
        self._suspects = [0] * world_size
        """Side to which the newest measurement was off: 1 slower, -1 faster, 0 it was not."""

    def observe(self, seconds_per_sample: Sequence[float]) -> None:
        """Take in one step's measurements; what is not a positive number is unknown and changes nothing."""
        rates, suspects = self._rates, self._suspects
        for rank, measured in enumerate(seconds_per_sample):
            if not 0.0 < measured < math.inf:
                continue
            rate = rates[rank]
            side = (measured > rate * SLOWER) - (measured < rate * FASTER)
            if side == 0:
                rates[rank] = rate + WEIGHT * (measured - rate)
            elif side == suspects[rank] or rate == 0.0:
                rates[rank], side = measured, 0
            suspects[rank] = side

    @property
    def rates(self) -> list[float] | None:
        """Per rank; one never measured counts as the slowest that was. `None` before any was."""
        slowest = max(self._rates)
        return [rate or slowest for rate in self._rates] if slowest else None

    @property
    def state(self) -> FilterState:
        """What `restore` takes."""
        return FilterState(tuple(self._rates), tuple(self._suspects))

    def restore(self, state: FilterState) -> None:
        """Go on from a saved state.

        Raises:
            ValueError: when it is of another number of ranks.
        """
        if len(state.rates) != len(self._rates) or len(state.suspects) != len(self._rates):
            raise ValueError(f"rates of {len(state.rates)} ranks for a world of {len(self._rates)}")
        self._rates, self._suspects = list(state.rates), list(state.suspects)


class Tracker:
    """Divides a global batch in proportion to filtered speeds, within each rank's bounds."""

    def __init__(self, min_local_batch_size: int, max_local_batch_sizes: Sequence[int]) -> None:
        self.filter = RateFilter(len(max_local_batch_sizes))
        self._min_local_batch_size = min_local_batch_size
        self._upper = tuple(max_local_batch_sizes)

    def better_split(self, seconds_per_sample: Sequence[float], sizes: Sequence[int]) -> tuple[int, ...] | None:
        """Take in one step's compute times and return the sizes that shall replace `sizes`, or `None`.

        Args:
            seconds_per_sample: compute time over samples, by rank; 0 where a rank had no samples or knows no time.
            sizes: the newest split, in force or scheduled; a new one has the same sum.
        """
        self.filter.observe(seconds_per_sample)
        rates = self.filter.rates
        if rates is None:
            return None
        times = _times_s(sizes, rates)
        enough = (1.0 - DEAD_BAND) * max(times)
        if min(times) >= enough:  # samples taken from one rank go to another, which then takes longer than the fastest
            return None
        proposed = self._divide(sum(sizes), rates)
        return proposed if max(_times_s(proposed, rates)) < enough else None

    def divide(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The first split of a global batch that was decided as `sizes`: those themselves until a rate is known."""
        rates = self.filter.rates
        return tuple(sizes) if rates is None else self._divide(sum(sizes), rates)

    def _divide(self, total: int, rates: Sequence[float]) -> tuple[int, ...]:
        """Every rank gets a sample where there are enough: one that had none would never be measured again."""
        fewest = self._min_local_batch_size
        if fewest == 0 and total >= len(rates):
            fewest = 1
        lower = [min(fewest, most) for most in self._upper]
        return apportion(total, [1.0 / rate for rate in rates], lower, self._upper)


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

    def observe_times(self, seconds_per_sample: Sequence[float], effective_step: int) -> None:
        """Take in the compute times of a step; under tracking a better split rules from `effective_step` on.

        That is the first step that no rank has drawn a batch for. While the slow loop has fixed the sizes, times are
        only remembered.
        """
        newest = self._schedule.newest
        if newest.split != "tracking":
            self.tracker.filter.observe(seconds_per_sample)
            return
        better = self.tracker.better_split(seconds_per_sample, newest.local_batch_sizes)
        if better is not None:
            self._schedule.revise(effective_step, newest.with_sizes(better))


def _times_s(sizes: Sequence[int], rates: Sequence[float]) -> list[float]:
    """Predicted compute times; only their extremes are used, which have neither rounding nor order."""
    return [size * rate for size, rate in zip(sizes, rates, strict=True)]
