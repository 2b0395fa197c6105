"""Fit the formulas of the virtual clock to the metric windows of a real job, robust to disturbed windows. Pure.

`observe` makes arrays of the windows, `fit_line` fits a rank's compute time, `find_shifts` finds lasting changes of
speed, `fit_exposure` fits the communication, and `fit_observations` applies all of them in order and adds jitter,
stragglers and congestion. The formulas are those of `simulator.clock`: a change there needs a change here.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamix.schemas.messages import MetricWindow, OptimizerFamily, RankMetrics

Array64 = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

MAD_SIGMA = 1.4826  # standard deviation over median absolute deviation, of a normal distribution
OUTLIER_SIGMAS, MIN_OUTLIER = 4.0, 0.05

# Windows.

MIN_WINDOWS = 8
"""With fewer windows a line cannot be told from scatter."""


class NotEnoughWindowsError(ValueError):
    """Too few complete windows for a fit; the text states what is missing and how to get it."""


class Observations(NamedTuple):
    """Complete windows: all ranks reported, with compute and sync times.

    Times are means per step, in seconds; arrays are windows x ranks unless stated otherwise, NaN where unknown.
    """

    window: Array64
    """Number of each window."""
    begin_s: Array64
    """Training time at the beginning of each window, including windows that were left out."""
    num_steps: Array64
    """Steps in each window."""
    samples: Array64
    """Samples of a rank per step."""
    busy_s: Array64
    """Data, compute and update time: the work of a rank between two barriers; compute time of the virtual clock."""
    sync_s: Array64
    step_s: Array64
    """Mean step time of the job in each window."""
    tx_bytes: Array64
    """Bytes sent by a rank per step."""
    retransmits: Array64
    """Retransmitted segments in the whole window."""
    srtt_us: Array64
    held_out_accuracy: Array64
    """Newest evaluation by the end of each window."""

    @property
    def world_size(self) -> int:
        """Number of ranks, N."""
        return int(self.samples.shape[1])

    @property
    def duration_s(self) -> Array64:
        """Duration of each window, in seconds."""
        return self.num_steps * self.step_s

    def select(self, index: npt.NDArray[np.intp]) -> "Observations":
        """The observations of some windows."""
        return Observations(*(array[index] for array in self))


class Origin(NamedTuple):
    """The source of the observations."""

    optimizer_family: OptimizerFamily
    num_left_out: int
    """Incomplete windows, and the first of each generation: caches and connections are cold in it."""


def observe(windows: Iterable[MetricWindow]) -> tuple[Observations, Origin]:
    """Join the nodes' windows of one job, in order of generation and window.

    Raises:
        NotEnoughWindowsError: when fewer than `MIN_WINDOWS` are complete.
    """
    joined: dict[tuple[int, int], list[MetricWindow]] = defaultdict(list)
    for window in windows:
        joined[window.generation, window.window].append(window)
    ranks = {
        key: sorted((rank for node in nodes for rank in node.ranks), key=lambda rank: rank.rank)
        for key, nodes in joined.items()
    }
    world_size = max(map(len, ranks.values()), default=0)
    keys = [
        key
        for key in sorted(joined)
        if key[1] > 0
        and len(ranks[key]) == world_size
        and joined[key][0].num_steps > 0
        and all(rank.training.sync_time_s is not None for rank in ranks[key])
    ]
    if len(keys) < MIN_WINDOWS:
        raise NotEnoughWindowsError(
            f"{len(keys)} of {len(joined)} windows can be used, {MIN_WINDOWS} are the least: a window needs the "
            "compute and sync times of every rank, which DDP's communication hook measures; let the job run longer"
        )
    begins_s, first = _begins_s(joined), [joined[key][0] for key in keys]
    rows = [[_row(rank, node.num_steps) for rank in ranks[key]] for key, node in zip(keys, first, strict=True)]
    columns = np.array(rows, dtype=np.float64)
    seen = Observations(
        window=_per_window(node.window for node in first),
        begin_s=_per_window(begins_s[key] for key in keys),
        num_steps=_per_window(node.num_steps for node in first),
        samples=columns[:, :, 0],
        busy_s=columns[:, :, 1],
        sync_s=columns[:, :, 2],
        step_s=_per_window(node.job_metrics.step_time_s for node in first),
        tx_bytes=columns[:, :, 3],
        retransmits=columns[:, :, 4],
        srtt_us=columns[:, :, 5],
        held_out_accuracy=_per_window(node.job_metrics.held_out_accuracy for node in first),
    )
    return seen, Origin(first[0].optimizer_family, len(joined) - len(keys))


def _begins_s(joined: Mapping[tuple[int, int], Sequence[MetricWindow]]) -> dict[tuple[int, int], float]:
    """Training times by generation and window; a missing window counts as long as those around it."""
    begins_s: dict[tuple[int, int], float] = {}
    durations_s: dict[int, dict[int, float]] = defaultdict(dict)
    for (generation, number), nodes in sorted(joined.items()):
        durations_s[generation][number] = nodes[0].num_steps * nodes[0].job_metrics.step_time_s
    before_s = 0.0
    for generation, known in durations_s.items():
        ends_s = before_s + np.cumsum(np.interp(np.arange(max(known) + 1), list(known), list(known.values())))
        begins_s |= {(generation, number): float(ends_s[number]) - known[number] for number in known}
        before_s = float(ends_s[-1])
    return begins_s


def _per_window(values: Iterable[float | None]) -> Array64:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _row(rank: RankMetrics, num_steps: int) -> tuple[float, ...]:
    """Samples, busy time, sync time and bytes sent per step, then retransmissions and round trip time."""
    training, network = rank.training, rank.network
    busy_s = training.data_time_s + (training.compute_time_s or 0.0) + training.update_time_s
    traffic = (np.nan, np.nan, np.nan)
    if network is not None:
        srtt_us = np.nan if network.srtt_us is None else network.srtt_us
        traffic = (network.tx_bytes / num_steps, float(network.retransmits), srtt_us)
    return (training.num_samples / num_steps, busy_s, training.sync_time_s or 0.0, *traffic)


# Compute time of a rank: t = overhead + max(samples, saturation) / rate. Windows in which it straggled lie above the
# line, some far above. For a given saturation the start is the line through two windows with the least trimmed absolute
# deviations (breakdown point near one half), then weighted least squares over the windows near the line until these
# stay the same. Saturations are tried on a grid, and one is used only where it explains clearly more than none.

TRUSTED_SHARE = 0.55  # of the windows, nearest first, by which a line is judged: fewer than half may be slow
MAX_PAIRS = 300  # of windows that are tried: all pairs of 25 windows, else a fixed random choice
MAX_ROUNDS = 20
MIN_SPREAD = 1.2
"""Overhead and rate can be told apart only when the largest over the smallest number of samples reaches this."""
MAX_OVERHEAD_ERROR = 0.25  # standard error of the overhead over the median time; above, rate and overhead are not known
SLOW, SLOW_SIGMAS = 1.3, 6.0  # a rank straggles above this slowdown, or so many sigmas of its scatter if that is more
HEAVY = 0.25  # windows with a smaller fitted time, over that of the median window, tell nothing about stragglers
LEAST_SIZED_SHARE = 0.01  # of the longest time grows with the samples at least, so that the rate stays finite
NUM_SATURATIONS = 24  # tried between least and largest samples, then between the best one's neighbours
MIN_SIDE = 4  # windows near the fit on either side of a saturation; also before and after a change of speed
VISIBLE = 0.8  # a saturation, or an overlap, is visible when it leaves less than this share of the loss without it
MAX_SATURATION_ERROR = 0.25  # standard error over the saturation itself; above, it is not known


class ComputeTimeLine(NamedTuple):
    """Compute time of one rank: a line in its samples per step, flat below the saturation."""

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
        """The fitted time for these samples, in seconds."""
        return self.overhead_s + self.s_per_sample * np.maximum(samples, self.saturation)

    def slowdown(self, samples: Array64, busy_s: Array64) -> Array64:
        """The time over its fitted value; 1 for windows without samples."""
        return np.where(samples > 0, busy_s / self.time_s(np.where(samples > 0, samples, 1.0)), 1.0)

    def logs(self, samples: Array64, busy_s: Array64) -> Array64:
        """Logarithm of the slowdown."""
        logs: Array64 = np.log(self.slowdown(samples, busy_s))
        return logs

    def slow(self, samples: Array64, busy_s: Array64) -> Flags:
        """Whether the rank straggled, by window."""
        return self.slowdown(samples, busy_s) > max(SLOW, 1 + SLOW_SIGMAS * self.scatter)

    def is_heavy(self, samples: Array64) -> Flags:
        """Which windows have so many samples that a few milliseconds more are not a multiple of their time."""
        times_s = self.time_s(samples)
        return times_s > HEAVY * np.median(times_s)


class _LineFit(NamedTuple):
    """A fit for a given saturation."""

    saturation: float
    overhead_s: float
    s_per_sample: float
    near: Flags
    distances: Array64
    """|log(time / fitted time)|."""


def fit_line(samples: Array64, busy_s: Array64) -> ComputeTimeLine:
    """Fit overhead, rate and saturation of one rank to its windows; windows without samples are left out.

    Raises:
        ValueError: when no window has a sample.
    """
    used = (samples > 0) & (busy_s > 0)
    if not used.any():
        raise ValueError("a rank had no sample in any window: its speed cannot be known")
    x, y = samples[used], busy_s[used]
    line = None
    if x.max() >= MIN_SPREAD * x.min():
        plain = _line_fit(x, y, 0.0)
        trials = (_saturated(x, y, plain), plain)
        line = next((found for trial in trials if trial and (found := _line(x, y, trial))), None)
    if line is None:  # overhead and rate cannot be told apart: a line through the origin
        near = _near(y / (x * np.median(y / x)) - 1)
        line = ComputeTimeLine(0.0, float(np.mean((y / x)[near])), 0.0, np.nan, np.nan, np.nan, is_distinct=False)
    slowdown = line.slowdown(x, y)
    return line._replace(scatter=robust_std(slowdown[_near(slowdown - 1)]))


def _line(x: Array64, y: Array64, trial: _LineFit) -> ComputeTimeLine | None:
    """The line of a fit with its standard errors; `None` when these are too large to tell its numbers apart."""
    saturation, (near_x, near_y) = trial.saturation, (x[trial.near], y[trial.near])
    floored = np.maximum(near_x, saturation)
    fitted = trial.overhead_s + trial.s_per_sample * floored
    columns = [np.ones(len(near_x)), floored]
    if saturation:
        columns.append(trial.s_per_sample * (near_x < saturation))
    design = np.stack(columns, axis=1) / fitted[:, None]
    variance = float(((near_y / fitted - 1) ** 2).sum()) / max(1, len(near_x) - len(columns))
    errors = [*np.sqrt(np.diag(variance * np.linalg.pinv(design.T @ design))).tolist(), np.nan][:3]
    spread = near_x.max() / max(saturation, near_x.min())
    if spread < MIN_SPREAD or errors[0] > MAX_OVERHEAD_ERROR * np.median(near_y):
        return None
    if saturation and errors[2] > MAX_SATURATION_ERROR * saturation:
        return None
    return ComputeTimeLine(
        trial.overhead_s, trial.s_per_sample, saturation, errors[0], errors[1], errors[2], is_distinct=True
    )


def _saturated(x: Array64, y: Array64, plain: _LineFit) -> _LineFit | None:
    """The fit with the best saturation, or `None` when none explains clearly more than the fit without."""
    grid = np.geomspace(x.min(), x.max(), NUM_SATURATIONS)
    trials = [plain, *(_line_fit(x, y, saturation) for saturation in grid[1:-1].tolist())]
    most = max(MIN_OUTLIER, OUTLIER_SIGMAS * MAD_SIGMA * min(float(np.median(trial.distances)) for trial in trials))

    def losses(distances: Array64) -> Array64:
        """Mean distance of each fit (fits x windows); outliers count `most`."""
        means: Array64 = np.minimum(distances, most).mean(axis=1)
        return means

    best = 1 + int(np.argmin(losses(np.stack([trial.distances for trial in trials[1:]]))))
    near, base = trials[best].near, trials[best]
    fitted = base.overhead_s + base.s_per_sample * np.maximum(x, base.saturation)
    refined = []
    for saturation in np.linspace(grid[best - 1], grid[best + 1], NUM_SATURATIONS).tolist():
        floored = np.maximum(x, saturation)
        overhead, slope = _least_squares(floored[near], y[near], fitted[near])
        distances = np.abs(np.log(y / (overhead + slope * floored)))
        refined.append(_LineFit(saturation, overhead, slope, near, distances))
    found = min(refined, key=lambda one: float((one.distances[near] ** 2).sum()))
    sides = [int((found.near & side).sum()) for side in (x < found.saturation, x > found.saturation)]
    both = np.stack([found.distances, plain.distances])
    with_it, without = losses(both * (both.min(axis=0) < most))  # stragglers are outliers of both
    return found if with_it < VISIBLE * without and min(sides) >= MIN_SIDE else None


def _line_fit(x: Array64, y: Array64, saturation: float) -> _LineFit:
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
    return _LineFit(saturation, overhead, slope, near, np.abs(np.log(y / (overhead + slope * x))))


def _start(x: Array64, y: Array64) -> tuple[float, float]:
    """The line through two windows, or the origin and one, with the least trimmed loss |log(t / line)|."""
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
    """Overhead >= 0 and slope > 0 by least squares, each window divided by its expected time."""
    design = np.stack([1 / fitted, x / fitted], axis=1)
    overhead, slope = np.linalg.lstsq(design, y / fitted, rcond=None)[0]
    if overhead < 0:
        overhead, slope = 0.0, float((x * y / fitted**2).sum() / (x**2 / fitted**2).sum())
    least = LEAST_SIZED_SHARE * float(np.median(y)) / float(x.max())
    if slope < least:
        slope = least
        overhead = max(0.0, float(np.mean(y - slope * x)))
    return float(overhead), float(slope)


def _near(residuals: Array64) -> Flags:
    """Select residuals near zero; the deviation is estimated on the lower side, which has no stragglers."""
    below = residuals[residuals <= 0]
    sigma = MAD_SIGMA * float(np.median(-below)) if len(below) else 0.0
    return np.abs(residuals) <= max(MIN_OUTLIER, OUTLIER_SIGMAS * sigma)


def robust_std(values: Array64) -> float:
    """Standard deviation by the median absolute deviation; 0 for fewer than two values."""
    return MAD_SIGMA * float(np.median(np.abs(values - np.median(values)))) if len(values) > 1 else 0.0


# Communication: exposed = max(C / buckets, C - overlap * slowest compute). For given overlap and buckets each window
# implies C = min(buckets * exposed, exposed + overlap * slowest). C is the median over the windows; overlap and buckets
# come from a grid. Congested windows imply a larger C.

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
OVERLAPS = np.linspace(0.0, 1.0, 51)
START_QUANTILE = 0.4
AGREEING_SHARE = 0.65  # of the windows are fitted, those that agree best: a third may be congested or disturbed
TIE, LEAST_LOSS = 1.02, 1e-4  # fewer buckets are preferred when their loss is within this factor, or below this
NUM_DRAWS = 128  # of jitter, to estimate how long ranks wait for the slowest of them
NUM_ROUNDS = 3
CONGESTED, CONGESTED_SIGMAS = 1.5, 6.0  # a window is congested when C over its usual value is above either limit
LEAST_S = 1e-6  # lower bound of C, so that the bandwidth stays finite


class Exposure(NamedTuple):
    """The fitted communication."""

    communication_s: float
    """C."""
    overlap: float
    num_buckets: int
    is_distinct: bool
    """Whether an overlap was visible; if not, the same part of C may have been hidden in every window."""
    scatter: float
    """Relative scatter of C over the windows."""

    def expected_s(self, slowest_s: Array64) -> Array64:
        """The exposed time that the formula gives for windows with these slowest compute times."""
        return np.maximum(self.communication_s / self.num_buckets, self.communication_s - self.overlap * slowest_s)

    def factor(self, exposed_s: Array64, slowest_s: Array64) -> Array64:
        """C of each window over the fitted C."""
        return _implied(exposed_s, slowest_s, self.num_buckets, self.overlap) / self.communication_s

    def shows_buckets(self, slowest_s: Array64) -> bool:
        """Whether some windows computed for so long that only the last bucket was exposed."""
        return bool((self.communication_s - self.overlap * slowest_s < self.communication_s / self.num_buckets).any())

    def congested(self, exposed_s: Array64, slowest_s: Array64) -> Flags:
        """Whether communication took much longer than usual, by window."""
        return self.factor(exposed_s, slowest_s) > max(CONGESTED, 1 + CONGESTED_SIGMAS * self.scatter)


def exposed(busy_s: Array64, sync_s: Array64, jitter: float) -> Array64:
    """Communication time that each window's steps waited for, in seconds per step.

    The slowest rank of a step waits for no other rank. Over a window each rank may have been the slowest for some
    steps, so the smallest mean sync time still contains waiting. Draws of the jitter estimate that waiting, and it is
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
    waiting = np.zeros(len(busy_s))
    for deviation in np.exp(jitter * draws - jitter**2 / 2) - 1:
        waiting += (busy_s * (1 + deviation)).max(axis=1)
    corrected: Array64 = np.maximum(0.0, least - (waiting / NUM_DRAWS - busy_s.max(axis=1)))
    return corrected


