"""A scenario from a fit: its keys, its errors on windows that the fit has not seen, and what is not identifiable."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from dynamix.lab.simulator.clock import Conditions, VirtualClock, sent_bytes
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
from dynamix.schemas.messages import Job, MetricWindow
from dynamix.schemas.messages.allocation import EXACT

from .fit import MAX_JITTER, MIN_SPREAD, CalibrationFit, Observations, Origin, fit_observations, observe

DEFAULT_TARGET = 0.8
LATENCY_S = 5e-5
LARGEST_LATENCY_SHARE = 0.5
"""Upper bound of the latency as a share of C: a round trip time measured under load would otherwise exceed C."""
OTHER_MODEL = 0.2
"""Another model was trained when the bytes sent differ from the workload's by more than this share."""
NUM_DRAWS = 64
"""Draws of jitter, for the mean step time of a window."""


class CalibrationSettings(NamedTuple):
    """Properties of a job that its metric windows do not contain."""

    workload: str
    name: str = "calibrated"
    optimizer: Literal["sgd", "adam", "adamw"] | None = None
    """`None`: by the job's optimizer family."""
    learning_rate: float = 0.05
    target_accuracy: float | None = None
    """`None`: the best accuracy that the job reported, else 0.8."""
    topology: Literal["ring", "parameter-server"] = "ring"
    num_servers: int = 1


class RankSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's fitted line, with standard errors; `None` for numbers that cannot be determined."""

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
            f"this job exchanged gradients with {job.initial_exchange.label}, which the network of a scenario does not "
            "model: calibrate to a run with exact training"
        )
    gradient_bytes = workload_named(settings.workload).gradient_bytes
    seen, origin = observe(windows)
    fit = fit_observations(seen)
    scenario = scenario_of(fit, seen, origin, settings, job)
    even, odd = (seen.select(np.arange(first, len(seen.step_s), 2)) for first in (0, 1))
    comparisons: list[StepTimeComparison] = []
    for others, mine in ((odd, even), (even, odd)):
        found = fit_observations(others)
        comparisons += compare(found, scenario_of(found, others, origin, settings, job), mine, gradient_bytes)
    comparisons[::2], comparisons[1::2] = comparisons[: len(even.step_s)], comparisons[len(even.step_s) :]
    errors = [comparison.error for comparison in comparisons]
    quiet = [not comparison.slow_ranks and not comparison.is_congested for comparison in comparisons]
    steady = [error for index, error in enumerate(errors) if all(quiet[max(0, index - 1) : index + 2])]
    return Calibration(
        scenario=scenario,
        num_windows=len(seen.step_s),
        num_left_out=origin.num_left_out,
        ranks=tuple(
            RankSpeed(
                rank=rank,
                samples_per_s=1 / line.s_per_sample,
                samples_per_s_error=(1 / line.s_per_sample) ** 2 * line.s_per_sample_error
                if line.is_distinct
                else None,
                overhead_s=line.overhead_s,
                overhead_error_s=line.overhead_error_s if line.is_distinct else None,
                saturation=line.saturation,
                saturation_error=line.saturation_error if line.saturation else None,
            )
            for rank, line in enumerate(fit.lines)
        ),
        communication_s=0.0 if fit.exposure is None else fit.exposure.communication_s,
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
        steady_median_error=float(np.median(steady)) if steady else None,
        steady_p90_error=float(np.quantile(steady, 0.9)) if steady else None,
        remarks=tuple(_remarks(fit, scenario, seen, job)),
        comparisons=tuple(comparisons),
    )


def compare(
    fit: CalibrationFit, scenario: Scenario, seen: Observations, gradient_bytes: int
) -> list[StepTimeComparison]:
    """Compare virtual with real step times: same sizes and disturbances, jitter averaged over draws."""
    slow = fit.slow(seen) if scenario.stragglers is not None else np.zeros_like(seen.samples, dtype=bool)
    congested = fit.congested(seen) & (scenario.congestion is not None)
    clock, stragglers = VirtualClock(scenario, gradient_bytes), scenario.stragglers or Stragglers()
    draws = np.ones((1, scenario.world_size))
    if stragglers.jitter:
        draws = np.exp(stragglers.jitter * np.random.default_rng(0).standard_normal((NUM_DRAWS, scenario.world_size)))
    divisor = 1.0 if scenario.congestion is None else scenario.congestion.factor
    compared = []
    for index in range(len(seen.step_s)):
        slowdown = np.where(slow[index], stragglers.factor, 1.0)
        links = np.full(seen.world_size, divisor if congested[index] else 1.0)
        flags = np.full(seen.world_size, congested[index])
        met = [Conditions(slowdown * draw, links, flags) for draw in draws]
        compared.append(
            StepTimeComparison(
                window=int(seen.window[index]),
                global_batch_size=float(seen.samples[index].sum()),
                step_time_s=float(seen.step_s[index]),
                virtual_step_time_s=float(np.mean([clock.step(seen.samples[index], each).step_s for each in met])),
                slow_ranks=tuple(np.flatnonzero(slow[index]).tolist()),
                is_congested=bool(congested[index]),
            )
        )
    return compared


