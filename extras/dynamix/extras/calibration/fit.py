"""Fit the formulas of the virtual clock to the metric windows of a real job: a scenario, and its errors. Pure.

The formulas are those of `simulator.clock`: a change there needs a change here. All fits are robust: a third of the
windows may be disturbed by stragglers or congestion, which are fitted last, by the windows that do not agree.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from scipy.optimize import least_squares
from scipy.stats import siegelslopes

from dynamix.lab.simulator.clock import Conditions, Flags, VirtualClock, sent_bytes
from dynamix.lab.simulator.exchange import Array64
from dynamix.lab.simulator.scenario import (
    BYTES_PER_MBIT,
    Congestion,
    DecisionCost,
    Network,
    Scenario,
    Stragglers,
    Workers,
)
from dynamix.lab.workloads import workload_named
from dynamix.schemas.messages import Job, MetricWindow, RankMetrics
from dynamix.schemas.messages.allocation import EXACT

MAD_SIGMA = 1.4826  # standard deviation over median absolute deviation, of a normal distribution
OUTLIER, OUTLIER_SIGMAS = 0.05, 4.0
VISIBLE = 0.9  # a saturation, or an overlap, is visible when it leaves less than this share of the loss without it


def robust_std(values: Array64) -> float:
    """Standard deviation by the median absolute deviation; 0 for fewer than two values."""
    return MAD_SIGMA * float(np.median(np.abs(values - np.median(values)))) if len(values) > 1 else 0.0


# --- windows

MIN_WINDOWS = 8
"""With fewer windows a line cannot be told from scatter."""


class Observations(NamedTuple):
    """Complete windows: all ranks reported, with compute and sync times.

    Times are means per step, in seconds; arrays are windows x ranks unless stated otherwise, NaN where unknown.
    """

    window: Array64
    """Number of each window."""
    num_steps: Array64
    """Steps in each window."""
    step_s: Array64
    """Mean step time of the job in each window."""
    held_out_accuracy: Array64
    """Newest evaluation by the end of each window."""
    samples: Array64
    """Samples of a rank per step."""
    busy_s: Array64
    """Data, compute and update time: the work of a rank between two barriers; compute time of the virtual clock."""
    sync_s: Array64
    tx_bytes: Array64
    """Bytes sent by a rank per step."""
    retransmits: Array64
    """Retransmitted segments in the whole window."""
    srtt_us: Array64

    @property
    def duration_s(self) -> Array64:
        """Duration of each window, in seconds."""
        return self.num_steps * self.step_s

    def select(self, index: slice | Flags) -> "Observations":
        """The observations of some windows."""
        return Observations(*(array[index] for array in self))


def observe(windows: Iterable[MetricWindow]) -> tuple[Observations, int]:
    """Join the nodes' windows of one job, in order of generation and window; also returns how many were left out.

    Left out are incomplete windows, and the first of each generation: caches and connections are cold in it.

    Raises:
        ValueError: when fewer than `MIN_WINDOWS` are complete.
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
        raise ValueError(
            f"{len(keys)} of {len(joined)} windows can be used, {MIN_WINDOWS} are the least: a window needs the "
            "compute and sync times of every rank, which DDP's communication hook measures; let the job run longer"
        )

    def row(rank: RankMetrics, num_steps: int) -> tuple[float | None, ...]:
        training, network = rank.training, rank.network
        busy_s = training.data_time_s + (training.compute_time_s or 0.0) + training.update_time_s
        traffic: tuple[float | None, ...] = (None, None, None)
        if network is not None:
            traffic = (network.tx_bytes / num_steps, network.retransmits, network.srtt_us)
        return (training.num_samples / num_steps, busy_s, training.sync_time_s, *traffic)

    first = [joined[key][0] for key in keys]
    of_job = [
        (node.window, node.num_steps, node.job_metrics.step_time_s, node.job_metrics.held_out_accuracy)
        for node in first
    ]
    of_ranks = [[row(rank, node.num_steps) for rank in ranks[key]] for key, node in zip(keys, first, strict=True)]
    columns = (*np.array(of_job, dtype=np.float64).T, *np.moveaxis(np.array(of_ranks, dtype=np.float64), 2, 0))
    return Observations(*columns), len(joined) - len(keys)


# --- compute time of a rank: t = overhead + max(samples, saturation) / rate