def fit_exposure(exposed_s: Array64, slowest_s: Array64) -> Exposure:
    """Fit C, overlap and buckets to one exposed and one slowest compute time per window.

    The first fit uses the windows that agree best; the second all windows that are not congested by the first fit.
    """
    first = _exposure(exposed_s, slowest_s, AGREEING_SHARE)
    calm = np.logical_not(first.congested(exposed_s, slowest_s))
    return _exposure(exposed_s[calm], slowest_s[calm], 1.0) if calm.sum() >= AGREEING_SHARE * len(calm) else first


def _exposure(exposed_s: Array64, slowest_s: Array64, share: float) -> Exposure:
    found = {
        buckets: min(
            _trial(exposed_s, slowest_s, buckets, float(overlap), share)
            for overlap in (OVERLAPS if buckets > 1 else OVERLAPS[:1])  # one bucket is never hidden
        )
        for buckets in BUCKETS
    }
    least = min(loss for loss, _, _ in found.values())
    is_distinct = least < VISIBLE * found[1][0]
    near = (buckets for buckets, (loss, _, _) in found.items() if loss <= TIE * least + LEAST_LOSS)
    buckets = next(near) if is_distinct else 1
    overlap, communication_s = found[buckets][1], max(LEAST_S, found[buckets][2])
    factors = _implied(exposed_s, slowest_s, buckets, overlap) / communication_s
    return Exposure(communication_s, overlap, buckets, is_distinct, robust_std(factors))