# The formulas of the clock, solved for the keys of a scenario.


def scenario_of(
    fit: CalibrationFit, seen: Observations, origin: Origin, settings: CalibrationSettings, job: Job | None
) -> Scenario:
    """The scenario; without the job's specification its bounds are the observed sizes."""
    duration_s = _rounded(float(seen.duration_s.sum()))
    accuracies = seen.held_out_accuracy[np.isfinite(seen.held_out_accuracy)]
    target = math.floor(float(accuracies.max()) * 1000) / 1000 if len(accuracies) else DEFAULT_TARGET
    jitter, slow, congestion = round(fit.jitter, 4), fit.stragglers, fit.congestion
    stragglers = Stragglers(jitter=jitter) if jitter > 0 else None
    if slow is not None:
        stragglers = Stragglers(
            jitter=jitter,
            factor=_rounded(max(1.0, slow.factor)),
            mean_normal_s=_rounded(slow.mean_off_s),
            mean_slow_s=_rounded(slow.mean_on_s),
        )
    return Scenario(
        name=settings.name,
        family="calibrated",
        workload=settings.workload,
        optimizer=settings.optimizer or origin.optimizer_family,
        learning_rate=settings.learning_rate,
        learning_rate_rule="sqrt" if job is None else job.learning_rate_rule,
        **_bounds(seen, job),
        target_accuracy=target if settings.target_accuracy is None else settings.target_accuracy,
        fixed_time_s=duration_s,
        time_limit_s=_rounded(4 * duration_s),
        evaluate_every_s=_rounded(duration_s / 100),
        workers=_workers(fit, job),
        network=_network(fit, seen, settings),
        stragglers=stragglers,
        congestion=None  # one state for the whole network: step times do not show which link was congested
        if congestion is None
        else Congestion(
            factor=_rounded(max(1.0, congestion.factor)),
            mean_clear_s=_rounded(congestion.mean_off_s),
            mean_congested_s=_rounded(congestion.mean_on_s),
            retransmits_per_s=_rounded(fit.retransmits_per_s),
        ),
        decision=DecisionCost(cost_s=0.0, cost_per_doubling_s=0.0),  # the overheads contain the cost
    )


def _bounds(seen: Observations, job: Job | None) -> dict[str, Any]:
    if job is not None:
        return {
            "window_steps": job.window_steps,
            "base_global_batch_size": job.base_global_batch_size,
            "initial_local_batch_size": max(1, round(sum(job.initial_local_batch_sizes) / job.world_size)),
            "min_local_batch_size": job.min_local_batch_size,
            "max_local_batch_size": max(job.max_local_batch_sizes),
            "ranks_per_node": max(len(node.ranks) for node in job.nodes),
        }
    sizes = np.median(seen.samples, axis=0)
    return {
        "window_steps": max(1, int(np.median(seen.num_steps))),
        "base_global_batch_size": max(1, round(float(sizes.sum()))),
        "initial_local_batch_size": max(1, round(float(sizes.mean()))),
        "min_local_batch_size": max(1, math.floor(seen.samples.min())),
        "max_local_batch_size": math.ceil(seen.samples.max()),
        "ranks_per_node": seen.world_size,
    }


def _workers(fit: CalibrationFit, job: Job | None) -> tuple[Workers, ...]:
    """One table of workers per rank; jitter has median 1, the times are those of an undisturbed step."""
    mean = math.exp(fit.jitter**2 / 2)
    bounds: Sequence[int | None] = [None] * len(fit.lines)
    if job is not None:
        most = max(job.max_local_batch_sizes)
        bounds = [size if size < most else None for size in job.max_local_batch_sizes]
    return tuple(
        Workers(
            samples_per_s=_rounded(mean / line.s_per_sample),
            overhead_s=_rounded(line.overhead_s / mean),
            saturation=round(line.saturation),
            max_local_batch_size=bound,
        )
        for line, bound in zip(fit.lines, bounds, strict=True)
    )


