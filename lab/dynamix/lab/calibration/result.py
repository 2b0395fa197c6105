"""The result of a calibration: the scenario, and its errors against the real step times, by cross-validation."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np

from dynamix.lab.simulator.clock import VirtualClock
from dynamix.lab.simulator.disturbances import Conditions
from dynamix.lab.simulator.scenario import Scenario
from dynamix.lab.workloads import workload_named
from dynamix.schemas.messages import Job, MetricWindow
from dynamix.schemas.messages.allocation import EXACT

from .fit import MAX_JITTER, CalibrationFit, fit_observations
from .lines import MIN_SPREAD
from .observations import Array64, Observations, observe
from .scenario import LATENCY_S, CalibrationSettings, measured_latency_s, scenario_of

NUM_DRAWS = 64
"""Draws of jitter, for the mean step time of a window."""


class RankSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's line, with standard errors; `None` where a number could not be told from the others."""

    rank: int
    samples_per_s: float
    samples_per_s_error: float | None
    overhead_s: float
    overhead_error_s: float | None
    saturation: float
    """Samples below which a batch costs no less; 0 where that was not visible."""
    saturation_error: float | None


class StepTimeComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Mean step time of one window: measured, and predicted by a cluster that was fitted to OTHER windows."""

    window: int
    global_batch_size: float
    step_time_s: float
    virtual_step_time_s: float
    slow_ranks: tuple[int, ...]
    is_congested: bool

    @property
    def error(self) -> float:
        """Relative error of the virtual step time."""
        return abs(self.virtual_step_time_s / self.step_time_s - 1)


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
    steady_median_error: float | None
    """The same over undisturbed windows: a disturbance that begins or ends within a window is predicted as if it
    lasted the whole window."""
    steady_p90_error: float | None
    remarks: tuple[str, ...]
    comparisons: tuple[StepTimeComparison, ...]


def calibrate(windows: Iterable[MetricWindow], settings: CalibrationSettings, job: Job | None = None) -> Calibration:
    """Fit a scenario to the windows of one job, of all nodes; its specification gives bounds and window length.

    Raises:
        NotEnoughWindowsError: when there are too few to fit.
        ValueError: when the workload is not known, or the job began with another exchange than exact training.
    """
    if job is not None and job.initial_exchange != EXACT:
        raise ValueError(
            f"the gradients of this job travelled {job.initial_exchange.label}: what its windows sent and waited for "
            "is not what a scenario's network is made of; calibrate to a run in which training was exact"
        )
    gradient_bytes = workload_named(settings.workload).gradient_bytes
    seen, origin = observe(windows)
    fit = fit_observations(seen)
    scenario = scenario_of(fit, seen, origin, settings, job)

    def compared(others: Observations, mine: Observations) -> list[StepTimeComparison]:
        """Compare some windows with a fit to others."""
        found = fit_observations(others, fit.shifts)
        return compare(found, scenario_of(found, others, origin, settings, job), mine, gradient_bytes)

    comparisons = _crossed(seen, compared)
    errors = [comparison.error for comparison in comparisons]
    steady = [error for error, is_steady in zip(errors, _steady(comparisons), strict=True) if is_steady]
    return Calibration(
        scenario=scenario,
        num_windows=len(seen.step_s),
        num_left_out=origin.num_left_out,
        ranks=tuple(_speed(fit, rank) for rank in range(seen.world_size)),
        communication_s=0.0 if fit.exposure is None else fit.exposure.communication_s,
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
        steady_median_error=float(np.median(steady)) if steady else None,
        steady_p90_error=float(np.quantile(steady, 0.9)) if steady else None,
        remarks=(*_remarks(fit, scenario, seen), *_remarks_on_exchange(job)),
        comparisons=comparisons,
    )


def compare(
    fit: CalibrationFit, scenario: Scenario, seen: Observations, gradient_bytes: int
) -> list[StepTimeComparison]:
    """Compare virtual with real step times: same sizes, disturbances and changes, jitter averaged over draws."""
    slow = fit.slow(seen) if scenario.stragglers is not None else np.zeros_like(seen.samples, dtype=bool)
    congested = fit.congested(seen) & (scenario.congestion is not None)
    factors, added_s = fit.factors(seen), fit.added_exchange_s(seen)
    clock, draws = VirtualClock(scenario, gradient_bytes), _jitter_draws(scenario)
    factor = 1.0 if scenario.stragglers is None else scenario.stragglers.factor
    divisor = 1.0 if scenario.congestion is None else scenario.congestion.factor
    compared = []
    for index in range(len(seen.step_s)):
        slowdown = np.where(slow[index], factor, 1.0) * factors[index]
        links = np.full(seen.world_size, divisor if congested[index] else 1.0)
        flags = np.full(seen.world_size, congested[index])
        met = [Conditions(slowdown * draw, links, flags, float(added_s[index])) for draw in draws]
        steps = [clock.step(seen.samples[index], conditions).step_s for conditions in met]
        compared.append(
            StepTimeComparison(
                window=int(seen.window[index]),
                global_batch_size=float(seen.samples[index].sum()),
                step_time_s=float(seen.step_s[index]),
                virtual_step_time_s=float(np.mean(steps)),
                slow_ranks=tuple(np.flatnonzero(slow[index]).tolist()),
                is_congested=bool(congested[index]),
            )
        )
    return compared


def _crossed(
    seen: Observations, compared: Callable[[Observations, Observations], list[StepTimeComparison]]
) -> tuple[StepTimeComparison, ...]:
    """Compare even windows with a fit to the odd ones and odd with even; in the order of the windows."""
    indices = np.arange(len(seen.step_s))
    even, odd = seen.select(indices[::2]), seen.select(indices[1::2])
    of_even, of_odd = compared(odd, even), compared(even, odd)
    return tuple((of_odd if index % 2 else of_even)[index // 2] for index in indices.tolist())


def _steady(comparisons: Sequence[StepTimeComparison]) -> list[bool]:
    """Return which windows are undisturbed, together with both neighbours."""
    quiet = [not comparison.slow_ranks and not comparison.is_congested for comparison in comparisons]
    return [all(quiet[max(0, index - 1) : index + 2]) for index in range(len(quiet))]


def _jitter_draws(scenario: Scenario) -> Array64:
    """Return factors, draws x workers; a single row of ones without jitter."""
    jitter = 0.0 if scenario.stragglers is None else scenario.stragglers.jitter
    if jitter == 0:
        return np.ones((1, scenario.world_size))
    draws = np.random.default_rng(0).standard_normal((NUM_DRAWS, scenario.world_size))
    factors: Array64 = np.exp(jitter * draws)
    return factors


def _speed(fit: CalibrationFit, rank: int) -> RankSpeed:
    line = fit.lines[rank]
    rate = 1 / line.s_per_sample
    return RankSpeed(
        rank=rank,
        samples_per_s=rate,
        samples_per_s_error=rate**2 * line.s_per_sample_error if line.is_distinct else None,
        overhead_s=line.overhead_s,
        overhead_error_s=line.overhead_error_s if line.is_distinct else None,
        saturation=line.saturation,
        saturation_error=line.saturation_error if line.saturation else None,
    )


def _remarks(fit: CalibrationFit, scenario: Scenario, seen: Observations) -> Iterator[str]:
    """What to know of the result, in sentences, most important first: what could not be determined is one of them."""
    if unknown := list(_not_identifiable(fit, scenario, seen)):
        yield f"Not identifiable from these windows: {'; '.join(unknown)}."
    if fit.jitter >= MAX_JITTER:
        yield f"The windows scatter more than a jitter of {MAX_JITTER:g} explains: it is written as that."
    yield from _changes_in_words(fit)
    if fit.stragglers is None:
        yield "No stragglers were visible: no rank was slower than usual for some windows."
    if fit.exposure is not None and fit.congestion is None:
        yield "No congestion was visible: no windows waited much longer for the network, or nothing was retransmitted."
    if scenario.network.gradient_bytes:
        yield (
            f"The sockets carried gradients of {scenario.network.gradient_bytes} bytes, not the workload's: the "
            "scenario sends as much."
        )


def _changes_in_words(fit: CalibrationFit) -> Iterator[str]:
    for rank, shift in enumerate(fit.shifts):
        if shift is None:
            continue
        how = f"{shift.factor:.3g} times as long" if shift.factor > 1 else f"{shift.factor:.3g} of the time"
        more = f", and exchanges of gradients {shift.exchange_s * 1e3:.3g} ms longer" if shift.exchange_s else ""
        yield (
            f"From {shift.at_s:.4g} s of training on, until the end, rank {rank} took {how}{more}: the scenario has it "
            "as a change of speed, and the rank's rate and overhead are those before it."
        )


def _remarks_on_exchange(job: Job | None) -> Iterator[str]:
    if job is not None and job.exchange != "exact":
        yield (
            f"This job lets decisions change how gradients travel ({job.exchange}): windows do not say what ruled, and "
            "the fit takes training to have been exact in all of them. Coding costs are the defaults."
        )


def _not_identifiable(fit: CalibrationFit, scenario: Scenario, seen: Observations) -> Iterator[str]:
    """The numbers that the windows leave open, each with what is taken instead."""
    flat = [rank for rank, line in enumerate(fit.lines) if not line.is_distinct]
    if flat:
        yield (
            f"overhead and rate of {_ranks(flat)}, whose sizes did not vary enough (by a factor of {MIN_SPREAD:g}, and "
            "more than the times scatter), so that all of the time is taken to grow with the samples (run the job with "
            "the policy `random`)"
        )
    least = [column[column > 0].min(initial=np.inf) for column in seen.samples.T]
    hidden = [
        rank for rank, line in enumerate(fit.lines) if line.is_distinct and not line.saturation and least[rank] > 1
    ]
    if hidden:
        fewest = int(min(least[rank] for rank in hidden))
        yield (
            f"a saturation of {_ranks(hidden)} below the batches that were seen, of {fewest} samples or more, so that "
            "smaller ones are taken to cost less"
        )
    if fit.exposure is None:
        return
    if not fit.exposure.is_distinct:
        yield (
            "overlap and buckets, as what is exposed does not change with the compute time, so that all communication "
            "is taken to be exposed"
        )
    elif not fit.exposure.shows_buckets(seen.busy_s.max(axis=1)):
        yield "the number of buckets, as computing never hid all but the last one, so that the fewest are taken"
    if not np.isfinite(seen.srtt_us).any():
        yield (
            f"latency, as no round trip times were measured, so that {LATENCY_S * 1e6:g} us are taken and the rest of "
            "the communication is bandwidth"
        )
    elif scenario.network.latency_s < 0.99 * measured_latency_s(seen):
        yield (
            "latency, as messages with the measured round trip times would take longer than the communication did, so "
            "that half of it is taken to be latency"
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