def _implied(exposed_s: Array64, slowest_s: Array64, buckets: int, overlap: float) -> Array64:
    """C of each window, given overlap and buckets."""
    return np.minimum(buckets * exposed_s, exposed_s + overlap * slowest_s)


def _trial(
    exposed_s: Array64, slowest_s: Array64, buckets: int, overlap: float, share: float
) -> tuple[float, float, float]:
    """Mean relative error of the step time over the windows that agree best, the overlap, and C for them."""
    implied = _implied(exposed_s, slowest_s, buckets, overlap)
    trusted = max(2, round(share * len(implied)))
    communication_s = float(np.quantile(implied, START_QUANTILE))
    for _ in range(NUM_ROUNDS):
        fitted = np.maximum(communication_s / buckets, communication_s - overlap * slowest_s)
        errors = np.abs(exposed_s - fitted) / (slowest_s + exposed_s)
        order = np.argsort(errors, kind="stable")[:trusted]
        communication_s = float(np.median(implied[order]))
    return float(errors[order].mean()), overlap, communication_s


# Lasting changes of a rank's speed. The windows of each rank are split in two where levels before and after leave the
# least absolute deviations from its line; line, factor and split are fitted in turn, from three starts. A split counts
# when it is clearly better than a single line, when almost no window is on the wrong side of the middle between both
# levels, and when the slow stretch is no straggler's: much longer than any time for which a rank was slow and came
# back, and by another factor.