MIN_SPREAD = 1.2
"""Overhead and rate can be told apart only when the largest over the smallest number of samples reaches this."""
MAX_OVERHEAD_ERROR = 0.25  # standard error of the overhead over the median time; above, rate and overhead are not known
MAX_SATURATION_ERROR = 0.25  # standard error over the saturation itself; above, it is not known
SLOW, SLOW_SIGMAS = 1.3, 6.0  # a rank straggles above this slowdown, or so many sigmas of its scatter if that is more
HEAVY = 0.25  # windows with a smaller fitted time, over that of the median window, tell nothing about stragglers
LEAST_SIZED_SHARE = 0.01  # of the longest time grows with the samples at least, so that the rate stays finite
SATURATIONS = np.linspace(0.1, 0.9, 5)  # quantiles of the samples from which fits of the saturation start
MIN_SIDE = 4  # windows near the fit on either side of a saturation
MAX_START = 300  # windows of which the start is made, whose cost grows with their square


class RankSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Compute time of a rank: a line in its samples per step, flat below the saturation; with standard errors."""

    samples_per_s: float
    samples_per_s_error: float | None = None
    """`None`, as `overhead_error_s`, where the sizes did not vary enough to tell the two apart: no overhead then."""
    overhead_s: float = 0.0
    overhead_error_s: float | None = None
    saturation: float = 0.0
    """Samples below which a batch costs no less; 0 where that was not visible."""
    saturation_error: float | None = None
    scatter: float = 0.0
    """Relative standard deviation of the time over undisturbed windows."""

    def time_s(self, samples: Array64) -> Array64:
        """The fitted time for these samples, in seconds."""
        return self.overhead_s + np.maximum(samples, self.saturation) / self.samples_per_s


def fit_rank(samples: Array64, busy_s: Array64) -> RankSpeed:
    """Fit overhead, rate and saturation of one rank to its windows; windows without samples are left out.

    Raises:
        ValueError: when no window has a sample.
    """
    used = (samples > 0) & (busy_s > 0)
    if not used.any():
        raise ValueError("a rank had no sample in any window: its speed cannot be known")
    x, y = samples[used], busy_s[used]
    speed = None
    if x.max() >= MIN_SPREAD * x.min():
        plain = _line(x, y, 0.0)
        if starts := [start for start in np.quantile(x, SATURATIONS).tolist() if start < x.max()]:
            saturated = min((_line(x, y, start) for start in starts), key=lambda fit: fit.cost)
            sides = [(_near(-saturated.fun) & side).sum() for side in (x < saturated.x[2], x > saturated.x[2])]
            if saturated.cost < VISIBLE * plain.cost and min(sides) >= MIN_SIDE:
                speed = _speed(x, y, saturated)
        speed = speed or _speed(x, y, plain)
    if speed is None:  # overhead and rate cannot be told apart: a line through the origin
        speed = RankSpeed(samples_per_s=float(np.median(x / y)))
    slowdown = y / speed.time_s(x)
    return msgspec.structs.replace(speed, scatter=robust_std(slowdown[_near(slowdown - 1)]))


def _line(x: Array64, y: Array64, saturation: float) -> Any:
    """Robust least squares of log times; the saturation is fitted from this one on, or stays 0.

    Cauchy's loss leaves a straggler of factor 1.3 a fiftieth of the weight of a window on the line. The start is the
    line of repeated medians, with a breakdown point of one half.
    """

    def log_errors(numbers: Array64) -> Array64:
        found: Array64 = np.log((numbers[0] + numbers[1] * np.maximum(x, [*numbers, 0.0][2])) / y)
        return found

    some = np.argsort(x)[np.linspace(0, len(x) - 1, min(len(x), MAX_START)).astype(int)]  # with least and most samples
    slope, overhead = siegelslopes(y[some], np.maximum(x, saturation)[some])
    least = LEAST_SIZED_SHARE * float(np.median(y) / x.max())
    numbers = 3 if saturation else 2
    low = np.array([0.0, least, x.min()])[:numbers]
    high = np.array([y.max(), y.max() / x.min(), x.max()])[:numbers]
    return least_squares(
        log_errors,
        np.clip(np.array([overhead, slope, saturation])[:numbers], low, high),
        bounds=(low, high),
        x_scale=high,
        loss="cauchy",
        f_scale=OUTLIER,
    )


def _speed(x: Array64, y: Array64, fit: Any) -> RankSpeed | None:
    """The numbers of a fit; `None` when their standard errors are too large to tell them apart."""
    overhead, slope, saturation = [*fit.x.tolist(), 0.0][:3]
    near = _near(-fit.fun)
    deviations = (robust_std(fit.fun[near]) * np.sqrt(np.diag(np.linalg.pinv(fit.jac.T @ fit.jac)))).tolist()
    spread = x[near].max() / max(saturation, x[near].min())
    if spread < MIN_SPREAD or deviations[0] > MAX_OVERHEAD_ERROR * np.median(y[near]):
        return None
    if saturation and deviations[2] > MAX_SATURATION_ERROR * saturation:
        return None
    return RankSpeed(
        samples_per_s=1 / slope,
        samples_per_s_error=deviations[1] / slope**2,
        overhead_s=overhead,
        overhead_error_s=deviations[0],
        saturation=saturation,
        saturation_error=deviations[2] if saturation else None,
    )


def _near(residuals: Array64) -> Flags:
    """Select residuals near zero; the deviation is estimated on the lower side, which has no stragglers."""
    below = residuals[residuals <= 0]
    sigma = MAD_SIGMA * float(np.median(-below)) if len(below) else 0.0
    return np.abs(residuals) <= max(OUTLIER, OUTLIER_SIGMAS * sigma)


# --- communication: exposed = max(C / buckets, C - overlap * slowest compute). For given overlap and buckets a window
# implies C = min(buckets * exposed, exposed + overlap * slowest). Congested windows imply a larger C.

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
START_QUANTILE = 0.4
EXPOSED_OUTLIER = 0.02  # of the step time
TIE = 1.02  # fewer buckets are preferred when their loss is within this factor
NUM_DRAWS = 128  # of jitter: of how long ranks wait for the slowest of them, and the mean step time of a window
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
    scatter: float = 0.0
    """Relative scatter of C over the windows."""

    def factor(self, exposed_s: Array64, slowest_s: Array64) -> Array64:
        """C of each window over the fitted C."""
        implied_s = np.minimum(self.num_buckets * exposed_s, exposed_s + self.overlap * slowest_s)
        return implied_s / self.communication_s

    @property
    def congested_factor(self) -> float:
        """The factor above which a window is congested."""
        return max(CONGESTED, 1 + CONGESTED_SIGMAS * self.scatter)


def exposed(seen: Observations, jitter: float) -> Array64:
    """Communication time that each window's steps waited for, in seconds per step.

    The slowest rank of a step waits for no other rank. Over a window each rank may have been the slowest for some
    steps, so the smallest mean sync time still contains waiting. Draws of the jitter estimate that waiting, and it is
    subtracted.
    """
    least: Array64 = seen.sync_s.min(axis=1)
    if jitter == 0 or seen.busy_s.shape[1] == 1:
        return least
    draws = np.random.default_rng(0).standard_normal((NUM_DRAWS, 1, seen.busy_s.shape[1]))
    slowest = [(seen.busy_s * factor).max(axis=1) for factor in np.exp(jitter * draws - jitter**2 / 2)]
    waiting = np.mean(slowest, axis=0) - seen.busy_s.max(axis=1)
    corrected: Array64 = np.maximum(0.0, least - waiting)
    return corrected


def fit_exposure(exposed_s: Array64, slowest_s: Array64) -> Exposure:
    """Fit C, overlap and buckets to one exposed and one slowest compute time per window."""

    def trial(buckets: int) -> Any:
        """The fit of C and overlap by relative errors of the step time."""

        def errors(numbers: Array64) -> Array64:
            fitted = np.maximum(numbers[0] / buckets, numbers[0] - numbers[1] * slowest_s)
            relative: Array64 = (fitted - exposed_s) / (slowest_s + exposed_s)
            return relative

        implied_s = np.minimum(buckets * exposed_s, exposed_s + 0.5 * slowest_s)
        start = max(LEAST_S, float(np.quantile(implied_s, START_QUANTILE)))
        return least_squares(
            errors,
            (start, 0.5),
            bounds=((LEAST_S, 0.0), (np.inf, 1.0)),
            x_scale=(start, 1.0),
            loss="cauchy",
            f_scale=EXPOSED_OUTLIER,
        )

    found = {buckets: trial(buckets) for buckets in BUCKETS}
    least = min(fit.cost for fit in found.values())
    buckets = next(buckets for buckets, fit in found.items() if fit.cost <= TIE * least)
    is_distinct = found[buckets].cost < VISIBLE * found[1].cost
    if not is_distinct:
        buckets = 1
    communication_s, overlap = found[buckets].x.tolist() if buckets > 1 else (float(found[1].x[0]), 0.0)
    fit = Exposure(communication_s, overlap, buckets, is_distinct)
    return fit._replace(scatter=robust_std(fit.factor(exposed_s, slowest_s)))


# --- all of them, with jitter, stragglers and congestion

MIN_DISTURBED = 3  # windows from which a disturbance is fitted
MAX_JITTER = 1.0
RETRANSMIT_RATIO = 2.0  # congested windows must retransmit more than so many times what others do, where it is counted


class DwellTimes(NamedTuple):
    """A two-state Markov process in continuous time: its factor while on, and the mean time in each state."""

    factor: float
    mean_off_s: float
    mean_on_s: float


class Fit(NamedTuple):
    """The fitted numbers of one job."""

    ranks: tuple[RankSpeed, ...]
    jitter: float
    """Sigma of a step's lognormal factor on the compute time, by the scatter of windows of k independent steps."""
    stragglers: DwellTimes | None
    exposure: Exposure | None = None
    """`None` for a single worker, who reduces nothing."""
    congestion: DwellTimes | None = None
    retransmits_per_s: float = 0.0
    """Retransmissions per second and rank while the network is congested."""


