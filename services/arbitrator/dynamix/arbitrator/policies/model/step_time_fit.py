"""Fits the step-time model to windows, one after the other. Pure; the whole memory packs into a policy's carry.

- Fixed time and saturation of a rank: `dynamix.schemas.rank_times`, from pairs of neighbouring windows between which
  the global batch changed. A rank whose own size changed otherwise is left out: under a fast split its size follows its
  speed, and would be taken for a fixed cost. While a rank's sizes tell little, its fixed time is drawn to that of all
  ranks, and that to 0. Of very many ranks as many as the carry has room for speak for all.
- Seconds per sample of a rank: (compute time - fixed time) / samples. The compute time is filtered against what was
  expected at these sizes: a change of more than `JUMP` is believed at once, a smaller one averaged. A rank that was
  never measured counts as the mean of the others.
- Exposed communication: the smallest sync time of any rank, since the slowest rank does not wait; filtered alike.
- Slope of exposed communication over compute: pairs between which the slowest compute time changed. It is a local slope
  of a bent line, so that far jumps count no more than near ones, and old pairs are soon forgotten.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dynamix.schemas.messages import Job
from dynamix.schemas.rank_times import PairSums, fixed_share

from .observation import Array32, Array64, column
from .step_time import StepTime

JUMP = math.exp(0.2)
"""Ratio of change that is believed at once (change point)."""

SMOOTHING = 0.3
"""Weight of the newest value while nothing jumps."""

_SLOPE_DECAY = 0.8
_MIN_SLOPE_CHANGE, _MAX_SLOPE_CHANGE = 0.1, 0.2
"""Relative change of the slowest compute time: a pair with less is left out, one with more has the weight of this."""
_SAME_CHANGE = 0.25
"""A size changed with the global batch if it is this near to its old share of it, in proportion to its own change."""
_SAME_DIVISION = 2.0
"""It changed with the division if it did so by no more than this factor more, or less, than the model expects."""
_PRIOR = 0.01
"""Weight of "as the other ranks" and of "no overlap", as squared relative changes: one change by 10 % equals it."""
_BELIEVED = (1e-9, 1e12)
"""Seconds and samples outside are no measurements."""
_SLOPE_LOW, _SLOPE_HIGH = -0.9, 0.4

_SCALARS = struct.Struct("<6d")
_MAX_SPEAKING = 64
"""Ranks whose pairs are kept, 450 bytes each, at most."""
_MAX_ARRAY_BYTES = 208 * 1024


Flags = npt.NDArray[np.bool_]
Value = TypeVar("Value", float, Array64)


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


class FixedCosts(NamedTuple):
    """What a step costs whatever its samples, of the ranks that speak for all and, last, of any other."""

    overhead_s: Array64
    saturation: Array64

    @classmethod
    def of_pairs(cls, pairs: PairSums, compute_s: Array64, most_s: Array64) -> "FixedCosts":
        """Least squares, each rank's drawn to that of all and that to 0, up to `most_s`; NaN where never measured."""
        fit, known = pairs.fit(compute_s, most_s), np.isfinite(compute_s)
        if not known.any():
            return cls(np.zeros(len(known) + 1), np.zeros(len(known) + 1))
        sums = float(fit.weighted_s.sum()), float(fit.weight.sum())
        shared = _slope(sums, _PRIOR / float(compute_s[known].mean()) ** 2, 0.0, math.inf)
        weight = _PRIOR / np.where(known, compute_s, 1.0) ** 2
        own = (fit.weighted_s + weight * shared) / (fit.weight + weight)
        own = np.where(known, np.clip(own, 0.0, most_s), shared)
        return cls(np.append(own, shared), np.append(fit.saturation, np.median(fit.saturation)))

    def overhead_of(self, world_size: int) -> Array64:
        """Seconds, one number per rank of the job."""
        return _spread(self.overhead_s, world_size)

    def saturation_of(self, world_size: int) -> Array64:
        """Samples, one number per rank of the job."""
        return _spread(self.saturation, world_size)


