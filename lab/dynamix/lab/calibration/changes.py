"""Lasting changes of a rank's speed: when its compute time left its line for a multiple of it, for good. Pure.

For each rank the windows are split in two where levels before and after leave the least absolute deviations from its
line; line, factor and split are fitted in turn, from three starts. A split counts as a change when it is clearly better
than a single line, when almost no window is on the wrong side of the middle between both levels, and when the slow
stretch is no straggler's: much longer than any time for which a rank was slow and came back, and by another factor.
"""

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from .lines import MAD_SIGMA, MIN_OUTLIER, OUTLIER_SIGMAS, SLOW, ComputeTimeLine, Flags, fit_line
from .observations import Array64, Observations

MIN_SIDE = 4
"""Least number of windows before and after a change."""
MIN_SHARE = 0.15
"""Least share of the training time that a rank is slow, before or after."""
SPELLS = 3.0
"""So many times the longest time that a rank was slow and came back."""
OTHER_FACTOR = 1.15
"""Stragglers and a change have other factors when one over the other is above this."""
MAX_FITTED = 150
"""Windows that a line is fitted to while changes are looked for, evenly chosen: time grows by their square."""
WORTH_A_LOOK = 1.15
"""A factor below this, of the first look, is not looked at again."""
CLEARLY_BETTER = 0.5
"""Deviations from two levels, over those from one line, are below this."""
MAX_ASTRAY = 0.15
"""Share of the windows of each side that may be nearer to the other side's level, by scatter."""
MAX_ASTRAY_RUN = 2
"""So many of them in a row: more are a spell."""
MAX_SPLITS = 200
"""Splits that are tried at first; then those around the best one."""
MAX_ROUNDS = 6
SAME_FACTOR = 0.005
"""Line and factor are not fitted again when the factor changed by less."""
MIN_SLOW = 3
"""Stragglers' factor is known from so many windows."""
MIXED = 0.15
"""A window has steps of both kinds when the share of either, by its compute time, is above this."""
EDGE = 1e-9


class SpeedShift(NamedTuple):
    """A lasting change of one rank's speed."""

    at_s: float
    """Training time."""
    factor: float
    """Compute time after it, over that before."""
    exchange_s: float = 0.0
    """By how much longer exchanges of gradients take after it."""

    def share(self, seen: Observations) -> Array64:
        """Return the share of each window's time that is after the change."""
        share: Array64 = np.clip((seen.begin_s + seen.duration_s - self.at_s) / seen.duration_s, 0.0, 1.0)
        return share

    def factors(self, seen: Observations) -> Array64:
        """Return the mean factor on the compute time of each window."""
        return 1 + (self.factor - 1) * self.share(seen)

    def is_mixed(self, seen: Observations) -> Flags:
        """Return which windows have steps before and after it."""
        share = self.share(seen)
        return (share > EDGE) & (share < 1 - EDGE)

    def slow_s(self, seen: Observations) -> float:
        """Return for how long the rank was slow."""
        after = self.share(seen)
        return float((seen.duration_s * (after if self.factor > 1 else 1 - after)).sum())

    def resembles(self, factor: float) -> bool:
        """Return whether a rank is slowed by about that factor, before the change or after it."""
        return abs(abs(math.log(self.factor)) - math.log(factor)) < math.log(OTHER_FACTOR)


Shifts = tuple[SpeedShift | None, ...]
"""By rank; `None` where nothing changed."""


def find_shifts(seen: Observations) -> Shifts:
    """Return the change of each rank; one at most."""
    found = tuple(_find_shift(seen, rank) for rank in range(seen.world_size))
    if not any(found):
        return found
    lines, busy_s = fit_lines(seen, found), usual_busy_s(seen, found)
    longest_s, factors = 0.0, []
    for rank, line in enumerate(lines):
        slow = line.slow(seen.samples[:, rank], busy_s[:, rank]) & line.is_heavy(seen.samples[:, rank])
        back = slow & (np.cumsum(~slow[::-1])[::-1] > 0)
        longest_s = max(longest_s, *_runs(np.where(back, seen.duration_s, 0.0)))
        factors += line.slowdown(seen.samples[:, rank], busy_s[:, rank])[back].tolist()
    least_s = max(MIN_SHARE * float(seen.duration_s.sum()), SPELLS * longest_s)
    usual = float(np.median(factors)) if len(factors) >= MIN_SLOW else math.inf
    return tuple(
        shift if shift is not None and shift.slow_s(seen) >= least_s and not shift.resembles(usual) else None
        for shift in found
    )