def slowdowns(ranks: Sequence[RankSpeed], seen: Observations) -> tuple[Array64, Flags]:
    """Measured times over the fitted ones, and which of them are of a straggler; windows x ranks.

    They are 1 in windows with so few samples that a few milliseconds more are a multiple of their time.
    """
    times_s = np.stack([rank.time_s(column) for rank, column in zip(ranks, seen.samples.T, strict=True)], axis=1)
    is_heavy = (seen.samples > 0) & (times_s > HEAVY * np.median(times_s, axis=0))
    found = np.where(is_heavy, seen.busy_s / times_s, 1.0)
    return found, found > np.maximum(SLOW, 1 + SLOW_SIGMAS * np.array([rank.scatter for rank in ranks]))


def fit_observations(seen: Observations) -> Fit:
    """Fit lines, jitter, stragglers, communication and congestion, in this order; each uses the results before it."""
    ranks = tuple(fit_rank(*column) for column in zip(seen.samples.T, seen.busy_s.T, strict=True))
    scatter = float(np.median([rank.scatter for rank in ranks]))  # of windows: sqrt(steps) times less than of steps
    jitter = min(MAX_JITTER, scatter * math.sqrt(float(np.median(seen.num_steps))))
    slowdown, slow = slowdowns(ranks, seen)
    fit = Fit(ranks, jitter, fit_dwell_times(slow, slowdown, seen.duration_s))
    if len(ranks) == 1:
        return fit
    times_s = exposed(seen, jitter), seen.busy_s.max(axis=1)
    exposure = fit_exposure(*times_s)
    factor = exposure.factor(*times_s)
    fit, congested = fit._replace(exposure=exposure), factor > exposure.congested_factor
    if congested.sum() < MIN_DISTURBED or congested.all():
        return fit
    rates = seen.retransmits / seen.duration_s[:, None]
    known = [part[np.isfinite(part)] for part in (rates[congested], rates[~congested])]
    during, calm = (float(part.mean()) if len(part) else None for part in known)
    if during is not None and calm is not None and during <= RETRANSMIT_RATIO * calm:
        return fit
    found = fit_dwell_times(congested[:, None], factor[:, None], seen.duration_s)
    return fit._replace(congestion=found, retransmits_per_s=max(0.0, (during or 0.0) - (calm or 0.0)))