@dataclass(frozen=True)
class StepTimeFit:
    """The fit to the windows so far."""

    seconds_per_sample_W: Array64
    samples_W: Array64
    """Samples per step in the newest window in which the rank was measured; `compute_W` is of the same window."""
    compute_W: Array64
    pairs: PairSums
    """Kept of the ranks that speak for all."""
    fixed: FixedCosts
    sync_intercept_s: float = math.nan
    sync_slope: float = 0.0
    rest_s: float = math.nan
    slope_sums: tuple[float, float] = (0.0, 0.0)
    """Weighted sum of slopes, and of the weights."""
    sync_s: float = math.nan

    @classmethod
    def empty(cls, job: Job) -> "StepTimeFit":
        """Before the first window."""
        unknown, num_speaking = np.full(job.world_size, np.nan), len(range(0, job.world_size, _stride(job.world_size)))
        return cls(
            *(unknown, unknown, unknown),
            pairs=PairSums.empty(max(job.max_local_batch_sizes), num_speaking),
            fixed=FixedCosts(np.zeros(num_speaking + 1), np.zeros(num_speaking + 1)),
        )

    def observe(self, job: Job, window: Window, *, jump: float = JUMP, smoothing: float = SMOOTHING) -> "StepTimeFit":
        """The fit after one more window; an infinite `jump` makes a plain moving average."""
        known = np.isfinite(window.compute_W)
        if not known.any():
            return self
        pairs, slope_sums = self._pairs(window, self.model(job))
        longest_s = float(np.max(window.compute_W[known]))
        slope = _slope(slope_sums, _PRIOR, _SLOPE_LOW, _SLOPE_HIGH)
        intercept = max(window.sync_s - slope * longest_s, 0.0) if math.isfinite(window.sync_s) else math.nan
        samples_W, saturation_W = window.samples_W, self.fixed.saturation_of(len(known))
        expected = self._overhead_s + np.maximum(samples_W, saturation_W) * self.seconds_per_sample_W
        compute_W = filtered(expected, window.compute_W, jump, smoothing)
        most_W, speaking = fixed_share(samples_W) * compute_W, slice(None, None, _stride(len(known)))
        fixed = FixedCosts.of_pairs(pairs, compute_W[speaking], most_W[speaking])
        left_W = compute_W - np.minimum(fixed.overhead_of(len(known)), most_W)
        per_sample = left_W / np.maximum(samples_W, fixed.saturation_of(len(known)))
        return replace(
            self,
            seconds_per_sample_W=np.where(known, per_sample, self.seconds_per_sample_W),
            samples_W=np.where(known, samples_W, self.samples_W),
            compute_W=np.where(known, window.compute_W, self.compute_W),
            pairs=pairs,
            fixed=fixed,
            sync_intercept_s=float(filtered(self.sync_intercept_s, intercept, jump, smoothing)),
            sync_slope=slope,
            rest_s=float(filtered(self.rest_s, window.rest_s, math.inf, smoothing)),
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
            overhead_W=self._overhead_s,
            saturation_W=self.fixed.saturation_of(job.world_size),
            sync_intercept_s=self.sync_intercept_s if math.isfinite(self.sync_intercept_s) else 0.0,
            sync_slope=self.sync_slope,
            rest_s=self.rest_s if math.isfinite(self.rest_s) else 0.0,
        )

    def pack(self) -> bytes:
        """Bytes for the carry: float64 scalars, float32 per rank. Of very many ranks only what has room is kept."""
        scalars = _SCALARS.pack(self.sync_intercept_s, self.sync_slope, self.rest_s, *self.slope_sums, self.sync_s)
        arrays = (self.seconds_per_sample_W, self.samples_W, self.compute_W)[: _num_arrays(len(self.samples_W))]
        parts = (*self.fixed, self.pairs.values.ravel(), *arrays)
        return scalars + b"".join(array.astype("<f4").tobytes() for array in parts)

    @classmethod
    def unpack(cls, packed: bytes, job: Job) -> "StepTimeFit":
        """What `pack` gave; empty from anything else."""
        empty, num_arrays = cls.empty(job), _num_arrays(job.world_size)
        num_fixed, sums = len(empty.fixed.saturation), empty.pairs.values
        sizes = [num_fixed, num_fixed, sums.size, *[job.world_size] * num_arrays]
        if len(packed) != _SCALARS.size + 4 * sum(sizes):
            return empty
        intercept, slope, rest, ce, cc, sync = _SCALARS.unpack_from(packed)
        numbers = np.frombuffer(packed, dtype="<f4", offset=_SCALARS.size).astype(np.float64)
        overhead_s, saturation, kept, *arrays = np.split(numbers, np.cumsum(sizes)[:-1])
        per_sample, samples, compute = arrays + [empty.samples_W] * (3 - num_arrays)
        pairs = PairSums(max(job.max_local_batch_sizes), kept.reshape(sums.shape))
        fixed = FixedCosts(overhead_s, saturation)
        return cls(per_sample, samples, compute, pairs, fixed, intercept, slope, rest, (ce, cc), sync)

    @property
    def _overhead_s(self) -> Array64:
        """What is fixed, not more than is believed beside what a rank's samples take."""
        overhead_W, saturation_W = (
            part(len(self.samples_W)) for part in (self.fixed.overhead_of, self.fixed.saturation_of)
        )
        known = np.isfinite(self.samples_W) & np.isfinite(self.seconds_per_sample_W)
        if not known.any():
            return overhead_W
        share = fixed_share(self.samples_W)
        most_W = share / (1.0 - share) * self.seconds_per_sample_W * np.maximum(self.samples_W, saturation_W)
        return np.where(known, np.minimum(overhead_W, most_W), overhead_W)

    def _is_expected(self, samples_W: Array64, model: StepTime) -> Flags:
        """Which sizes changed because the global batch or its division did, and not because a rank's speed did.

        So did one that fell where the rank had been slower than others, or grew where it had been faster: the ranks
        were still being balanced, and a fast loop may go further than the model would.
        """
        known_W = np.where(np.isfinite(samples_W), samples_W, self.samples_W)
        total, before = (float(np.nansum(sizes)) for sizes in (known_W, self.samples_W))
        moved = _relative(self.samples_W, samples_W)
        off_proportion = _relative(self.samples_W * (total / before), samples_W)
        with np.errstate(invalid="ignore", divide="ignore"):
            share = _relative(self.samples_W, model.shares(total)) / moved
        level_s = model.compute_s(model.shares(before)).max()
        too_slow, too_fast = self.compute_W > JUMP * level_s, self.compute_W < level_s / JUMP
        in_proportion = abs(off_proportion) <= _SAME_CHANGE * abs(moved)
        by_time = (share >= 1.0 / _SAME_DIVISION) & (share <= _SAME_DIVISION)
        balanced = ((moved < 0.0) & too_slow) | ((moved > 0.0) & too_fast)
        result: Flags = by_time | in_proportion | balanced
        return result

    def _pairs(self, window: Window, model: StepTime | None) -> tuple[PairSums, tuple[float, float]]:
        """Add the pair of the last window and this one to both sums of products."""
        both = np.isfinite(self.samples_W) & np.isfinite(window.samples_W)
        if not both.any() or model is None:
            return self.pairs, self.slope_sums
        slope = _slope_pair(self.compute_W[both].max(), window.compute_W[both].max(), self.sync_s, window.sync_s)
        slope_sums = _added(self.slope_sums, slope, _SLOPE_DECAY)
        took_part = both & self._is_expected(window.samples_W, model)
        before, after = (np.where(took_part, sizes, np.nan) for sizes in (self.samples_W, window.samples_W))
        speaking = slice(None, None, _stride(len(both)))
        times_s = self.compute_W[speaking], window.compute_W[speaking]
        return self.pairs.add_pairs((before[speaking], after[speaking]), times_s), slope_sums


def filtered(old: Array64 | float, new: Array64 | float, jump: float, smoothing: float) -> Array64:
    """`new` where it jumped or is the first, else the moving average; `old` where nothing was measured."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.asarray(new) / old
    average = (1 - smoothing) * old + smoothing * new
    jumped = ~((ratio <= jump) & (ratio >= 1 / jump))
    result: Array64 = np.where(np.isnan(new), old, np.where(jumped, new, average))
    return result


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


def _relative(old: Value, new: Value) -> Value:
    return 2 * (new - old) / (new + old)


def _of_known(statistic: Callable[[Array64], np.floating], values: Array64) -> float:
    known = values[np.isfinite(values)]
    return float(statistic(known)) if known.size else math.nan


def _num_arrays(world_size: int) -> int:
    return min(3, _MAX_ARRAY_BYTES // (4 * world_size))


def _stride(world_size: int) -> int:
    """One of so many ranks speaks for all."""
    return -(-world_size // _MAX_SPEAKING)


def _spread(values: Array64, world_size: int) -> Array64:
    """Each speaking rank's own number, and the last one for all others."""
    spread = np.full(world_size, values[-1])
    spread[:: _stride(world_size)] = values[:-1]
    return spread
