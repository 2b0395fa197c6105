"""Compute time of a worker as a line, t = overhead + samples / rate, fitted robustly. Pure.

Windows in which the worker straggled lie above the line, some far above. The start is the line through two windows with
the least trimmed absolute deviations (its breakdown point is near one half); then follow weighted least squares over
the windows near the line, until these stay the same.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .observations import Array64

Flags = npt.NDArray[np.bool_]

TRUSTED_SHARE = 0.55
"""Share of the windows, nearest first, that a line is judged by: fewer than half may be slow."""
MAX_PAIRS = 1500
"""Pairs of windows that are tried: all pairs of 55 windows, or a fixed random choice of so many."""
MAX_ROUNDS = 20
MAD_SIGMA = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""
OUTLIER_SIGMAS = 4.0
MIN_OUTLIER = 0.05
MIN_SPREAD = 1.2
"""Overhead and rate can be told apart only when the largest over the smallest number of samples reaches this."""
MAX_OVERHEAD_ERROR = 0.25
"""They cannot be told apart when the standard error of the overhead, over the median time, is above this."""
SLOW = 1.3
"""A worker straggles above this slowdown, or above so many sigmas of its usual scatter if that is more."""
SLOW_SIGMAS = 6.0
LEAST_SIZED_SHARE = 0.01
"""Lower bound of the part of the longest time that grows with the samples, so that the rate stays finite."""


class ComputeTimeLine(NamedTuple):
    """Compute time of one worker, as a line in its samples per step."""

    overhead_s: float
    s_per_sample: float
    overhead_error_s: float
    """Standard errors; NaN when overhead and rate could not be told apart."""
    s_per_sample_error: float
    is_distinct: bool
    """Whether the samples varied enough to tell the overhead from the rate; if not, the overhead is 0."""
    scatter: float = 0.0
    """Relative standard deviation of the sized part over the windows near the line."""

    def time_s(self, samples: Array64) -> Array64:
        """Return the fitted time for these samples, in seconds."""
        return self.overhead_s + self.s_per_sample * samples

    def slowdown(self, samples: Array64, busy_s: Array64) -> Array64:
        """Return the time of the part that grows with the samples, divided by its fitted value."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(samples > 0, (busy_s - self.overhead_s) / (self.s_per_sample * samples), 1.0)

    def slow(self, samples: Array64, busy_s: Array64) -> Flags:
        """Return for each window whether the worker straggled."""
        return self.slowdown(samples, busy_s) > max(SLOW, 1 + SLOW_SIGMAS * self.scatter)


def fit_line(samples: Array64, busy_s: Array64) -> ComputeTimeLine:
    """Fit the line of one worker to its windows; windows without samples are left out.

    Raises:
        ValueError: when no window has a sample.
    """
    used = (samples > 0) & (busy_s > 0)
    if not used.any():
        raise ValueError("a rank had no sample in any window: its speed cannot be known")
    x, y = samples[used], busy_s[used]
    if x.max() < MIN_SPREAD * x.min():
        return _flat(samples, busy_s)
    overhead, slope = _start(x, y)
    near = np.ones(len(x), dtype=bool)
    for _ in range(MAX_ROUNDS):
        fitted = overhead + slope * x
        now = _near(y / fitted - 1)
        if (now == near).all():
            break
        near = now
        overhead, slope = _least_squares(x[near], y[near], fitted[near])
    errors = _standard_errors(x[near], y[near], overhead, slope)
    if x[near].max() < MIN_SPREAD * x[near].min() or errors[0] > MAX_OVERHEAD_ERROR * np.median(y[near]):
        return _flat(samples, busy_s)
    return _line(overhead, slope, errors, samples, busy_s, is_distinct=True)


def _flat(samples: Array64, busy_s: Array64) -> ComputeTimeLine:
    """Return a line through the origin, for when overhead and rate cannot be told apart."""
    used = samples > 0
    s_per_sample = float(np.median(busy_s[used] / samples[used]))
    near = _near(busy_s[used] / (s_per_sample * samples[used]) - 1)
    s_per_sample = float(np.mean((busy_s[used] / samples[used])[near]))
    return _line(0.0, s_per_sample, (np.nan, np.nan), samples, busy_s, is_distinct=False)


def _line(
    overhead: float, slope: float, errors: tuple[float, float], x: Array64, y: Array64, *, is_distinct: bool
) -> ComputeTimeLine:
    line = ComputeTimeLine(overhead, slope, *errors, is_distinct=is_distinct)
    used = x > 0
    near = _near(y[used] / line.time_s(x[used]) - 1)
    return line._replace(scatter=robust_std(line.slowdown(x, y)[used][near]))


def _start(x: Array64, y: Array64) -> tuple[float, float]:
    """Return the line through two windows, or the origin and one, with the least trimmed loss |log(t / line)|."""
    first, second = np.triu_indices(len(x), 1)
    if len(first) > MAX_PAIRS:
        chosen = np.random.default_rng(0).choice(len(first), MAX_PAIRS, replace=False)
        first, second = first[chosen], second[chosen]
    apart = x[first] != x[second]
    first, second = first[apart], second[apart]
    slopes = np.concatenate([(y[second] - y[first]) / (x[second] - x[first]), y / x])
    overheads = np.concatenate([y[first] - slopes[: len(first)] * x[first], np.zeros(len(x))])
    possible = (slopes > 0) & (overheads >= 0)
    slopes, overheads = slopes[possible], overheads[possible]
    distances = np.abs(np.log(y) - np.log(overheads[:, None] + slopes[:, None] * x))
    trusted = max(1, round(TRUSTED_SHARE * len(x)))
    best = int(np.partition(distances, trusted - 1, axis=1)[:, :trusted].sum(axis=1).argmin())
    return float(overheads[best]), float(slopes[best])


def _least_squares(x: Array64, y: Array64, fitted: Array64) -> tuple[float, float]:
    """Return overhead >= 0 and slope > 0 by least squares, each window divided by its expected time."""
    design = np.stack([1 / fitted, x / fitted], axis=1)
    overhead, slope = np.linalg.lstsq(design, y / fitted, rcond=None)[0]
    if overhead < 0:
        overhead, slope = 0.0, float((x * y / fitted**2).sum() / (x**2 / fitted**2).sum())
    least = LEAST_SIZED_SHARE * float(np.median(y)) / float(x.max())
    if slope < least:
        slope = least
        overhead = max(0.0, float(np.mean(y - slope * x)))
    return float(overhead), float(slope)


def _standard_errors(x: Array64, y: Array64, overhead: float, slope: float) -> tuple[float, float]:
    fitted = overhead + slope * x
    design = np.stack([1 / fitted, x / fitted], axis=1)
    variance = float(((y / fitted - 1) ** 2).sum()) / max(1, len(x) - 2)
    covariance = variance * np.linalg.pinv(design.T @ design)
    return float(np.sqrt(covariance[0, 0])), float(np.sqrt(covariance[1, 1]))


def _near(residuals: Array64) -> Flags:
    """Select residuals near zero; the deviation is estimated on the lower side, which has no stragglers."""
    below = residuals[residuals <= 0]
    sigma = MAD_SIGMA * float(np.median(-below)) if len(below) else 0.0
    return np.abs(residuals) <= max(MIN_OUTLIER, OUTLIER_SIGMAS * sigma)


def robust_std(values: Array64) -> float:
    """Return the standard deviation by the median absolute deviation; 0 for fewer than two values."""
    return MAD_SIGMA * float(np.median(np.abs(values - np.median(values)))) if len(values) > 1 else 0.0