def fit_dwell_times(on: Flags, factors: Array64, duration_s: Array64) -> DwellTimes | None:
    """Fit a disturbance to some series; `None` when too few windows show it.

    The mean dwell time is the time spent in a state divided by the number of times it was left. This is the
    maximum-likelihood estimate when the recording cuts off the last dwell time. Dwell times shorter than a window are
    invisible.

    `on` (whether the disturbance was on) and `factors` (its factors on times) are windows x series.
    """
    if on.sum() < MIN_DISTURBED:
        return None
    inner = np.zeros_like(on)  # windows between two that are also on: a window of a change has undisturbed steps, too
    inner[1:-1] = on[:-2] & on[1:-1] & on[2:]
    num_left, num_entered = (on[:-1] & ~on[1:]).sum(), (~on[:-1] & on[1:]).sum()
    on_s, off_s = ((state * duration_s[:, None]).sum() for state in (on, ~on))
    factor = float(np.median(factors[inner if inner.any() else on]))
    return DwellTimes(factor, float(off_s / max(1, num_entered)), float(on_s / max(1, num_left)))


# --- the scenario: the formulas of the clock, solved for its keys

DEFAULT_TARGET = 0.8
LATENCY_S = 5e-5
LARGEST_LATENCY_SHARE = 0.5
"""Upper bound of the latency as a share of C: a round trip time measured under load would otherwise exceed C."""
OTHER_MODEL = 0.2
"""Another model was trained when the bytes sent differ from the workload's by more than this share."""


