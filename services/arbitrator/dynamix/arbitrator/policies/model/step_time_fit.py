"""Fits the step-time model to windows, one after the other. Pure; the whole memory packs into a policy's carry.

- Fixed time and saturation of a rank: `rank_times`, from pairs of neighbouring windows between which the global batch
  changed. A rank whose own size changed otherwise is left out: under a fast split its size follows its
  speed, and would be taken for a fixed cost. While a rank's sizes tell little, its fixed time is drawn to that of all
  ranks, and that to 0. Of very many ranks as many as the carry has room for speak for all.
- Seconds per sample of a rank: (compute time - fixed time) / samples. The compute time is filtered against what was
  expected at these sizes: a change of more than `JUMP` is believed at once, a smaller one averaged. A rank that was
  never measured counts as the mean of the others.
- Exposed communication: what is left of the time until all ranks were in step, once the slowest rank's filtered compute
  time is taken off; filtered alike.
- Slope of exposed communication over compute: pairs between which the slowest compute time changed. It is a local slope
  of a bent line, so that far jumps count no more than near ones, and old pairs are soon forgotten. While they tell
  little it is what ranks of this noise wait for each other.
- Noise: relative changes of a rank's times that no model of constant speed explains, the median of all ranks. Where
  processors are shared out in time slices it is a sixth of a window's mean and more. The noisier, the more changes are
  averaged instead of believed, and the more pairs it takes to be sure of a fixed cost.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dynamix.schemas.messages import Job

from .observation import Array32, Array64, column, steps_of
from .rank_times import TOLERANCE, PairSums, fixed_share
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

FIRST_NOISE = 0.02
"""Taken for granted before any was measured; what pairs must show is said for this noise."""
_MOST_NOISE = 0.3
_MOST_GROWN = 40.0
"""Squares of changes count as so many times the noise's at most: the first window is often a slow one."""
_NOISE_SMOOTHING = 0.25
_MEDIAN_SQUARE = 0.455
"""Median of the squares of normally distributed numbers of variance 1."""
_CERTAIN = 3.0
"""Noises by which a value must change to be believed at once, and which leave a pair as it is."""

_SCALARS = struct.Struct("<8d")
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
    num_steps: int


def window_of(job: Job, obs_WF: Array32, global_F: Array32) -> Window:
    """The measurements in a policy's observation."""
    num_steps = steps_of(job, global_F)
    num_samples, compute_s, step_s = (
        _believed(obs_WF, name) for name in ("num_samples", "compute_time_s", "step_time_s")
    )
    sync_s = np.where(column(obs_WF, "sync_time_s") == 0, 0.0, _believed(obs_WF, "sync_time_s"))
    usable = np.isfinite(num_samples) & np.isfinite(compute_s) & (column(obs_WF, "age_windows") == 0)
    rest_s = np.maximum(step_s - compute_s - sync_s, 0.0)
    return Window(
        samples_W=np.where(usable, num_samples / num_steps, np.nan),
        compute_W=np.where(usable, compute_s, np.nan),
        sync_s=_of_known(np.min, sync_s[usable]),
        rest_s=_of_known(np.median, rest_s[usable]),
        num_steps=num_steps,
    )


