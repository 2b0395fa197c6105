"""Compute time of a worker, t = overhead + max(samples, saturation) / rate, fitted robustly. Pure.

Windows in which the worker straggled lie above the line, some far above. For a given saturation the start is the line
through two windows with the least trimmed absolute deviations (its breakdown point is near one half); then follow
weighted least squares over the windows near the line, until these stay the same. Saturations are tried on a grid; one
is taken where it explains clearly more than none, and then fitted with the rest.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .observations import Array64

Flags = npt.NDArray[np.bool_]

TRUSTED_SHARE = 0.55
"""Share of the windows, nearest first, that a line is judged by: fewer than half may be slow."""
MAX_PAIRS = 300
"""Pairs of windows that are tried: all pairs of 25 windows, or a fixed random choice of so many."""
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
HEAVY = 0.25
"""Windows tell of stragglers when their fitted time, over that of the median window, is above this."""
LEAST_SIZED_SHARE = 0.01
"""Lower bound of the part of the longest time that grows with the samples, so that the rate stays finite."""
NUM_SATURATIONS = 24
"""Saturations that are tried between the least and the largest samples, and then between the best one's neighbours."""
MIN_SIDE = 4
"""Least number of windows near the fit on either side of a saturation."""
CLEARLY_BETTER = 0.8
"""A saturation is visible when what the fit leaves unexplained, over what it does without one, is below this."""
MAX_SATURATION_ERROR = 0.25
"""It is not known when its standard error, over itself, is above this."""


class ComputeTimeLine(NamedTuple):
    """Compute time of one worker: a line in its samples per step, flat below the saturation."""

    overhead_s: float
    s_per_sample: float
    saturation: float
    """0 where none was visible."""
    overhead_error_s: float
    """Standard errors; NaN when overhead and rate could not be told apart."""
    s_per_sample_error: float
    saturation_error: float
    """NaN where none was visible."""
    is_distinct: bool
    """Whether the samples varied enough to tell the overhead from the rate; if not, the overhead is 0."""
    scatter: float = 0.0
    """Relative standard deviation of the time over the windows near the line."""

    def time_s(self, samples: Array64) -> Array64:
        """Return the fitted time for these samples, in seconds."""
        return self.overhead_s + self.s_per_sample * np.maximum(samples, self.saturation)

    def slowdown(self, samples: Array64, busy_s: Array64) -> Array64:
        """Return the time, divided by its fitted value; 1 for windows without samples."""
        return np.where(samples > 0, busy_s / self.time_s(np.where(samples > 0, samples, 1.0)), 1.0)

    def slow(self, samples: Array64, busy_s: Array64) -> Flags:
        """Return for each window whether the worker straggled."""
        return self.slowdown(samples, busy_s) > max(SLOW, 1 + SLOW_SIGMAS * self.scatter)

    def is_heavy(self, samples: Array64) -> Flags:
        """Return which windows have so much to do that some milliseconds more are not a multiple of it."""
        times_s = self.time_s(samples)
        return times_s > HEAVY * np.median(times_s)


class LineFit(NamedTuple):
    """A fit for a given saturation."""

    saturation: float
    overhead_s: float
    s_per_sample: float
    near: Flags
    distances: Array64
    """|log(time / fitted time)|."""


def fit_line(samples: Array64, busy_s: Array64) -> ComputeTimeLine:
    """Fit overhead, rate and saturation of one worker to its windows; windows without samples are left out.

    Raises:
        ValueError: when no window has a sample.
    """
    used = (samples > 0) & (busy_s > 0)
    if not used.any():
        raise ValueError("a rank had no sample in any window: its speed cannot be known")
    x, y = samples[used], busy_s[used]
    if x.max() < MIN_SPREAD * x.min():
        return _flat(x, y)
    plain = _line_fit(x, y, 0.0)
    for trial in (_saturated(x, y, plain), plain):
        if trial is not None and (line := _line(x, y, trial)) is not None:
            return line
    return _flat(x, y)


def _line(x: Array64, y: Array64, trial: LineFit) -> ComputeTimeLine | None:
    """Return the line of a fit with its errors; `None` when these are too large to tell its numbers apart."""
    near, saturation = trial.near, trial.saturation
    errors = _standard_errors(x[near], y[near], trial)
    spread = x[near].max() / max(saturation, x[near].min())
    if spread < MIN_SPREAD or errors[0] > MAX_OVERHEAD_ERROR * np.median(y[near]):
        return None
    if saturation and errors[2] > MAX_SATURATION_ERROR * saturation:
        return None
    line = ComputeTimeLine(trial.overhead_s, trial.s_per_sample, saturation, *errors, is_distinct=True)
    return _with_scatter(line, x, y)


