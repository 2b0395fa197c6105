"""Fit the formulas of the virtual clock to the metric windows of a real job, robust to disturbed windows. Pure.

`observe` makes arrays of the windows, `fit_line` fits a rank's compute time, `fit_exposure` the communication, and
`fit_observations` both, with jitter, stragglers and congestion. The formulas are those of `simulator.clock`: a change
there needs a change here.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
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
    """There are too few complete windows for a fit; the message has what is missing and how to get it."""


class Observations(NamedTuple):
    """Complete windows: all ranks reported, with compute and sync times.

    Times are means per step, in seconds; arrays are windows x ranks unless stated otherwise, NaN where unknown.
    """

    window: Array64
    """Number of each window."""
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
    first = [joined[key][0] for key in keys]
    rows = [[_row(rank, node.num_steps) for rank in ranks[key]] for key, node in zip(keys, first, strict=True)]
    columns = np.array(rows, dtype=np.float64)
    seen = Observations(
        window=_per_window(node.window for node in first),
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
MIN_SIDE = 4  # windows near the fit on either side of a saturation
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


# All of them, with jitter, stragglers and congestion.

MIN_DISTURBED = 3  # windows from which a disturbance is fitted
LEAST_SHARE = 0.1  # a smaller share of a window's steps cannot be told from scatter
MAX_JITTER = 1.0
RETRANSMIT_RATIO = 2.0  # congested windows must retransmit more than so many times what others do, where it is counted


class DwellTimes(NamedTuple):
    """A two-state Markov process in continuous time: its factor while on, and the mean time in each state."""

    factor: float
    mean_off_s: float
    mean_on_s: float


class CalibrationFit(NamedTuple):
    """The fitted numbers of one job."""

    lines: tuple[ComputeTimeLine, ...]
    """Fitted lines by rank."""
    jitter: float
    """Sigma of a step's lognormal factor on the compute time, by the scatter of windows of k independent steps."""
    exposure: Exposure | None = None
    """`None` for a single worker, who reduces nothing."""
    stragglers: DwellTimes | None = None
    congestion: DwellTimes | None = None
    retransmits_per_s: float = 0.0
    """Retransmissions per second and rank while the network is congested."""

    def slow(self, seen: Observations) -> Flags:
        """Which rank straggled, windows x ranks; never with next to nothing to do."""
        columns = zip(self.lines, seen.samples.T, seen.busy_s.T, strict=True)
        return np.stack([line.slow(*column) for line, *column in columns], axis=1) & self._is_heavy(seen)

    def slowdown(self, seen: Observations) -> Array64:
        """Measured times over the fitted lines, windows x ranks; 1 for ranks that cannot straggle."""
        columns = zip(self.lines, seen.samples.T, seen.busy_s.T, strict=True)
        slowdowns = np.stack([line.slowdown(*column) for line, *column in columns], axis=1)
        return np.where(self._is_heavy(seen), slowdowns, 1.0)

    def _is_heavy(self, seen: Observations) -> Flags:
        return np.stack([line.is_heavy(seen.samples[:, rank]) for rank, line in enumerate(self.lines)], axis=1)

    def congested(self, seen: Observations) -> Flags:
        """Whether the network was congested, by window."""
        if self.exposure is None:
            return np.zeros(len(seen.step_s), dtype=bool)
        return self.exposure.congested(self.exposed(seen), seen.busy_s.max(axis=1))

    def exposed(self, seen: Observations) -> Array64:
        """Communication time that each window's steps waited for, in seconds per step."""
        return exposed(seen.busy_s, seen.sync_s, self.jitter)


def fit_observations(seen: Observations) -> CalibrationFit:
    """Fit lines, jitter, communication and disturbances, in this order; each uses the results before it."""
    lines = tuple(fit_line(*column) for column in zip(seen.samples.T, seen.busy_s.T, strict=True))
    scatter = float(np.median([line.scatter for line in lines]))  # of windows: sqrt(steps) times less than of steps
    fit = CalibrationFit(lines, min(MAX_JITTER, scatter * math.sqrt(float(np.median(seen.num_steps)))))
    slow = fit.slow(seen)
    if seen.world_size > 1:  # by windows without stragglers, or by all when too few are left
        quiet = slow.sum(axis=1) == 0
        chosen = seen.select(np.flatnonzero(quiet)) if quiet.sum() >= len(quiet) // 3 else seen
        fit = fit._replace(exposure=fit_exposure(fit.exposed(chosen), chosen.busy_s.max(axis=1)))
    fit = fit._replace(stragglers=fit_dwell_times(slow, fit.slowdown(seen), seen.duration_s))
    return _with_congestion(fit, seen)


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