def _network(fit: CalibrationFit, seen: Observations, settings: CalibrationSettings) -> Network:
    """The network: its bandwidth follows from C, latency, buckets and bytes."""
    num_workers = seen.world_size
    if fit.exposure is None:
        return Network()
    own_bytes = gradient_bytes = workload_named(settings.workload).gradient_bytes
    known = seen.tx_bytes[np.isfinite(seen.tx_bytes)]
    if len(known):  # another model was trained when the sockets carried much more or less
        measured = float(np.median(known)) / (sent_bytes(settings.topology, num_workers, own_bytes) / own_bytes)
        if abs(measured / own_bytes - 1) > OTHER_MODEL and measured >= 1:
            gradient_bytes = round(measured)
    latencies = fit.exposure.num_buckets * (2 * (num_workers - 1) if settings.topology == "ring" else 2)
    latency_s = min(measured_latency_s(seen), LARGEST_LATENCY_SHARE * fit.exposure.communication_s / latencies)
    moving_s = fit.exposure.communication_s - latencies * latency_s
    links = 2 * (num_workers - 1) / num_workers
    if settings.topology == "parameter-server":
        links = 2 * max(1.0, num_workers / settings.num_servers)
    return Network(
        topology=settings.topology,
        bandwidth_mbit_s=_rounded(links * gradient_bytes / moving_s / BYTES_PER_MBIT),
        latency_s=_rounded(latency_s),
        overlap=round(fit.exposure.overlap, 2),
        num_buckets=fit.exposure.num_buckets,
        num_servers=settings.num_servers,
        gradient_bytes=0 if gradient_bytes == own_bytes else gradient_bytes,
    )


def measured_latency_s(seen: Observations) -> float:
    """Half of the round trip time that the kernel measured, or a typical one when it did not."""
    known = seen.srtt_us[np.isfinite(seen.srtt_us)]
    return float(np.median(known)) / 2e6 if len(known) else LATENCY_S


def _rounded(value: float) -> float:
    """Round to four significant digits: more would be noise."""
    return float(f"{value:.4g}")


# Text for users.


def _remarks(fit: CalibrationFit, scenario: Scenario, seen: Observations, job: Job | None) -> Iterator[str]:
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
    if job is not None and job.exchange != "exact":
        yield (
            f"This job permits other codecs or local steps ({job.exchange}). Windows do not record which were active: "
            "the fit assumes exact training in all of them, and coding costs are the defaults."
        )


def _not_identifiable(fit: CalibrationFit, scenario: Scenario, seen: Observations) -> Iterator[str]:
    """The numbers that the windows leave open, each with the assumption made instead."""
    if flat := [rank for rank, line in enumerate(fit.lines) if not line.is_distinct]:
        yield (
            f"overhead and rate of {_ranks(flat)}, whose sizes did not vary enough (by a factor of {MIN_SPREAD:g}, and "
            "more than the times scatter), so all of the time is assumed to grow with the samples (run the job with "
            "the policy `random`)"
        )
    least = [column[column > 0].min(initial=np.inf) for column in seen.samples.T]
    lines = enumerate(fit.lines)
    if hidden := [rank for rank, line in lines if line.is_distinct and not line.saturation and least[rank] > 1]:
        fewest = int(min(least[rank] for rank in hidden))
        yield (
            f"a saturation of {_ranks(hidden)} below the observed batches, of {fewest} samples or more, so smaller "
            "ones are assumed to cost less"
        )
    if fit.exposure is None:
        return
    if not fit.exposure.is_distinct:
        yield (
            "overlap and buckets, as the exposed communication does not change with the compute time, so all of it is "
            "assumed to be exposed"
        )
    elif not fit.exposure.shows_buckets(seen.busy_s.max(axis=1)):
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


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def scenario_text(scenario: Scenario, comments: tuple[str, ...] = ()) -> str:
    """TOML that `Scenario.read` reads as an equal scenario, except for the name, which is the file's."""

    def changed(struct: msgspec.Struct) -> Iterator[tuple[str, Any]]:
        """The fields whose value is not the default."""
        for field in msgspec.structs.fields(struct):
            value = getattr(struct, field.name)
            if field.required or value != field.default:
                yield field.encode_name, value

    def pairs(items: Iterable[tuple[str, Any]]) -> list[str]:
        """TOML writes strings, whole numbers and booleans as JSON does, and finite floats as Python."""
        return [f"{key} = {repr(value) if isinstance(value, float) else json.dumps(value)}" for key, value in items]

    keys, tables = [], []
    for key, value in changed(scenario):
        if isinstance(value, msgspec.Struct):
            tables += [f"\n[{key}]", *pairs(changed(value))]
        elif isinstance(value, tuple):
            for entry in value:
                tables += [f"\n[[{key}]]", *pairs(changed(entry))]
        elif key != "name":
            keys.append((key, value))
    return "\n".join([*(f"# {comment}" for comment in comments), *pairs(keys), *tables]) + "\n"
