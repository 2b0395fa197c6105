"""Inputs of an agent's network: its own report, free of scale. Pure.

Sizes are doublings, times are shares of the step or ratios. Neither a rank nor a node can be told from another by it,
so that one network serves all agents, whatever their number. Unknown is NaN; `networks.Normalisation` turns it into a
bit. Beside the report there is what the rule of the agent makes of it: the waiting that it leaves, and its wish.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamix.schemas.messages import FieldView, JobTotals, Report, SeenTrace

Array32 = npt.NDArray[np.float32]


class Sight(NamedTuple):
    """One window as seen by the agent of a node."""

    report: Report
    view: FieldView
    waiting_s: float
    """Waiting time that it leaves in its trace."""
    wish: float
    """The global batch of its rule's wish."""

    @property
    def totals(self) -> JobTotals:
        """The job's sums."""
        return self.report.totals

    @property
    def in_force(self) -> float:
        """The global batch in effect in the window."""
        return float(self.totals.global_batch_size)


Look = Callable[[Sight], float]

_LOOKS: Mapping[str, Look] = {
    "waiting_share": lambda seen: _ratio(seen.waiting_s, _step_s(seen.totals)),
    "least_sync_share": lambda seen: min(_shares(seen, "sync_time_s"), default=math.nan),
    "most_sync_share": lambda seen: max(_shares(seen, "sync_time_s"), default=math.nan),
    "least_compute_share": lambda seen: min(_shares(seen, "compute_time_s"), default=math.nan),
    "most_compute_share": lambda seen: max(_shares(seen, "compute_time_s"), default=math.nan),
    "most_data_share": lambda seen: max(_shares(seen, "data_time_s"), default=math.nan),
    "speed_change_log2": lambda seen: _mean(_speed_changes(seen)),
    "wish_to_batch_log2": lambda seen: _log2(_ratio(seen.wish, seen.in_force)),
    "batch_to_noise_log2": lambda seen: _log2(_ratio(seen.in_force, _noise_scale(seen))),
    "batch_to_base_log2": lambda seen: _log2(_ratio(seen.in_force, seen.view.base_global_batch_size)),
    "batch_change_log2": lambda seen: _change(seen, lambda totals: totals.global_batch_size),
    "step_time_change_log2": lambda seen: _change(seen, _step_s),
    "loss_change_log2": lambda seen: _change(seen, lambda totals: _ratio(totals.loss_sum, totals.num_samples)),
    "accuracy": lambda seen: _ratio(seen.totals.num_correct, seen.totals.num_samples),
    "held_out_accuracy": lambda seen: _ratio(seen.report.held_out_accuracy, 1.0),
    "own_strength": lambda seen: 0.0 if seen.view.own is None else seen.view.own.strength,
    "around_strength": lambda seen: sum(trace.strength for trace in seen.view.around),
    "own_appetite_to_batch_log2": lambda seen: _appetite([] if seen.view.own is None else [seen.view.own], seen),
    "around_appetite_to_batch_log2": lambda seen: _appetite(seen.view.around, seen),
    "around_waiting_to_own_log2": lambda seen: _log2(
        _ratio(_mean([trace.waiting_s for trace in seen.view.around]), seen.waiting_s)
    ),
    "windows_log2": lambda seen: _log2(1.0 + seen.report.window),
    "rate_exponent": lambda seen: seen.view.rate_exponent,
    "is_adam": lambda seen: float(seen.report.optimizer_family == "adam"),
}

INPUTS = tuple(_LOOKS)
"""Names of all inputs, in order; a file lists those that its network was learned with."""


def inputs_of(sight: Sight) -> Array32:
    """One number per name in `INPUTS`, NaN where unknown."""
    with np.errstate(over="ignore"):  # a made-up report may hold any numbers
        return np.array([look(sight) for look in _LOOKS.values()], dtype=np.float64).astype(np.float32)


def _shares(seen: Sight, time: str) -> list[float]:
    """Shares of the window that its ranks spend on something."""
    rows = [row for row in seen.report.rows if row.times_split]
    return [_ratio(getattr(row, time), seen.totals.time_s) for row in rows if seen.totals.time_s > 0]


def _speed_changes(seen: Sight) -> list[float]:
    """Doublings of its ranks' speeds since their traces."""
    rows = zip(seen.report.rows, seen.view.activity, strict=True)
    return [
        _log2(_ratio(_ratio(row.num_samples, row.compute_time_s), before))
        for row, before in rows
        if row.times_split and row.num_samples and row.compute_time_s > 0 and before > 0
    ]


def _step_s(totals: JobTotals) -> float:
    return _ratio(totals.time_s, totals.num_steps)


def _noise_scale(seen: Sight) -> float:
    noise = seen.totals.noise
    return math.nan if noise is None else _ratio(noise.trace, noise.squared_norm)


def _appetite(traces: Sequence[SeenTrace], seen: Sight) -> float:
    return _log2(_ratio(_mean([trace.appetite for trace in traces]), seen.in_force))


def _change(seen: Sight, number_of: Callable[[JobTotals], float]) -> float:
    """Doublings since the window before."""
    before = seen.report.totals_before
    return math.nan if before is None else _log2(_ratio(number_of(seen.totals), number_of(before)))


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan


def _ratio(over: float | None, under: float | None) -> float:
    """NaN where the divisor is not positive, or either is unknown."""
    return math.nan if over is None or under is None or not under > 0 else over / under


def _log2(number: float) -> float:
    """NaN where the number is not positive, not finite, or unknown."""
    return math.log2(number) if 0.0 < number < math.inf else math.nan