def refit_shifts(seen: Observations, shifts: Shifts) -> Shifts:
    """Fit changes to other windows, given their times: factors here, exchanges where communication is fitted.

    A factor stays as it is where a side has no window.
    """
    return tuple(None if shift is None else _refit(seen, rank, shift) for rank, shift in enumerate(shifts))


def fit_lines(seen: Observations, shifts: Shifts) -> tuple[ComputeTimeLine, ...]:
    """Fit the line of each rank, as it was before its change."""
    return tuple(
        fit_line(samples, busy_s) for samples, busy_s in zip(seen.samples.T, usual_busy_s(seen, shifts).T, strict=True)
    )


def usual_busy_s(seen: Observations, shifts: Shifts) -> Array64:
    """Return busy times as they would be without changes, windows x ranks; NaN in the window of a change."""
    columns = seen.busy_s.T.copy()
    for rank, shift in enumerate(shifts):
        if shift is not None:
            columns[rank] /= shift.factors(seen)
            columns[rank, shift.is_mixed(seen)] = np.nan
    return columns.T


class _Levels(NamedTuple):
    """A line, and from a window on a multiple of it."""

    split: int
    factor: float
    line: ComputeTimeLine
    logs: Array64
    """Logarithms of times over the line; those after the split are about that of the factor."""
    weights: Array64
    """Below 1 for windows with less to do than half of them: a millisecond more is much there, and says little."""

    @property
    def loss(self) -> float:
        level = np.where(np.arange(len(self.logs)) < self.split, 0.0, math.log(self.factor))
        return float((self.weights * np.abs(self.logs - level)).sum())

    def share(self, index: int) -> float:
        """Share of a window's steps that are after the change, by its compute time."""
        return (math.exp(self.logs[index]) - 1) / (self.factor - 1)


def _find_shift(seen: Observations, rank: int) -> SpeedShift | None:
    samples, busy_s = seen.samples[:, rank], seen.busy_s[:, rank]
    used = np.flatnonzero((samples > 0) & (busy_s > 0))
    if len(used) < 2 * MIN_SIDE:
        return None
    x, y = samples[used], busy_s[used]
    single = _thin_line(x, y)
    levels = min(_trials(x, y, single), key=lambda one: one.loss, default=None)
    if levels is None or levels.loss >= CLEARLY_BETTER * float((levels.weights * np.abs(_logs(single, x, y))).sum()):
        return None
    if max(levels.factor, 1 / levels.factor) < SLOW or not _is_lasting(levels):
        return None
    return SpeedShift(_time_s(seen, rank, used, levels), levels.factor)


def _trials(x: Array64, y: Array64, single: ComputeTimeLine) -> Collection[_Levels]:
    """Fit line, factor and split in turn, beginning with the line of all windows, and of each half of them."""
    half = len(x) // 2
    found: dict[int, _Levels] = {}
    for line in (single, _thin_line(x[:half], y[:half]), _thin_line(x[half:], y[half:])):
        logs = _logs(line, x, y)
        split = _split(logs)
        if abs(np.median(logs[split:]) - np.median(logs[:split])) < math.log(WORTH_A_LOOK):
            continue
        while split not in found:
            found[split] = _fit_levels(x, y, split)
            split = _split(found[split].logs)
    return found.values()


def _thin_line(x: Array64, y: Array64) -> ComputeTimeLine:
    stride = 1 + (len(x) - 1) // MAX_FITTED
    return fit_line(x[::stride], y[::stride])


def _fit_levels(x: Array64, y: Array64, split: int) -> _Levels:
    """Fit line and factor, given the split; the first line is that of the longer side."""
    after = np.arange(len(x)) >= split
    longer = after if 2 * split < len(x) else ~after
    line, factor = _thin_line(x[longer], y[longer]), 1.0
    for _ in range(MAX_ROUNDS):
        logs, before = _logs(line, x, y), factor
        factor = math.exp(_level(logs[after]) - _level(logs[~after]))
        line = _thin_line(x, y / np.where(after, factor, 1.0))
        if abs(factor / before - 1) < SAME_FACTOR:
            break
    times_s = line.time_s(x)
    return _Levels(split, factor, line, _logs(line, x, y), np.minimum(1.0, times_s / np.median(times_s)))