class FixedCosts(NamedTuple):
    """What a step costs whatever its samples, of the ranks that speak for all and, last, of any other."""

    overhead_s: Array64
    saturation: Array64

    @classmethod
    def of_pairs(cls, pairs: PairSums, compute_s: Array64, most_s: Array64, doubt: float = 1.0) -> "FixedCosts":
        """Least squares, each rank's drawn to that of all and that to 0, up to `most_s`; NaN where never measured.

        With a `doubt` above 1 it takes so much more evidence.
        """
        fit, known, prior = pairs.fit(compute_s, most_s, doubt), np.isfinite(compute_s), doubt * _PRIOR
        if not known.any():
            return cls(np.zeros(len(known) + 1), np.zeros(len(known) + 1))
        sums = float(fit.weighted_s.sum()), float(fit.weight.sum())
        shared = _slope(sums, prior / float(compute_s[known].mean()) ** 2, 0.0, math.inf)
        weight = prior / np.where(known, compute_s, 1.0) ** 2
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
    barrier_s: float = math.nan
    sync_s: float = math.nan
    """The slowest rank's compute and sync time in the newest window in which they were measured."""
    noise_2: float = FIRST_NOISE**2
    """Square of the relative noise of a window's mean compute time."""

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
        noise_2 = self._noise_2(window)
        noise, doubt = math.sqrt(noise_2), max(noise_2 / FIRST_NOISE**2, 1.0)
        jump = max(jump, math.exp(_CERTAIN * noise))
        pairs = self._pairs(window, self.model(job), noise)
        samples_W, saturation_W = window.samples_W, self.fixed.saturation_of(len(known))
        expected = self._overhead_s + np.maximum(samples_W, saturation_W) * self.seconds_per_sample_W
        compute_W = filtered(expected, window.compute_W, jump, smoothing)
        slowest_s, barrier_s = (float(np.max(times[known])) for times in (compute_W, window.compute_W))
        exposed_s, waits = barrier_s + window.sync_s - slowest_s, waiting_share(job, window.num_steps, noise_2)
        pair = _slope_pair(self.barrier_s, barrier_s, self.sync_s, window.sync_s)
        slope_sums = _added(self.slope_sums, pair, _SLOPE_DECAY)
        slope = _slope(slope_sums, doubt * _PRIOR, _SLOPE_LOW, max(_SLOPE_HIGH, waits), waits)
        intercept = max(exposed_s - slope * slowest_s, 0.0) if math.isfinite(window.sync_s) else math.nan
        most_W, speaking = fixed_share(samples_W) * compute_W, slice(None, None, _stride(len(known)))
        fixed = FixedCosts.of_pairs(pairs, compute_W[speaking], most_W[speaking], doubt)
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
            barrier_s=barrier_s if math.isfinite(window.sync_s) else self.barrier_s,
            sync_s=window.sync_s if math.isfinite(window.sync_s) else self.sync_s,
            noise_2=noise_2,
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
        scalars = _SCALARS.pack(
            *(self.sync_intercept_s, self.sync_slope, self.rest_s, *self.slope_sums),
            *(self.barrier_s, self.sync_s, self.noise_2),
        )
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
        intercept, slope, rest, weighted, weight, *newest = _SCALARS.unpack_from(packed)
        numbers = np.frombuffer(packed, dtype="<f4", offset=_SCALARS.size).astype(np.float64)
        overhead_s, saturation, kept, *arrays = np.split(numbers, np.cumsum(sizes)[:-1])
        per_sample, samples, compute = arrays + [empty.samples_W] * (3 - num_arrays)
        pairs = PairSums(max(job.max_local_batch_sizes), kept.reshape(sums.shape))
        fixed = FixedCosts(overhead_s, saturation)
        return cls(per_sample, samples, compute, pairs, fixed, intercept, slope, rest, (weighted, weight), *newest)

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

    def _noise_2(self, window: Window) -> float:
        """The noise after one more window: of changes that lie outside of all that a constant speed can explain."""
        with np.errstate(invalid="ignore", divide="ignore"):
            grown, slowed = window.samples_W / self.samples_W, window.compute_W / self.compute_W
            low, high = np.log(np.minimum(grown, 1.0)), np.log(np.maximum(grown, 1.0))
            unexplained = np.maximum(np.maximum(np.log(slowed) - high, low - np.log(slowed)), 0.0)
        known = unexplained[np.isfinite(unexplained)]
        if not known.size:
            return self.noise_2
        measured = float(np.median(known)) ** 2 / (2.0 * _MEDIAN_SQUARE)
        measured = min(measured, _MOST_GROWN * max(self.noise_2, FIRST_NOISE**2), _MOST_NOISE**2)
        return self.noise_2 + _NOISE_SMOOTHING * (measured - self.noise_2)

    def _pairs(self, window: Window, model: StepTime | None, noise: float) -> PairSums:
        """Add the pair of the last window and this one to the sums of products."""
        both = np.isfinite(self.samples_W) & np.isfinite(window.samples_W)
        if not both.any() or model is None:
            return self.pairs
        took_part = both & self._is_expected(window.samples_W, model)
        before, after = (np.where(took_part, sizes, np.nan) for sizes in (self.samples_W, window.samples_W))
        speaking = slice(None, None, _stride(len(both)))
        times_s = self.compute_W[speaking], window.compute_W[speaking]
        tolerance = max(TOLERANCE, _CERTAIN * noise)
        return self.pairs.add_pairs((before[speaking], after[speaking]), times_s, tolerance)


def waiting_share(job: Job, num_steps: int, noise_2: float) -> float:
    """What ranks wait for the slowest in each step because of their noise, over the compute time.

    The greatest of n normally distributed numbers of variance 1 is near sqrt(2 log n) - 0.6 on the mean; a step's noise
    is that of the mean over a window's steps times the root of their number.
    """
    greatest = max(math.sqrt(2.0 * math.log(job.world_size)) - 0.6, 0.0)
    return greatest * math.sqrt(num_steps * max(noise_2 - FIRST_NOISE**2, 0.0))


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


def _slope(sums: tuple[float, float], prior: float, low: float, high: float, drawn_to: float = 0.0) -> float:
    """Least squares through the origin, drawn to a slope by the prior's weight."""
    return float(min(max((sums[0] + prior * drawn_to) / (sums[1] + prior), low), high))


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