MIN_SHARE = 0.15  # of the training time that a rank is slow at least, before or after
SPELLS = 3.0  # times the longest time that a rank was slow and came back
OTHER_FACTOR = 1.15  # stragglers and a change have other factors when one over the other is above this
MAX_FITTED = 150  # windows to which a line is fitted while changes are looked for: time grows by their square
WORTH_A_LOOK = 1.15  # a factor below this, at first, is not looked at again
CLEARLY_BETTER = 0.5  # deviations from two levels, over those from one line, must be below this
MAX_ASTRAY, MAX_ASTRAY_RUN = 0.15, 2  # share of a side's windows nearer to the other level, and how many in a row
MAX_SPLITS = 200  # that are tried at first; then those around the best one
MAX_REFITS, SAME_FACTOR = 6, 0.005  # of line and factor, until the factor changes by less
MIN_SLOW = 3  # windows from which the stragglers' factor is known
MIXED = 0.15  # a window has steps of both kinds when the share of either, by its compute time, is above this
EDGE = 1e-9


class SpeedShift(NamedTuple):
    """A lasting change of one rank's speed."""

    at_s: float
    """Training time."""
    factor: float
    """Compute time after it, over that before."""
    exchange_s: float = 0.0
    """Added to the exchange of gradients after it."""

    def share(self, seen: Observations) -> Array64:
        """Share of each window's time that is after the change."""
        share: Array64 = np.clip((seen.begin_s + seen.duration_s - self.at_s) / seen.duration_s, 0.0, 1.0)
        return share

    def factors(self, seen: Observations) -> Array64:
        """Mean factor on the compute time of each window."""
        return 1 + (self.factor - 1) * self.share(seen)

    def is_mixed(self, seen: Observations) -> Flags:
        """Which windows have steps before and after it."""
        share = self.share(seen)
        return (share > EDGE) & (share < 1 - EDGE)

    def slow_s(self, seen: Observations) -> float:
        """For how long the rank was slow."""
        after = self.share(seen)
        return float((seen.duration_s * (after if self.factor > 1 else 1 - after)).sum())