def _refit(seen: Observations, rank: int, shift: SpeedShift) -> SpeedShift:
    samples, busy_s = seen.samples[:, rank], seen.busy_s[:, rank]
    used = (samples > 0) & (busy_s > 0) & ~shift.is_mixed(seen)
    split = int((shift.share(seen)[used] < EDGE).sum())
    if split in (0, int(used.sum())):
        return shift._replace(exchange_s=0.0)
    return SpeedShift(shift.at_s, _fit_levels(samples[used], busy_s[used], split).factor)


def _logs(line: ComputeTimeLine, x: Array64, y: Array64) -> Array64:
    logs: Array64 = np.log(line.slowdown(x, y))
    return logs


def _level(logs: Array64) -> float:
    """Return the mean, without outliers."""
    away = np.abs(logs - np.median(logs))
    return float(logs[away <= max(MIN_OUTLIER, OUTLIER_SIGMAS * MAD_SIGMA * float(np.median(away)))].mean())


def _split(logs: Array64) -> int:
    """Return where two medians leave the least absolute deviations."""

    def loss(split: int) -> float:
        sides = logs[:split], logs[split:]
        return float(sum(np.abs(side - np.median(side)).sum() for side in sides))

    last = len(logs) - MIN_SIDE
    stride = max(1, (last - MIN_SIDE) // MAX_SPLITS)
    best = min(range(MIN_SIDE, last + 1, stride), key=loss)
    return min(range(max(MIN_SIDE, best - stride), min(last, best + stride) + 1), key=loss)


def _is_lasting(levels: _Levels) -> bool:
    """Return whether almost all windows before and after it are at their level, and none for long at the other one."""
    is_slow = levels.logs > math.log(levels.factor) / 2
    slow_after = levels.factor > 1
    for side, astray in (
        (slice(0, levels.split - 1), is_slow == slow_after),
        (slice(levels.split + 1, None), is_slow != slow_after),
    ):
        weights = np.where(astray, levels.weights, 0.0)[side]
        if weights.sum() > MAX_ASTRAY * levels.weights[side].sum() or max(_runs(weights)) > MAX_ASTRAY_RUN:
            return False
    before, after = levels.share(levels.split - 1), levels.share(levels.split)
    is_too_early = levels.split == MIN_SIDE and before > 1 - MIXED
    is_too_late = levels.split == len(levels.logs) - MIN_SIDE and after < MIXED
    return not is_too_early and not is_too_late


def _time_s(seen: Observations, rank: int, used: np.ndarray, levels: _Levels) -> float:
    """Return the training time of the change; within the window that has steps before and after it."""
    before, after = int(used[levels.split - 1]), int(used[levels.split])
    for index, place in ((before, levels.split - 1), (after, levels.split)):
        share = levels.share(place)
        if MIXED < share < 1 - MIXED:
            return _time_within_s(seen, rank, index, levels, share)
    return float(seen.begin_s[before] + seen.duration_s[before] + seen.begin_s[after]) / 2


def _time_within_s(seen: Observations, rank: int, index: int, levels: _Levels, share: float) -> float:
    """Return when the steps before the change ended, of a window with a share of steps after it.

    Those are longer by as much as the slowest rank's compute time is.
    """
    others_s = np.delete(seen.busy_s[index], rank).max(initial=0.0)
    own_s = float(levels.line.time_s(seen.samples[index, rank : rank + 1])[0])
    longer_s = max(others_s, levels.factor * own_s) - max(others_s, own_s)
    step_s = max(0.0, float(seen.step_s[index]) - share * longer_s)
    return float(seen.begin_s[index] + (1 - share) * seen.num_steps[index] * step_s)


def _runs(weights: Array64) -> Iterator[float]:
    """Yield the sum of each run of weights, up to a 0."""
    total = 0.0
    for weight in [*weights.tolist(), 0.0]:
        total += weight
        if not weight:
            yield total
            total = 0.0