def scenario_of(fit: Fit, seen: Observations, job: Job, workload: str, name: str) -> Scenario:
    """The scenario, with the bounds of the job; the target is the best accuracy that it reported, else the default."""
    duration_s = _rounded(float(seen.duration_s.sum()))
    accuracies = seen.held_out_accuracy[np.isfinite(seen.held_out_accuracy)]
    target = math.floor(float(accuracies.max()) * 1000) / 1000 if len(accuracies) else DEFAULT_TARGET
    jitter, stragglers, congestion = round(fit.jitter, 4), None, None
    if fit.stragglers is not None:
        stragglers = Stragglers(
            jitter=jitter,
            factor=_rounded(max(1.0, fit.stragglers.factor)),
            mean_normal_s=_rounded(fit.stragglers.mean_off_s),
            mean_slow_s=_rounded(fit.stragglers.mean_on_s),
        )
    elif jitter > 0:
        stragglers = Stragglers(jitter=jitter)
    if fit.congestion is not None:  # one state for the whole network: step times do not show which link was congested
        congestion = Congestion(
            factor=_rounded(max(1.0, fit.congestion.factor)),
            mean_clear_s=_rounded(fit.congestion.mean_off_s),
            mean_congested_s=_rounded(fit.congestion.mean_on_s),
            retransmits_per_s=_rounded(fit.retransmits_per_s),
        )
    mean, most = math.exp(fit.jitter**2 / 2), max(job.max_local_batch_sizes)  # jitter has median 1
    return Scenario(
        name=name,
        family="calibrated",
        workload=workload,
        optimizer=job.optimizer_family,
        learning_rate_rule=job.learning_rate_rule,
        window_steps=job.window_steps,
        base_global_batch_size=job.base_global_batch_size,
        initial_local_batch_size=max(1, round(sum(job.initial_local_batch_sizes) / job.world_size)),
        min_local_batch_size=job.min_local_batch_size,
        max_local_batch_size=most,
        ranks_per_node=max(len(node.ranks) for node in job.nodes),
        target_accuracy=target,
        fixed_time_s=duration_s,
        time_limit_s=_rounded(4 * duration_s),
        evaluate_every_s=_rounded(duration_s / 100),
        workers=tuple(
            Workers(
                samples_per_s=_rounded(mean * rank.samples_per_s),
                overhead_s=_rounded(rank.overhead_s / mean),
                saturation=round(rank.saturation),
                max_local_batch_size=size if size < most else None,
            )
            for rank, size in zip(fit.ranks, job.max_local_batch_sizes, strict=True)
        ),
        network=Network() if fit.exposure is None else _network(fit.exposure, seen, workload),
        stragglers=stragglers,
        congestion=congestion,
        decision=DecisionCost(cost_s=0.0, cost_per_doubling_s=0.0),  # the overheads contain the cost
    )


def _network(exposure: Exposure, seen: Observations, workload: str) -> Network:
    """A ring, whose bandwidth follows from C, latency, buckets and bytes."""
    num_workers = seen.samples.shape[1]
    own_bytes = gradient_bytes = workload_named(workload).gradient_bytes
    share = sent_bytes("ring", num_workers, own_bytes) / own_bytes
    known = seen.tx_bytes[np.isfinite(seen.tx_bytes)]
    if len(known):  # another model was trained when the sockets carried much more or less
        measured = float(np.median(known)) / share
        if abs(measured / own_bytes - 1) > OTHER_MODEL and measured >= 1:
            gradient_bytes = round(measured)
    latencies = exposure.num_buckets * 2 * (num_workers - 1)
    latency_s = min(measured_latency_s(seen), LARGEST_LATENCY_SHARE * exposure.communication_s / latencies)
    moving_s = exposure.communication_s - latencies * latency_s
    return Network(
        bandwidth_mbit_s=_rounded(share * gradient_bytes / moving_s / BYTES_PER_MBIT),
        latency_s=_rounded(latency_s),
        overlap=round(exposure.overlap, 2),
        num_buckets=exposure.num_buckets,
        gradient_bytes=0 if gradient_bytes == own_bytes else gradient_bytes,
    )