def _flat(x: Array64, y: Array64) -> ComputeTimeLine:
    """Return a line through the origin, for when overhead and rate cannot be told apart."""
    near = _near(y / (x * np.median(y / x)) - 1)
    s_per_sample = float(np.mean((y / x)[near]))
    line = ComputeTimeLine(0.0, s_per_sample, 0.0, np.nan, np.nan, np.nan, is_distinct=False)
    return _with_scatter(line, x, y)


def _with_scatter(line: ComputeTimeLine, x: Array64, y: Array64) -> ComputeTimeLine:
    slowdown = line.slowdown(x, y)
    return line._replace(scatter=robust_std(slowdown[_near(slowdown - 1)]))


def _saturated(x: Array64, y: Array64, plain: LineFit) -> LineFit | None:
    """Return the fit with the best saturation, or `None` when none explains clearly more than the fit without."""
    tried = np.geomspace(x.min(), x.max(), NUM_SATURATIONS)
    trials = [plain, *(_line_fit(x, y, saturation) for saturation in tried[1:-1].tolist())]
    most = max(MIN_OUTLIER, OUTLIER_SIGMAS * MAD_SIGMA * min(float(np.median(trial.distances)) for trial in trials))
    best = 1 + int(np.argmin(_losses(np.stack([trial.distances for trial in trials[1:]]), most)))
    fitted = _fitted_saturation(x, y, trials[best], np.linspace(tried[best - 1], tried[best + 1], NUM_SATURATIONS))
    sides = [int((fitted.near & side).sum()) for side in (x < fitted.saturation, x > fitted.saturation)]
    distances = np.stack([fitted.distances, plain.distances])
    with_it, without = _losses(distances * (distances.min(axis=0) < most), most)  # stragglers are outliers of both
    return fitted if with_it < CLEARLY_BETTER * without and min(sides) >= MIN_SIDE else None


def _losses(distances: Array64, most: float) -> Array64:
    """Return the mean distance over windows of each fit, fits x windows; a window counts `most` at most, an outlier."""
    losses: Array64 = np.minimum(distances, most).mean(axis=1)
    return losses


def _fitted_saturation(x: Array64, y: Array64, trial: LineFit, tried: Array64) -> LineFit:
    """Return the fit with that of some saturations that leaves the least squares over the windows near a first fit."""
    near, fitted = trial.near, trial.overhead_s + trial.s_per_sample * np.maximum(x, trial.saturation)
    found = []
    for saturation in tried.tolist():
        floored = np.maximum(x, saturation)
        overhead, slope = _least_squares(floored[near], y[near], fitted[near])
        distances = np.abs(np.log(y / (overhead + slope * floored)))
        found.append(LineFit(saturation, overhead, slope, near, distances))
    return min(found, key=lambda one: float((one.distances[near] ** 2).sum()))


def _line_fit(x: Array64, y: Array64, saturation: float) -> LineFit:
    """Fit overhead and rate, given the saturation."""
    x = np.maximum(x, saturation)
    overhead, slope = _start(x, y)
    near = np.ones(len(x), dtype=bool)
    for _ in range(MAX_ROUNDS):
        fitted = overhead + slope * x
        now = _near(y / fitted - 1)
        if (now == near).all():
            break
        near = now
        overhead, slope = _least_squares(x[near], y[near], fitted[near])
    return LineFit(saturation, overhead, slope, near, np.abs(np.log(y / (overhead + slope * x))))


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


def _standard_errors(x: Array64, y: Array64, trial: LineFit) -> tuple[float, float, float]:
    """Return those of overhead, time per sample and saturation; the last is NaN without one."""
    floored = np.maximum(x, trial.saturation)
    fitted = trial.overhead_s + trial.s_per_sample * floored
    columns = [np.ones(len(x)), floored]
    if trial.saturation:
        columns.append(trial.s_per_sample * (x < trial.saturation))
    design = np.stack(columns, axis=1) / fitted[:, None]
    variance = float(((y / fitted - 1) ** 2).sum()) / max(1, len(x) - len(columns))
    errors = np.sqrt(np.diag(variance * np.linalg.pinv(design.T @ design)))
    return float(errors[0]), float(errors[1]), float(errors[2]) if trial.saturation else np.nan


def _near(residuals: Array64) -> Flags:
    """Select residuals near zero; the deviation is estimated on the lower side, which has no stragglers."""
    below = residuals[residuals <= 0]
    sigma = MAD_SIGMA * float(np.median(-below)) if len(below) else 0.0
    return np.abs(residuals) <= max(MIN_OUTLIER, OUTLIER_SIGMAS * sigma)


def robust_std(values: Array64) -> float:
    """Return the standard deviation by the median absolute deviation; 0 for fewer than two values."""
    return MAD_SIGMA * float(np.median(np.abs(values - np.median(values)))) if len(values) > 1 else 0.0
