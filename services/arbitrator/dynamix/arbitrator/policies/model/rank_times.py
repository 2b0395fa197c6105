"""Fits what a step costs each rank to its times at different sizes.

    time = fixed + max(size, saturation) * seconds_per_sample

Two times of a rank at two sizes are a pair. Under a saturation S it tells what is fixed: with m = max(size, S),
m_1 t_0 - m_0 t_1 = fixed (m_1 - m_0). Both sides are divided by the mean m and the mean t, which makes their error the
relative error of the times, and their products are summed over pairs, for each of some saturations. Least squares then
gives what is fixed, and what it leaves unexplained tells the saturations apart. Old pairs fade as new ones come, and
never while sizes stay.
"""

from typing import NamedTuple, Self

import numpy as np

from .observation import Array64

NUM_SATURATIONS = 36
"""Saturations that are compared beside none: the largest size, and down from it in steps of `QUARTER_OCTAVE`."""

QUARTER_OCTAVE = 0.8408964152537145
"""2^-0.25: the nearest of them is off by 9 % at most."""

DECAY = 0.95
"""Weight that a rank's older pairs keep when a new one comes."""

MIN_WEIGHT = 0.01
"""Squared relative changes of size, summed, from which on a rank's own times tell what is fixed: one change by 10 %."""

MIN_EXPLAINED = 0.01
"""Squared relative errors that a saturation must explain: one time that was 10 % off."""

MAX_UNEXPLAINED = 0.4
"""Share of the squared errors without a saturation that one with it may leave."""

LEAST_SHARE = 0.02
"""Least share of a time that samples are believed to take, of as many as ranks have on the mean."""

TOLERANCE = 0.1
"""With more samples a time may fall by this share, or rise by so much more than they do; else the speed has changed."""


class RankFit(NamedTuple):
    """What the times of each rank tell; one number per rank."""

    saturation: Array64
    """Samples up to which a step costs the same; 0 where none was seen."""
    fixed_s: Array64
    """Seconds of a step that do not depend on its samples, NaN where a rank's sizes have not moved enough to tell."""
    weighted_s: Array64
    """`weight` times what is fixed, which is 0 where nothing is known."""
    weight: Array64
    """Squared changes of size over squared times; over those of other ranks, a rank's weight in a common estimate."""


class PairSums:
    """Sums over each rank's pairs, by saturation. Immutable."""

    def __init__(self, largest: float, sums: Array64) -> None:
        """Take sums of Q P, Q^2 and P^2, where P = fixed Q: saturations x 3 x ranks; `largest` size of any rank."""
        self.values = sums
        self._largest = largest
        self._saturations = np.zeros(NUM_SATURATIONS + 1)
        for index in range(NUM_SATURATIONS):
            self._saturations[index + 1] = largest
            largest *= QUARTER_OCTAVE

    @classmethod
    def empty(cls, largest: float, num_ranks: int) -> Self:
        """Before the first pair."""
        return cls(largest, np.zeros((NUM_SATURATIONS + 1, 3, num_ranks)))

    def add_pairs(
        self, sizes: tuple[Array64, Array64], times_s: tuple[Array64, Array64], tolerance: float = TOLERANCE
    ) -> Self:
        """The sums with one more pair of each rank: two sizes, two times; NaN where there is none.

        A pair is left out where no model of a constant speed explains it, but for that tolerance.
        """
        (size_0, size_1), (time_0, time_1) = sizes, times_s
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            grown, slowed = size_1 / size_0, time_1 / time_0
            low, high = np.minimum(grown, 1.0), np.maximum(grown, 1.0)
            is_possible = (slowed >= low * (1.0 - tolerance)) & (slowed <= high * (1.0 + tolerance))
            usable = is_possible & (grown != 1.0)
            if not usable.any():
                return self
            at_0, at_1 = (np.maximum(size, self._saturations[:, None]) for size in sizes)
            scale = (at_0 + at_1) * (time_0 + time_1) / 4.0
            p, q = (at_1 * time_0 - at_0 * time_1) / scale, (at_1 - at_0) / scale
            added = DECAY * self.values + np.stack([q * p, q * q, p * p], axis=1)
        return type(self)(self._largest, np.where(usable, added, self.values))

    def fit(self, times_s: Array64, most_s: Array64, doubt: float = 1.0) -> RankFit:
        """What the pairs tell of ranks whose steps take `times_s` now; at most `most_s` of them is fixed.

        With a `doubt` above 1 it takes so much more evidence.
        """
        qp, qq, pp = self.values[:, 0], self.values[:, 1], self.values[:, 2]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            fixed_s = np.clip(np.where(qq > 0.0, qp / qq, 0.0), 0.0, most_s)
            errors = pp - 2.0 * fixed_s * qp + fixed_s * fixed_s * qq
            enough = qq * times_s * times_s >= doubt * MIN_WEIGHT
        ranks = np.arange(qp.shape[1])
        best = np.where(enough, errors, np.inf).argmin(axis=0)
        at_best, at_none = errors[best, ranks], errors[0]
        is_better = (at_none - at_best >= doubt * MIN_EXPLAINED) & (at_best <= MAX_UNEXPLAINED * at_none)
        best = np.where(is_better, best, 0)
        known_s = np.where(enough[best, ranks], fixed_s[best, ranks], np.nan)
        return RankFit(self._saturations[best], known_s, qp[best, ranks], qq[best, ranks])


def fixed_share(sizes: Array64) -> Array64:
    """Greatest share of each rank's time that is believed to be fixed, at these sizes; NaN where a size is."""
    mean = np.nanmean(sizes)
    share: Array64 = 1.0 - LEAST_SHARE * np.minimum(sizes / mean, 1.0)
    return share