def measured_latency_s(seen: Observations) -> float:
    """Half of the round trip time that the kernel measured, or a typical one when it did not."""
    known = seen.srtt_us[np.isfinite(seen.srtt_us)]
    return float(np.median(known)) / 2e6 if len(known) else LATENCY_S


def _rounded(value: float) -> float:
    """Round to four significant digits: more would be noise."""
    return float(f"{value:.4g}")


# --- the scenario with its errors


class StepTimeComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Mean step time of one window: measured, and predicted by a cluster that was fitted to OTHER windows."""

    window: int
    step_time_s: float
    virtual_step_time_s: float
    slow_ranks: tuple[int, ...]
    is_congested: bool


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The scenario and its errors."""

    scenario: Scenario
    num_windows: int
    num_left_out: int
    ranks: tuple[RankSpeed, ...]
    communication_s: float
    """C: communication time of one step, whether exposed or hidden."""
    median_error: float
    """Relative error of virtual step times over all windows, each against a fit that has not seen it."""
    p90_error: float
    remarks: tuple[str, ...]
    comparisons: tuple[StepTimeComparison, ...]


def calibrate(windows: Iterable[MetricWindow], job: Job, workload: str, name: str = "calibrated") -> Calibration:
    """Fit a scenario to the windows of one job, of all nodes.

    Raises:
        ValueError: when windows are too few, the workload is not known, or the job did not begin with exact training.
    """
    if job.initial_exchange != EXACT:
        raise ValueError(
            f"this job exchanged gradients with {job.initial_exchange.label}, which the network of a scenario does not "
            "model: calibrate to a run with exact training"
        )
    gradient_bytes = workload_named(workload).gradient_bytes
    seen, num_left_out = observe(windows)
    fit = fit_observations(seen)
    scenario = scenario_of(fit, seen, job, workload, name)
    comparisons: list[Any] = [None] * len(seen.step_s)
    for part, others in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        other = seen.select(others)
        found = fit_observations(other)
        virtual = scenario_of(found, other, job, workload, name)
        comparisons[part] = compare(found, virtual, seen.select(part), gradient_bytes)
    errors = [abs(each.virtual_step_time_s / each.step_time_s - 1) for each in comparisons]
    return Calibration(
        scenario=scenario,
        num_windows=len(comparisons),
        num_left_out=num_left_out,
        ranks=fit.ranks,
        communication_s=0.0 if fit.exposure is None else fit.exposure.communication_s,
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
        remarks=tuple(_remarks(fit, scenario, seen, job)),
        comparisons=tuple(comparisons),
    )


def compare(fit: Fit, scenario: Scenario, seen: Observations, gradient_bytes: int) -> list[StepTimeComparison]:
    """Compare virtual with real step times: same sizes and disturbances, jitter averaged over draws."""
    world_size, stragglers = scenario.world_size, scenario.stragglers or Stragglers()
    _, slow = slowdowns(fit.ranks, seen)
    slow &= fit.stragglers is not None
    congested, divisor = np.zeros(len(slow), dtype=bool), 1.0
    if fit.exposure is not None and scenario.congestion is not None:
        factor = fit.exposure.factor(exposed(seen, fit.jitter), seen.busy_s.max(axis=1))
        congested, divisor = factor > fit.exposure.congested_factor, scenario.congestion.factor
    clock, draws = VirtualClock(scenario, gradient_bytes), np.ones((1, world_size))
    if stragglers.jitter:
        draws = np.exp(stragglers.jitter * np.random.default_rng(0).standard_normal((NUM_DRAWS, world_size)))
    compared = []
    for index, samples in enumerate(seen.samples):
        slowdown = np.where(slow[index], stragglers.factor, 1.0)
        links = np.full(world_size, divisor if congested[index] else 1.0)
        met = [Conditions(slowdown * draw, links, links > 1) for draw in draws]
        compared.append(
            StepTimeComparison(
                window=int(seen.window[index]),
                step_time_s=float(seen.step_s[index]),
                virtual_step_time_s=float(np.mean([clock.step(samples, each).step_s for each in met])),
                slow_ranks=tuple(np.flatnonzero(slow[index]).tolist()),
                is_congested=bool(congested[index]),
            )
        )
    return compared