Shifts = tuple[SpeedShift | None, ...]
"""By rank; `None` where nothing changed."""


def find_shifts(seen: Observations) -> Shifts:
    """The change of each rank; one at most."""
    found = tuple(_find_shift(seen, rank) for rank in range(seen.world_size))
    if not any(found):
        return found
    lines, busy_s = _fit_lines(seen, found), _usual_busy_s(seen, found)
    longest_s, factors = 0.0, []
    for rank, line in enumerate(lines):
        slow = line.slow(seen.samples[:, rank], busy_s[:, rank]) & line.is_heavy(seen.samples[:, rank])
        back = slow & (np.cumsum(~slow[::-1])[::-1] > 0)
        longest_s = max(longest_s, *_runs(np.where(back, seen.duration_s, 0.0)))
        factors += line.slowdown(seen.samples[:, rank], busy_s[:, rank])[back].tolist()
    least_s = max(MIN_SHARE * float(seen.duration_s.sum()), SPELLS * longest_s)
    usual = float(np.median(factors)) if len(factors) >= MIN_SLOW else math.inf

    def is_straggler(shift: SpeedShift) -> bool:
        return abs(abs(math.log(shift.factor)) - math.log(usual)) < math.log(OTHER_FACTOR)

    return tuple(
        shift if shift is not None and shift.slow_s(seen) >= least_s and not is_straggler(shift) else None
        for shift in found
    )


def _fit_lines(seen: Observations, shifts: Shifts) -> tuple[ComputeTimeLine, ...]:
    """The line of each rank, as it was before its change."""
    columns = zip(seen.samples.T, _usual_busy_s(seen, shifts).T, strict=True)
    return tuple(fit_line(samples, busy_s) for samples, busy_s in columns)


