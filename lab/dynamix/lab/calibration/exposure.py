"""Fit the communication time C, the overlap and the buckets of the virtual clock, robust to outliers. Pure.

    exposed = max(C / buckets, C - overlap * slowest compute)

For given overlap and buckets each window implies C = min(buckets * exposed, exposed + overlap * slowest); C is the
median over the windows, overlap and buckets come from a grid. Congested windows imply a larger C.
"""

from typing import NamedTuple

import numpy as np

from .lines import Flags, robust_std
from .observations import Array64

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
OVERLAPS = np.linspace(0.0, 1.0, 51)
START_QUANTILE = 0.4
TRUSTED_SHARE = 0.65
"""The windows that agree best are fitted; a third may be congested or disturbed."""
TIE = 1.02
LEAST_LOSS = 1e-4
"""Fewer buckets are preferred when their loss is at most so many times larger; `LEAST_LOSS` counts as no loss."""
CLEARLY_BETTER = 0.8
"""An overlap is visible when the loss, divided by the loss without overlap, is below this."""
NUM_DRAWS = 128
"""Draws of jitter, to estimate how long workers with jitter wait for the slowest of them."""
NUM_ROUNDS = 3
CONGESTED = 1.5
"""A window counts as congested when C, divided by its usual value, is above this."""
CONGESTED_SIGMAS = 6.0
LEAST_S = 1e-6
"""Lower bound of C, so that the bandwidth stays finite."""


class Exposure(NamedTuple):
    """The fitted formula."""

    communication_s: float
    """C."""
    overlap: float
    num_buckets: int
    is_distinct: bool
    """Whether an overlap was visible; if not, the same part of C may have been hidden in every window."""
    scatter: float
    """Relative scatter of C over the windows."""

    def expected_s(self, slowest_s: Array64) -> Array64:
        """Return what the formula says of windows with these slowest compute times."""
        return np.maximum(self.communication_s / self.num_buckets, self.communication_s - self.overlap * slowest_s)

    def factor(self, exposed_s: Array64, slowest_s: Array64) -> Array64:
        """Return C of each window, divided by the fitted C."""
        return _implied(exposed_s, slowest_s, self.num_buckets, self.overlap) / self.communication_s

    def shows_buckets(self, slowest_s: Array64) -> bool:
        """Return whether some windows computed for so long that only the last bucket was exposed."""
        return bool((self.communication_s - self.overlap * slowest_s < self.communication_s / self.num_buckets).any())

    def congested(self, exposed_s: Array64, slowest_s: Array64) -> Flags:
        """Return for each window whether communication took much longer than usual."""
        limit = max(CONGESTED, 1 + CONGESTED_SIGMAS * self.scatter)
        return self.factor(exposed_s, slowest_s) > limit


def exposed(busy_s: Array64, sync_s: Array64, jitter: float) -> Array64:
    """Return the communication time that each window's steps waited for, in seconds per step.

    The slowest rank of a step waits for no other rank. Over a window each rank may have been the slowest for some
    steps, so the smallest mean sync time still contains waiting. That waiting is estimated with draws of the jitter and
    subtracted.

    Args:
        busy_s: windows x ranks.
        sync_s: windows x ranks.
        jitter: sigma of the lognormal factor of a step.
    """
    least: Array64 = sync_s.min(axis=1)
    if jitter == 0 or busy_s.shape[1] == 1:
        return least
    draws = np.random.default_rng(0).standard_normal((NUM_DRAWS, 1, busy_s.shape[1]))
    deviations = np.exp(jitter * draws - jitter**2 / 2) - 1
    waiting = np.zeros(len(busy_s))
    for deviation in deviations:
        waiting += (busy_s * (1 + deviation)).max(axis=1)
    corrected: Array64 = np.maximum(0.0, least - (waiting / NUM_DRAWS - busy_s.max(axis=1)))
    return corrected


def fit_exposure(exposed_s: Array64, slowest_s: Array64) -> Exposure:
    """Fit C, overlap and buckets to one exposed and one slowest compute time per window.

    The first fit uses the windows that agree best; the second all windows that are not congested by the first fit.
    """
    first = _fit(exposed_s, slowest_s, TRUSTED_SHARE)
    calm = np.logical_not(first.congested(exposed_s, slowest_s))
    return _fit(exposed_s[calm], slowest_s[calm], 1.0) if calm.sum() >= TRUSTED_SHARE * len(calm) else first


def _fit(exposed_s: Array64, slowest_s: Array64, share: float) -> Exposure:
    found = {
        buckets: min(
            _trial(exposed_s, slowest_s, buckets, float(overlap), share)
            for overlap in (OVERLAPS if buckets > 1 else OVERLAPS[:1])  # one bucket is never hidden
        )
        for buckets in BUCKETS
    }
    least = min(trial.loss for trial in found.values())
    is_distinct = least < CLEARLY_BETTER * found[1].loss
    near = (buckets for buckets, trial in found.items() if trial.loss <= TIE * least + LEAST_LOSS)
    buckets = next(near) if is_distinct else 1
    overlap, communication_s = found[buckets].overlap, max(LEAST_S, found[buckets].communication_s)
    factors = _implied(exposed_s, slowest_s, buckets, overlap) / communication_s
    return Exposure(
        communication_s=communication_s,
        overlap=overlap,
        num_buckets=buckets,
        is_distinct=is_distinct,
        scatter=robust_std(factors),
    )


def _implied(exposed_s: Array64, slowest_s: Array64, buckets: int, overlap: float) -> Array64:
    """Return C of each window, given overlap and buckets."""
    return np.minimum(buckets * exposed_s, exposed_s + overlap * slowest_s)


class _Trial(NamedTuple):
    loss: float
    """Mean absolute error of the step time, relative, over the windows that agree best."""
    overlap: float
    communication_s: float


def _trial(exposed_s: Array64, slowest_s: Array64, buckets: int, overlap: float, share: float) -> _Trial:
    """Fit C for given buckets and overlap; the loss is what it leaves unexplained."""
    implied = _implied(exposed_s, slowest_s, buckets, overlap)
    trusted = max(2, round(share * len(implied)))
    communication_s = float(np.quantile(implied, START_QUANTILE))
    for _ in range(NUM_ROUNDS):
        fitted = np.maximum(communication_s / buckets, communication_s - overlap * slowest_s)
        errors = np.abs(exposed_s - fitted) / (slowest_s + exposed_s)
        order = np.argsort(errors, kind="stable")[:trusted]
        communication_s = float(np.median(implied[order]))
    return _Trial(float(errors[order].mean()), overlap, communication_s)
