"""Fits the step-time model to windows, one after the other. Pure; the whole memory packs into a policy's carry.

- Seconds per sample of a rank: (compute time - overhead) / samples, filtered: a change of more than `JUMP` is believed
  at once, a smaller one averaged. A rank that was never measured counts as the mean of the others.
- Exposed communication: the smallest sync time of any rank, since the slowest rank does not wait; filtered alike.
- Overhead: least squares over pairs of neighbouring windows between which the global batch changed, forgetting old
  pairs. A rank whose SHARE of the batch changed as well is left out: under a fast split its size follows its speed,
  and would be taken for a fixed cost.
- Slope of exposed communication over compute: the same over pairs between which the slowest compute time changed. It is
  a local slope of a bent line, so that far jumps count no more than near ones, and old pairs are soon forgotten.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dynamix.schemas.messages import Job

from .observation import Array32, Array64, column
from .step_time import StepTime

JUMP = math.exp(0.2)
"""Ratio of change that is believed at once (change point)."""

SMOOTHING = 0.3
"""Weight of the newest value while nothing jumps."""

_OVERHEAD_DECAY = 0.95
_SLOPE_DECAY = 0.8
_MIN_CHANGE = 0.05
"""Relative change of the global batch from which a pair of windows says anything about what depends on it."""
_MIN_SLOPE_CHANGE, _MAX_SLOPE_CHANGE = 0.1, 0.2
"""Relative change of the slowest compute time: a pair with less is left out, one with more has the weight of this."""
_SAME_SHARE = 0.25
"""A rank took part in a change of the global batch if its own change was this near to it, relatively."""
_PRIOR = 0.01
"""Weight of "no overhead, no overlap", as squared relative changes: one change by 10 % equals it."""
_MAX_OVERHEAD = 0.8
"""Greatest share of the shortest compute time that is believed to be overhead."""
_BELIEVED = (1e-9, 1e12)
"""Seconds and samples outside are no measurements."""
_SLOPE_LOW, _SLOPE_HIGH = -0.9, 0.4

_SCALARS = struct.Struct("<9d")
_MAX_ARRAY_BYTES = 240 * 1024


class Window(NamedTuple):
    """What the ranks measured in one window; NaN where unknown, stale or without samples."""

    samples_W: Array64
    """Samples per step."""
    compute_W: Array64
    """Seconds per step, as all times here."""
    sync_s: float
    rest_s: float


def window_of(job: Job, obs_WF: Array32) -> Window:
    """The measurements in a policy's observation."""
    num_samples, compute_s, step_s = (
        _believed(obs_WF, name) for name in ("num_samples", "compute_time_s", "step_time_s")
    )
    sync_s = np.where(column(obs_WF, "sync_time_s") == 0, 0.0, _believed(obs_WF, "sync_time_s"))
    usable = np.isfinite(num_samples) & np.isfinite(compute_s) & (column(obs_WF, "age_windows") == 0)
    rest_s = np.maximum(step_s - compute_s - sync_s, 0.0)
    return Window(
        samples_W=np.where(usable, num_samples / job.window_steps, np.nan),
        compute_W=np.where(usable, compute_s, np.nan),
        sync_s=_of_known(np.min, sync_s[usable]),
        rest_s=_of_known(np.median, rest_s[usable]),
    )