def _usual_busy_s(seen: Observations, shifts: Shifts) -> Array64:
    """Busy times as they would be without changes, windows x ranks; NaN in the window of a change."""
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
    """Below 1 for windows with less to do than half of them: a millisecond more is much there, and tells little."""

    @property
    def loss(self) -> float:
        level = np.where(np.arange(len(self.logs)) < self.split, 0.0, math.log(self.factor))
        return float((self.weights * np.abs(self.logs - level)).sum())

    def share(self, index: int) -> float:
        """Share of a window's steps that are after the change, by its compute time."""
        return (math.exp(self.logs[index]) - 1) / (self.factor - 1)

    @property
    def is_lasting(self) -> bool:
        """Whether almost all windows before and after it are at their level, and none for long at the other one."""
        is_slow, slow_after = self.logs > math.log(self.factor) / 2, self.factor > 1
        for side, astray in (
            (slice(0, self.split - 1), is_slow == slow_after),
            (slice(self.split + 1, None), is_slow != slow_after),
        ):
            weights = np.where(astray, self.weights, 0.0)[side]
            if weights.sum() > MAX_ASTRAY * self.weights[side].sum() or max(_runs(weights)) > MAX_ASTRAY_RUN:
                return False
        is_too_early = self.split == MIN_SIDE and self.share(self.split - 1) > 1 - MIXED
        is_too_late = self.split == len(self.logs) - MIN_SIDE and self.share(self.split) < MIXED
        return not is_too_early and not is_too_late


def _find_shift(seen: Observations, rank: int) -> SpeedShift | None:
    samples, busy_s = seen.samples[:, rank], seen.busy_s[:, rank]
    used = np.flatnonzero((samples > 0) & (busy_s > 0))
    if len(used) < 2 * MIN_SIDE:
        return None
    x, y = samples[used], busy_s[used]
    single = _thin_line(x, y)
    levels = min(_trials(x, y, single), key=lambda one: one.loss, default=None)
    if levels is None or levels.loss >= CLEARLY_BETTER * float((levels.weights * np.abs(single.logs(x, y))).sum()):
        return None
    if max(levels.factor, 1 / levels.factor) < SLOW or not levels.is_lasting:
        return None
    return SpeedShift(_time_of(seen, rank, used, levels), levels.factor)


def _trials(x: Array64, y: Array64, single: ComputeTimeLine) -> Collection[_Levels]:
    """Fit line, factor and split in turn, beginning with the line of all windows, and of each half of them."""
    half = len(x) // 2
    found: dict[int, _Levels] = {}
    for line in (single, _thin_line(x[:half], y[:half]), _thin_line(x[half:], y[half:])):
        logs = line.logs(x, y)
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

    def level(logs: Array64) -> float:
        """The mean without outliers."""
        away = np.abs(logs - np.median(logs))
        return float(logs[away <= max(MIN_OUTLIER, OUTLIER_SIGMAS * MAD_SIGMA * float(np.median(away)))].mean())

    after = np.arange(len(x)) >= split
    longer = after if 2 * split < len(x) else ~after
    line, factor = _thin_line(x[longer], y[longer]), 1.0
    for _ in range(MAX_REFITS):
        logs, before = line.logs(x, y), factor
        factor = math.exp(level(logs[after]) - level(logs[~after]))
        line = _thin_line(x, y / np.where(after, factor, 1.0))
        if abs(factor / before - 1) < SAME_FACTOR:
            break
    times_s = line.time_s(x)
    return _Levels(split, factor, line, line.logs(x, y), np.minimum(1.0, times_s / np.median(times_s)))


def _refit(seen: Observations, rank: int, shift: SpeedShift) -> SpeedShift:
    """Fit the factor to other windows, given the time; it stays as it is where a side has no window."""
    samples, busy_s = seen.samples[:, rank], seen.busy_s[:, rank]
    used = (samples > 0) & (busy_s > 0) & ~shift.is_mixed(seen)
    split = int((shift.share(seen)[used] < EDGE).sum())
    if split in (0, int(used.sum())):
        return shift._replace(exchange_s=0.0)
    return SpeedShift(shift.at_s, _fit_levels(samples[used], busy_s[used], split).factor)


