"""The scenario of a calibration: the formulas of the virtual clock, solved for the keys of a scenario file."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from dynamix.lab.simulator.clock import sent_bytes
from dynamix.lab.simulator.scenario import (
    BYTES_PER_MBIT,
    Congestion,
    DecisionCost,
    Network,
    Scenario,
    SpeedChange,
    Stragglers,
    Workers,
)
from dynamix.lab.workloads import workload_named
from dynamix.schemas.messages import Job

from .fit import CalibrationFit
from .observations import Observations, Origin

DEFAULT_TARGET = 0.8
LATENCY_S = 5e-5
LARGEST_LATENCY_SHARE = 0.5
"""Upper bound of the latency as a share of C: a round trip time measured under load would otherwise exceed C."""
OTHER_MODEL = 0.2
"""Another model was trained when the bytes sent differ from the workload's by more than this share."""


class CalibrationSettings(NamedTuple):
    """What the metric windows of a job do not contain."""

    workload: str
    name: str = "calibrated"
    optimizer: Literal["sgd", "adam", "adamw"] | None = None
    """`None`: by the job's optimizer family."""
    learning_rate: float = 0.05
    target_accuracy: float | None = None
    """`None`: the best accuracy that the job reported, else 0.8."""
    topology: Literal["ring", "parameter-server"] = "ring"
    num_servers: int = 1


def scenario_of(
    fit: CalibrationFit, seen: Observations, origin: Origin, settings: CalibrationSettings, job: Job | None
) -> Scenario:
    """Return the scenario; without the job's specification its bounds are the observed sizes."""
    duration_s = _rounded(float(seen.duration_s.sum()))
    return Scenario(
        name=settings.name,
        family="calibrated",
        workload=settings.workload,
        optimizer=settings.optimizer or origin.optimizer_family,
        learning_rate=settings.learning_rate,
        learning_rate_rule="sqrt" if job is None else job.learning_rate_rule,
        **(_bounds_of_windows(seen) if job is None else _bounds_of_job(job)),
        target_accuracy=_target(seen) if settings.target_accuracy is None else settings.target_accuracy,
        fixed_time_s=duration_s,
        time_limit_s=_rounded(4 * duration_s),
        evaluate_every_s=_rounded(duration_s / 100),
        workers=_workers(fit, job),
        network=_network(fit, seen, settings),
        stragglers=_stragglers(fit),
        congestion=_congestion(fit),
        speed_changes=tuple(_speed_changes(fit)),
        decision=DecisionCost(cost_s=0.0, cost_per_doubling_s=0.0),  # the overheads contain the cost
    )


def _target(seen: Observations) -> float:
    known = seen.held_out_accuracy[np.isfinite(seen.held_out_accuracy)]
    return math.floor(float(known.max()) * 1000) / 1000 if len(known) else DEFAULT_TARGET


def _bounds_of_job(job: Job) -> dict[str, Any]:
    return {
        "window_steps": job.window_steps,
        "base_global_batch_size": job.base_global_batch_size,
        "initial_local_batch_size": max(1, round(sum(job.initial_local_batch_sizes) / job.world_size)),
        "min_local_batch_size": job.min_local_batch_size,
        "max_local_batch_size": max(job.max_local_batch_sizes),
        "ranks_per_node": max(len(node.ranks) for node in job.nodes),
    }


def _bounds_of_windows(seen: Observations) -> dict[str, Any]:
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
    """Return one table per rank; jitter has median 1 and a larger mean, the times are those of an undisturbed step."""
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
    """Return the network: its bandwidth follows from C, latency, buckets and bytes."""
    num_workers = seen.world_size
    if fit.exposure is None:
        return Network()
    own_bytes = workload_named(settings.workload).gradient_bytes
    gradient_bytes = _gradient_bytes(seen, settings, own_bytes)
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


def _gradient_bytes(seen: Observations, settings: CalibrationSettings, own_bytes: int) -> int:
    """Return the bytes of the workload's gradient, or those of the sockets when another model was trained."""
    known = seen.tx_bytes[np.isfinite(seen.tx_bytes)]
    if not len(known):
        return own_bytes
    per_byte = sent_bytes(settings.topology, seen.world_size, own_bytes) / own_bytes
    measured = float(np.median(known)) / per_byte
    return round(measured) if abs(measured / own_bytes - 1) > OTHER_MODEL and measured >= 1 else own_bytes


def measured_latency_s(seen: Observations) -> float:
    """Return half of the round trip time that the kernel measured, or a typical one when it did not."""
    known = seen.srtt_us[np.isfinite(seen.srtt_us)]
    return float(np.median(known)) / 2e6 if len(known) else LATENCY_S


def _stragglers(fit: CalibrationFit) -> Stragglers | None:
    jitter = round(fit.jitter, 4)
    if fit.stragglers is None:
        return Stragglers(jitter=jitter) if jitter > 0 else None
    return Stragglers(
        jitter=jitter,
        factor=_rounded(max(1.0, fit.stragglers.factor)),
        mean_normal_s=_rounded(fit.stragglers.mean_off_s),
        mean_slow_s=_rounded(fit.stragglers.mean_on_s),
    )


def _congestion(fit: CalibrationFit) -> Congestion | None:
    """Return one state for the whole network: step times do not show which link was congested."""
    found = fit.congestion
    if found is None:
        return None
    return Congestion(
        factor=_rounded(max(1.0, found.factor)),
        mean_clear_s=_rounded(found.mean_off_s),
        mean_congested_s=_rounded(found.mean_on_s),
        retransmits_per_s=_rounded(fit.retransmits_per_s),
    )


def _speed_changes(fit: CalibrationFit) -> Iterator[SpeedChange]:
    for rank, shift in enumerate(fit.shifts):
        if shift is not None:
            at_s, factor, exchange_s = map(_rounded, shift)
            yield SpeedChange(rank=rank, at_s=at_s, factor=factor, exchange_s=exchange_s)


def _rounded(value: float) -> float:
    """Round to four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def scenario_text(scenario: Scenario, comments: tuple[str, ...] = ()) -> str:
    """Return TOML that `Scenario.read` reads as an equal scenario, except for the name, which is the file's."""
    lines = [f"# {comment}" for comment in comments]
    tables = []
    for key, value in _changed(scenario):
        if isinstance(value, msgspec.Struct):
            tables += [f"\n[{key}]", *_pairs(value)]
        elif isinstance(value, tuple):
            for entry in value:
                tables += [f"\n[[{key}]]", *_pairs(entry)]
        elif key != "name":
            lines.append(f"{key} = {_scalar(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _pairs(struct: msgspec.Struct) -> list[str]:
    return [f"{key} = {_scalar(value)}" for key, value in _changed(struct)]


def _changed(struct: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """Yield the fields whose value is not the default."""
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        if field.required or value != field.default:
            yield field.encode_name, value


def _scalar(value: object) -> str:
    """TOML writes strings, whole numbers and booleans as JSON does, and finite floats as Python."""
    return repr(value) if isinstance(value, float) else json.dumps(value)