def _remarks(fit: Fit, scenario: Scenario, seen: Observations, job: Job) -> Iterator[str]:
    """Notes on the result, most important first."""
    if unknown := list(_not_identifiable(fit, scenario, seen)):
        yield f"Not identifiable from these windows: {'; '.join(unknown)}."
    if fit.jitter >= MAX_JITTER:
        yield f"The windows scatter more than a jitter of {MAX_JITTER:g} explains; {MAX_JITTER:g} is written."
    if fit.stragglers is None:
        yield "No stragglers were visible: no rank was slower than usual for some windows."
    if fit.exposure is not None and fit.congestion is None:
        yield "No congestion was visible: no windows waited much longer for the network, or nothing was retransmitted."
    if scenario.network.gradient_bytes:
        yield (
            f"The sockets carried gradients of {scenario.network.gradient_bytes} bytes, not the workload's: the "
            "scenario sends as much."
        )
    if job.exchange != "exact":
        yield (
            f"This job permits other codecs or local steps ({job.exchange}). Windows do not record which were active: "
            "the fit assumes exact training in all of them, and coding costs are the defaults."
        )


def _not_identifiable(fit: Fit, scenario: Scenario, seen: Observations) -> Iterator[str]:
    """The numbers that the windows leave open, each with the assumption made instead."""

    def named(ranks: Sequence[int]) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

    if flat := [rank for rank, speed in enumerate(fit.ranks) if speed.overhead_error_s is None]:
        yield (
            f"overhead and rate of {named(flat)}, whose sizes did not vary enough (by a factor of {MIN_SPREAD:g}, and "
            "more than the times scatter), so all of the time is assumed to grow with the samples (run the job with "
            "the policy `random`)"
        )
    least = [column[column > 0].min(initial=np.inf) for column in seen.samples.T]
    visible = [rank for rank, speed in enumerate(fit.ranks) if speed.saturation]
    if hidden := [rank for rank, size in enumerate(least) if size > 1 and rank not in (*flat, *visible)]:
        fewest = int(min(least[rank] for rank in hidden))
        yield (
            f"a saturation of {named(hidden)} below the observed batches, of {fewest} samples or more, so smaller "
            "ones are assumed to cost less"
        )
    if fit.exposure is None:
        return
    communication_s, overlap, num_buckets, is_distinct, _ = fit.exposure
    if not is_distinct:
        yield (
            "overlap and buckets, as the exposed communication does not change with the compute time, so all of it is "
            "assumed to be exposed"
        )
    elif communication_s - overlap * seen.busy_s.max() >= communication_s / num_buckets:
        yield "the number of buckets, as computing never hid all but the last one, so the fewest are assumed"
    if not np.isfinite(seen.srtt_us).any():
        yield (
            f"latency, as no round trip times were measured, so {LATENCY_S * 1e6:g} us are assumed and the rest of "
            "the communication is bandwidth"
        )
    elif scenario.network.latency_s < 0.99 * measured_latency_s(seen):
        yield (
            "latency, as messages with the measured round trip times would take longer than the communication did, so "
            "half of it is assumed to be latency"
        )


def scenario_text(scenario: Scenario, comment: str) -> str:
    """TOML that `Scenario.read` reads as an equal scenario, except for the name, which is the file's."""

    def pairs(struct: msgspec.Struct) -> Iterator[str]:
        """The values that are not the default; TOML writes all but floats and tables as JSON does."""
        for field in msgspec.structs.fields(struct):
            value = getattr(struct, field.name)
            is_table = isinstance(value, msgspec.Struct | tuple)
            if (field.required or value != field.default) and field.name != "name" and not is_table:
                yield f"{field.name} = {repr(value) if isinstance(value, float) else json.dumps(value)}"

    lines = [f"# {comment}", *pairs(scenario)]
    for field in msgspec.structs.fields(scenario):
        value = getattr(scenario, field.name)
        if isinstance(value, msgspec.Struct) and value != field.default:
            lines += [f"\n[{field.name}]", *pairs(value)]
        elif isinstance(value, tuple):
            lines += [line for entry in value for line in (f"\n[[{field.name}]]", *pairs(entry))]
    return "\n".join(lines) + "\n"