def _split(logs: Array64) -> int:
    """Where two medians leave the least absolute deviations."""

    def loss(split: int) -> float:
        sides = logs[:split], logs[split:]
        return float(sum(np.abs(side - np.median(side)).sum() for side in sides))

    last = len(logs) - MIN_SIDE
    stride = max(1, (last - MIN_SIDE) // MAX_SPLITS)
    best = min(range(MIN_SIDE, last + 1, stride), key=loss)
    return min(range(max(MIN_SIDE, best - stride), min(last, best + stride) + 1), key=loss)


def _time_of(seen: Observations, rank: int, used: np.ndarray, levels: _Levels) -> float:
    """Training time of the change; within the window that has steps before and after it, if there is one.

    The steps after the change are longer by as much as the slowest rank's compute time is.
    """
    before, after = int(used[levels.split - 1]), int(used[levels.split])
    for index, share in ((before, levels.share(levels.split - 1)), (after, levels.share(levels.split))):
        if MIXED < share < 1 - MIXED:
            others_s = np.delete(seen.busy_s[index], rank).max(initial=0.0)
            own_s = float(levels.line.time_s(seen.samples[index, rank : rank + 1])[0])
            longer_s = max(others_s, levels.factor * own_s) - max(others_s, own_s)
            step_s = max(0.0, float(seen.step_s[index]) - share * longer_s)
            return float(seen.begin_s[index] + (1 - share) * seen.num_steps[index] * step_s)
    return float(seen.begin_s[before] + seen.duration_s[before] + seen.begin_s[after]) / 2


def _runs(weights: Array64) -> Iterator[float]:
    """The sum of each run of weights, up to a 0."""
    total = 0.0
    for weight in [*weights.tolist(), 0.0]:
        total += weight
        if not weight:
            yield total
            total = 0.0


# All of them, with jitter, stragglers and congestion.

MIN_DISTURBED = 3  # windows from which a disturbance is fitted
LEAST_SHARE = 0.1  # a smaller share of a window's steps cannot be told from scatter
MAX_JITTER = 1.0
RETRANSMIT_RATIO = 2.0  # congested windows must retransmit more than so many times what others do, where it is counted
MIN_CALM_WINDOWS = 6  # communication is fitted to the windows before any change of speed when there are so many
CLEARLY_LONGER = 0.25  # exchanges take longer after a change when the time that they add, over C, is above this


class DwellTimes(NamedTuple):
    """A two-state Markov process in continuous time: its factor while on, and the mean time in each state."""

    factor: float
    mean_off_s: float
    mean_on_s: float


class CalibrationFit(NamedTuple):
    """The fitted numbers of one job."""

    lines: tuple[ComputeTimeLine, ...]
    """By rank."""
    jitter: float
    """Sigma of a step's lognormal factor on the compute time, by the scatter of windows of k independent steps."""
    shifts: Shifts
    """By rank, the lasting change of its speed; the lines are those before it."""
    exposure: Exposure | None = None
    """`None` for a single worker, who reduces nothing."""
    stragglers: DwellTimes | None = None
    congestion: DwellTimes | None = None
    retransmits_per_s: float = 0.0
    """Retransmissions per second and rank while the network is congested."""

    def slow(self, seen: Observations) -> Flags:
        """Which rank straggled, windows x ranks; never with next to nothing to do, or while its speed changed."""
        busy_s = _usual_busy_s(seen, self.shifts)
        columns = [line.slow(seen.samples[:, rank], busy_s[:, rank]) for rank, line in enumerate(self.lines)]
        return np.stack(columns, axis=1) & self._is_heavy(seen)

    def slowdown(self, seen: Observations) -> Array64:
        """Times over the lines without changes, windows x ranks; 1 where a rank cannot straggle."""
        busy_s = _usual_busy_s(seen, self.shifts)
        columns = [line.slowdown(seen.samples[:, rank], busy_s[:, rank]) for rank, line in enumerate(self.lines)]
        return np.where(self._is_heavy(seen), np.nan_to_num(np.stack(columns, axis=1), nan=1.0), 1.0)

    def _is_heavy(self, seen: Observations) -> Flags:
        return np.stack([line.is_heavy(seen.samples[:, rank]) for rank, line in enumerate(self.lines)], axis=1)

    def factors(self, seen: Observations) -> Array64:
        """Factors of lasting changes on compute times, windows x ranks."""
        ones = np.ones(len(seen.step_s))
        return np.stack([ones if shift is None else shift.factors(seen) for shift in self.shifts], axis=1)

    def added_exchange_s(self, seen: Observations) -> Array64:
        """Time that lasting changes added to the exchanges of each window."""
        added_s = np.zeros(len(seen.step_s))
        for shift in self.shifts:
            if shift is not None:
                added_s = np.maximum(added_s, shift.exchange_s * shift.share(seen))
        return added_s

    def congested(self, seen: Observations) -> Flags:
        """Whether the network was congested, by window."""
        if self.exposure is None:
            return np.zeros(len(seen.step_s), dtype=bool)
        return self.exposure.congested(self.exposed(seen), seen.busy_s.max(axis=1))

    def exposed(self, seen: Observations) -> Array64:
        """Communication time that each window's steps waited for, in seconds per step, without changes."""
        exposed_s = exposed(seen.busy_s, seen.sync_s, self.jitter)
        return np.maximum(0.0, exposed_s - self.added_exchange_s(seen)) if any(self.shifts) else exposed_s


def fit_observations(seen: Observations, shifts: Shifts | None = None) -> CalibrationFit:
    """Fit lines, jitter, communication and disturbances, in this order; each uses the results before it.

    `shifts` are changes of speed found in other windows of the same job: their times are used as given.
    """
    if shifts is None:
        shifts = find_shifts(seen)
    else:
        shifts = tuple(None if shift is None else _refit(seen, rank, shift) for rank, shift in enumerate(shifts))
    lines = _fit_lines(seen, shifts)
    scatter = float(np.median([line.scatter for line in lines]))  # of windows: sqrt(steps) times less than of steps
    fit = CalibrationFit(lines, min(MAX_JITTER, scatter * math.sqrt(float(np.median(seen.num_steps)))), shifts)
    slow = fit.slow(seen)
    if seen.world_size > 1:  # by windows without stragglers, or by all when too few are left
        quiet = slow.sum(axis=1) == 0
        chosen = seen.select(np.flatnonzero(quiet)) if quiet.sum() >= len(quiet) // 3 else seen
        fit = _with_exposure(fit, chosen)
    fit = fit._replace(stragglers=fit_dwell_times(slow, fit.slowdown(seen), seen.duration_s))
    return _with_congestion(fit, seen)


def _with_exposure(fit: CalibrationFit, chosen: Observations) -> CalibrationFit:
    """Add communication, by the windows before any change where these are enough, and what each change added to it."""
    slowest_s, exposed_s = chosen.busy_s.max(axis=1), fit.exposed(chosen)
    exposure = fit_exposure(exposed_s, slowest_s)
    before = (fit.factors(chosen) == 1).all(axis=1)
    times_s = sorted(shift.at_s for shift in fit.shifts if shift is not None)
    for _ in range(2):  # with all windows; and, if changes have made exchanges longer, with those before
        more_s = exposed_s - exposure.expected_s(slowest_s)
        if before.any():
            more_s = more_s - np.median(more_s[before])
        shifts = list(fit.shifts)
        for rank, shift in enumerate(fit.shifts):
            if shift is not None:  # by the windows up to the next change
                until_s = next((time_s for time_s in times_s if time_s > shift.at_s), np.inf)
                during = (chosen.begin_s >= shift.at_s) & (chosen.begin_s + chosen.duration_s <= until_s)
                added_s = float(np.median(more_s[during])) if during.sum() >= MIN_DISTURBED else 0.0
                is_clear = added_s > CLEARLY_LONGER * exposure.communication_s
                shifts[rank] = shift._replace(exchange_s=added_s if is_clear else 0.0)
        if before.sum() < MIN_CALM_WINDOWS or not any(shift.exchange_s for shift in shifts if shift is not None):
            break
        exposure = fit_exposure(exposed_s[before], slowest_s[before])
        fit = fit._replace(shifts=tuple(shifts))
    return fit._replace(exposure=exposure)


def _with_congestion(fit: CalibrationFit, seen: Observations) -> CalibrationFit:
    """Add congestion by the exposed communication, unless the retransmissions contradict it."""
    congested = fit.congested(seen)
    if fit.exposure is None or congested.sum() < MIN_DISTURBED or congested.all():
        return fit
    rates = seen.retransmits / seen.duration_s[:, None]
    known = [part[np.isfinite(part)] for part in (rates[congested], rates[~congested])]
    during, calm = (float(part.mean()) if len(part) else None for part in known)
    if during is not None and calm is not None and during <= RETRANSMIT_RATIO * calm:
        return fit
    factors = fit.exposure.factor(fit.exposed(seen), seen.busy_s.max(axis=1))
    found = fit_dwell_times(congested[:, None], factors[:, None], seen.duration_s)
    return fit._replace(congestion=found, retransmits_per_s=max(0.0, (during or 0.0) - (calm or 0.0)))


def fit_dwell_times(on: Flags, factors: Array64, duration_s: Array64) -> DwellTimes | None:
    """Fit a disturbance to some series; `None` when too few windows show it.

    The mean dwell time is the time spent in a state divided by the number of times it was left. This is the
    maximum-likelihood estimate when the recording cuts off the last dwell time. A window in which the state changes
    counts by its mean factor: it is beside one that is on. Elsewhere a factor is scatter, which in many windows would
    add up to much. Dwell times shorter than a window are invisible.

    `on` (whether the disturbance was on) and `factors` (its factors on times) are windows x series.
    """
    if on.sum() < MIN_DISTURBED:
        return None
    left, entered = on[:-1] & ~on[1:], ~on[:-1] & on[1:]
    inner = np.zeros_like(on)  # windows between two that are also on: a window of a change has undisturbed steps, too
    inner[1:-1] = on[:-2] & on[1:-1] & on[2:]
    factor = float(np.median(factors[inner if inner.any() else on]))
    share = np.clip((factors - 1) / (factor - 1), 0, 1)
    beside = on.copy()
    beside[:-1] |= on[1:]
    beside[1:] |= on[:-1]
    share[(share < LEAST_SHARE) | ~beside] = 0.0
    on_s = float((share * duration_s[:, None]).sum())
    off_s = float(((1 - share) * duration_s[:, None]).sum())
    return DwellTimes(factor, off_s / max(1, int(entered.sum())), on_s / max(1, int(left.sum())))