@dataclass(frozen=True)
class StepTimeFit:
    """The fit to the windows so far."""

    seconds_per_sample_W: Array64
    samples_W: Array64
    """Samples per step in the newest window in which the rank was measured; `compute_W` is of the same window."""
    compute_W: Array64
    overhead_s: float = 0.0
    sync_intercept_s: float = math.nan
    sync_slope: float = 0.0
    rest_s: float = math.nan
    overhead_sums: tuple[float, float] = (0.0, 0.0)
    """Sums of Q P and Q^2 with P = overhead Q, per rank and pair."""
    slope_sums: tuple[float, float] = (0.0, 0.0)
    """Weighted sum of slopes, and of the weights."""
    sync_s: float = math.nan

    @classmethod
    def empty(cls, world_size: int) -> "StepTimeFit":
        """Before the first window."""
        unknown = np.full(world_size, np.nan)
        return cls(unknown, unknown, unknown)

    def observe(self, window: Window, *, jump: float = JUMP, smoothing: float = SMOOTHING) -> "StepTimeFit":
        """The fit after one more window; an infinite `jump` makes a plain moving average."""
        known = np.isfinite(window.compute_W)
        if not known.any():
            return self
        overhead_sums, slope_sums = self._pairs(window)
        shortest_s, mean_s, longest_s = (float(f(window.compute_W[known])) for f in (np.min, np.mean, np.max))
        overhead_s = _slope(overhead_sums, _PRIOR / mean_s**2, 0.0, _MAX_OVERHEAD * shortest_s)
        slope = _slope(slope_sums, _PRIOR, _SLOPE_LOW, _SLOPE_HIGH)
        measured = (window.compute_W - overhead_s) / window.samples_W
        intercept = max(window.sync_s - slope * longest_s, 0.0) if math.isfinite(window.sync_s) else math.nan
        return replace(
            self,
            seconds_per_sample_W=filtered(self.seconds_per_sample_W, measured, jump, smoothing),
            samples_W=np.where(known, window.samples_W, self.samples_W),
            compute_W=np.where(known, window.compute_W, self.compute_W),
            overhead_s=overhead_s,
            sync_intercept_s=float(filtered(self.sync_intercept_s, intercept, jump, smoothing)),
            sync_slope=slope,
            rest_s=float(filtered(self.rest_s, window.rest_s, math.inf, smoothing)),
            overhead_sums=overhead_sums,
            slope_sums=slope_sums,
            sync_s=window.sync_s if math.isfinite(window.sync_s) else self.sync_s,
        )

    def model(self, job: Job) -> StepTime | None:
        """The model so far; `None` before any rank was measured."""
        known = np.isfinite(self.seconds_per_sample_W)
        if not known.any():
            return None
        filled = np.where(known, self.seconds_per_sample_W, np.mean(self.seconds_per_sample_W[known]))
        return StepTime(
            seconds_per_sample_W=np.maximum(filled, 1e-12),
            lower_W=np.full(job.world_size, float(job.min_local_batch_size)),
            upper_W=np.asarray(job.max_local_batch_sizes, dtype=np.float64),
            overhead_s=self.overhead_s,
            sync_intercept_s=self.sync_intercept_s if math.isfinite(self.sync_intercept_s) else 0.0,
            sync_slope=self.sync_slope,
            rest_s=self.rest_s if math.isfinite(self.rest_s) else 0.0,
        )

    def pack(self) -> bytes:
        """Bytes for the carry: float64 scalars, float32 per rank. Of very many ranks only what has room is kept."""
        scalars = _SCALARS.pack(
            self.overhead_s,
            self.sync_intercept_s,
            self.sync_slope,
            self.rest_s,
            *self.overhead_sums,
            *self.slope_sums,
            self.sync_s,
        )
        arrays = (self.seconds_per_sample_W, self.samples_W, self.compute_W)[: _num_arrays(len(self.samples_W))]
        return scalars + b"".join(array.astype("<f4").tobytes() for array in arrays)

    @classmethod
    def unpack(cls, packed: bytes, world_size: int) -> "StepTimeFit":
        """What `pack` gave; empty from anything else."""
        num_arrays = _num_arrays(world_size)
        if len(packed) != _SCALARS.size + 4 * world_size * num_arrays:
            return cls.empty(world_size)
        overhead, intercept, slope, rest, qp, qq, ce, cc, sync = _SCALARS.unpack_from(packed)
        per_rank = np.full((3, world_size), np.nan)
        kept = np.frombuffer(packed, dtype="<f4", offset=_SCALARS.size)
        per_rank[:num_arrays] = kept.reshape(num_arrays, world_size)
        per_sample, samples, compute = per_rank
        return cls(per_sample, samples, compute, overhead, intercept, slope, rest, (qp, qq), (ce, cc), sync)

    def _pairs(self, window: Window) -> tuple[tuple[float, float], tuple[float, float]]:
        """Add the pair of the last window and this one to both sums of products."""
        both = np.isfinite(self.samples_W) & np.isfinite(window.samples_W)
        if not both.any():
            return self.overhead_sums, self.slope_sums
        b0, b1, c0, c1 = (array[both] for array in (self.samples_W, window.samples_W, self.compute_W, window.compute_W))
        overhead, slope = _overhead_pair(b0, b1, c0, c1), _slope_pair(c0.max(), c1.max(), self.sync_s, window.sync_s)
        return _added(self.overhead_sums, overhead, _OVERHEAD_DECAY), _added(self.slope_sums, slope, _SLOPE_DECAY)


def filtered(old: Array64 | float, new: Array64 | float, jump: float, smoothing: float) -> Array64:
    """`new` where it jumped or is the first, else the moving average; `old` where nothing was measured."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.asarray(new) / old
    average = (1 - smoothing) * old + smoothing * new
    jumped = ~((ratio <= jump) & (ratio >= 1 / jump))
    result: Array64 = np.where(np.isnan(new), old, np.where(jumped, new, average))
    return result


def _overhead_pair(b0: Array64, b1: Array64, c0: Array64, c1: Array64) -> tuple[float, float]:
    """Q P and Q^2 summed over ranks: c = overhead + b s twice gives b1 c0 - b0 c1 = overhead (b1 - b0).

    Both sides are divided by the mean samples and the mean compute time, which makes their error the relative error of
    the times. An overhead outside -0.5 ... 1.1 of the compute time is a change of speed and left out.
    """
    change = _relative(float(b0.sum()), float(b1.sum()))
    if abs(change) < _MIN_CHANGE:
        return 0.0, 0.0
    shared = np.abs(2 * (b1 - b0) / (b1 + b0) - change) <= _SAME_SHARE * abs(change)
    b0, b1, c0, c1 = (array[shared] for array in (b0, b1, c0, c1))
    scale = (b0 + b1) * (c0 + c1) / 4
    p, q = (b1 * c0 - b0 * c1) / scale, (b1 - b0) / scale
    share = p / q * 2 / (c0 + c1)
    likely = (share > -0.5) & (share < 1.1)
    return float((q * p)[likely].sum()), float((q * q)[likely].sum())


def _slope_pair(c0: float, c1: float, e0: float, e1: float) -> tuple[float, float]:
    """Weighted slope and weight; zeros where it is too steep for overlap or jitter: the network itself changed."""
    dc, de = c1 - c0, e1 - e0
    change = abs(_relative(c0, c1))
    if not math.isfinite(de) or change < _MIN_SLOPE_CHANGE or not -1.1 < de / dc < 0.6:
        return 0.0, 0.0
    weight = min(change, _MAX_SLOPE_CHANGE) ** 2
    return float(weight * de / dc), float(weight)


def _added(sums: tuple[float, float], pair: tuple[float, float], decay: float) -> tuple[float, float]:
    if pair[1] == 0.0:
        return sums
    return decay * sums[0] + pair[0], decay * sums[1] + pair[1]


def _slope(sums: tuple[float, float], prior: float, low: float, high: float) -> float:
    """Least squares through the origin, drawn to zero by the prior's weight."""
    return float(min(max(sums[0] / (sums[1] + prior), low), high))


def _believed(obs_WF: Array32, name: str) -> Array64:
    """A column, with NaN for what no rank can have measured: squares of it must not leave the range of a float32."""
    values = column(obs_WF, name)
    return np.where((values > _BELIEVED[0]) & (values < _BELIEVED[1]), values, np.nan)


def _relative(old: float, new: float) -> float:
    return 2 * (new - old) / (new + old)


def _of_known(statistic: Callable[[Array64], np.floating], values: Array64) -> float:
    known = values[np.isfinite(values)]
    return float(statistic(known)) if known.size else math.nan


def _num_arrays(world_size: int) -> int:
    return min(3, _MAX_ARRAY_BYTES // (4 * world_size))
