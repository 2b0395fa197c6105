"""The step-time model: how long a step of a given global batch takes, and its fit to the job's windows. Pure.

    c_i  = overhead_i + max(b_i, saturation_i) * seconds_per_sample_i    compute time of rank i with b_i samples
    c(B) = max_i c_i                                                     the barrier waits for the slowest
    T(B) = c(B) + exposed(c(B)) + kappa * c(B)^2 + rest
    exposed(c) = max(SYNC_FLOOR * intercept, intercept + slope * c)

`exposed` is the communication that compute does not hide. It carries the whole gradient whatever the sizes are, so it
is a constant that a larger batch shares out over more samples; where it overlaps with compute it shrinks as compute
grows (slope < 0), and what all ranks lose to each other's jitter grows with compute (slope > 0). Where a rank changes
its speed, the others wait for a step, until the division follows: a longer step meets more changes, and waits longer.

`StepTimeFit` is fitted to one window after the other and predicts by a `StepTime`; its fields are what it remembers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from dynamix.schemas.apportion import apportion, divide_by_time
from dynamix.schemas.messages import Job
from dynamix.schemas.policies import RATE_EXPONENTS, most_worthwhile, progress

from .policy import Array32, Array64, column, steps_of

SYNC_FLOOR = 0.1
"""Share of the communication that no overlap hides: the last bucket is ready only when compute ends."""
_CANDIDATES = 65
"""Batches compared per pass, geometric between the bounds; a second pass refines between the neighbours of the best."""


@dataclass(frozen=True)
class StepTime:
    """A fitted model of one job's steps, and the bounds of its ranks.

    Below its saturation a rank costs no less, so that it is given as much for nothing, and a global batch below what
    all have then is no faster. With B divided so that compute times are equal within the bounds, c(B) is piecewise
    linear: sorting the 2 W times at which a rank leaves its lower bound or its saturation, or meets its upper bound,
    gives it exactly, in O(W log W).
    """

    seconds_per_sample_W: Array64
    """Positive and finite for every rank."""
    lower_W: Array64
    upper_W: Array64
    overhead_W: Array64
    """Seconds of a step that do not depend on the batch."""
    saturation_W: Array64
    """Samples below which a batch costs no less; 0 where none is known."""
    sync_intercept_s: float = 0.0
    sync_slope: float = 0.0
    waiting_per_s: float = 0.0  # kappa
    rest_s: float = 0.0
    """Waiting for data, and the optimizer."""
    noise: float = 0.0
    """Relative noise of a window's mean compute times."""

    @property
    def smallest(self) -> float:
        """The least global batch that the bounds allow."""
        return float(self.lower_W.sum())

    @property
    def largest(self) -> float:
        """The greatest global batch that the bounds allow."""
        return float(self.upper_W.sum())

    def step_time_s(self, compute_s: Array64) -> Array64:
        """T for a compute time of the slowest rank."""
        hidden = self.sync_intercept_s + self.sync_slope * compute_s
        exposed = np.maximum(hidden, SYNC_FLOOR * max(self.sync_intercept_s, 0.0))
        return self.rest_s + compute_s + exposed + self.waiting_per_s * compute_s**2

    def balanced(self, global_batch_sizes: Array64) -> Array64:
        """T(B) with B divided so that compute times are equal where the bounds allow it."""
        return self.step_time_s(self.slowest_s(global_batch_sizes))

    def slowest_s(self, global_batch_sizes: Array64) -> Array64:
        """c(B) with that division."""
        batches, times_s = self._line
        least_s = float(np.max(self.compute_s(self._free)))
        return np.maximum(np.interp(global_batch_sizes, batches, times_s), least_s)

    def equal(self, global_batch_sizes: Array64) -> Array64:
        """T(B) with B divided equally, each share within its rank's bounds."""
        share = np.asarray(global_batch_sizes)[:, None] / len(self.seconds_per_sample_W)
        sizes = np.clip(share, self.lower_W, self.upper_W)
        return self.step_time_s(np.max(self.compute_s(sizes), axis=1))

    def of(self, local_batch_sizes: tuple[int, ...]) -> float:
        """T with exactly these sizes."""
        return float(self.step_time_s(self.compute_s(np.asarray(local_batch_sizes)).max(keepdims=True))[0])

    def compute_s(self, sizes: Array64) -> Array64:
        """Compute time of each rank; `sizes` has the ranks in its last dimension."""
        return self.overhead_W + np.maximum(sizes, self.saturation_W) * self.seconds_per_sample_W

    def shares(self, global_batch_size: float) -> Array64:
        """The sizes, not rounded, of equal compute times where the bounds allow it."""
        batches, times_s = self._line
        level_s = np.interp(global_batch_size, batches, times_s)
        sizes = (level_s - self.overhead_W) / self.seconds_per_sample_W
        return np.minimum(np.maximum(sizes, self._free), self.upper_W)

    def divide(self, total: int) -> tuple[int, ...]:
        """`total` samples in whole numbers, so that the slowest rank takes the least time that the bounds allow."""
        return divide_by_time(
            total,
            1.0 / self.seconds_per_sample_W,
            self.lower_W.astype(np.int64),
            self.upper_W.astype(np.int64),
            fixed=self.overhead_W / self.seconds_per_sample_W,
            saturations=np.rint(self.saturation_W).astype(np.int64),
        )

    @cached_property
    def _free(self) -> Array64:
        """Smallest useful size of each rank, within its bounds: fewer samples would save nothing."""
        return np.minimum(np.maximum(self.lower_W, self.saturation_W), self.upper_W)

    @cached_property
    def _line(self) -> tuple[Array64, Array64]:
        """Corners of the line from global batch to compute time, both ascending."""
        rates = 1 / self.seconds_per_sample_W
        corners_s = np.concatenate([self.compute_s(self._free), self.compute_s(self.upper_W)])
        order = np.argsort(corners_s, kind="stable")
        times_s = corners_s[order]
        samples_per_s = np.cumsum(np.concatenate([rates, -rates])[order])
        gained = np.concatenate([[0.0], np.cumsum(samples_per_s[:-1] * np.diff(times_s))])
        return np.maximum.accumulate(self._free.sum() + gained), times_s


def best_global_batch(job: Job, model: StepTime, noise_scale: float, weight: float) -> float:
    """The B whose steps are worth most per time, with B divided as `balanced` does, within the model's bounds.

    A step is worth the lesser of two estimates, over a step of the script's batch: by its noise and a `weight` of its
    stride lr(B), and by its stride alone. Which of them limits a training is not known. Where that gains less than the
    noise of the times, it is the script's batch.
    """
    low, high = max(model.smallest, 1.0), max(model.largest, 1.0)
    best = base = min(max(float(job.base_global_batch_size), low), high)
    exponent, most = RATE_EXPONENTS[job.learning_rate_rule], most_worthwhile(noise_scale, job.base_global_batch_size)

    def gain(batches: Array64) -> Array64:
        worth = progress(batches, noise_scale, weight * exponent, most)
        if exponent:
            of_base = progress(np.array([base]), noise_scale, weight * exponent, most)
            worth = np.minimum(worth, of_base * (np.minimum(batches, most) / base) ** exponent)
        return worth / np.maximum(model.balanced(batches), 1e-12)

    for _ in range(3):  # after two the steps are still 0.24 % of B, which is lost where a cliff follows
        candidates = np.geomspace(low, high, _CANDIDATES)
        index = int(np.argmax(gain(candidates)))
        best = float(candidates[index])
        low, high = float(candidates[max(0, index - 1)]), float(candidates[min(_CANDIDATES - 1, index + 1)])
    now, then = gain(np.array([base, best]))
    return best if then > (1.0 + model.noise) * now else base


class Window(NamedTuple):
    """Measurements of all ranks in one window; NaN where unknown, stale or without samples."""

    samples_W: Array64
    """Samples per step."""
    compute_W: Array64
    """Seconds per step, as all times here."""
    sync_s: float
    """Exposed communication; with waiting for slow ranks where these do not share their times."""
    rest_s: float
    num_steps: int
    waited_s: float = math.nan
    """Waiting for slower ranks, of the rank that waits least; NaN where ranks do not share their times."""


_BELIEVED = (1e-9, 1e12)
"""Seconds and samples outside are no measurements: squares of them would leave the range of a float32."""


def window_of(job: Job, obs_WF: Array32, global_F: Array32) -> Window:
    """The measurements in a policy's observation."""

    def believed(name: str) -> Array64:
        values = column(obs_WF, name)
        return np.where((values > _BELIEVED[0]) & (values < _BELIEVED[1]), values, np.nan)

    def of_known(statistic: Callable[[Array64], np.floating], values: Array64) -> float:
        known = values[np.isfinite(values)]
        return float(statistic(known)) if known.size else math.nan

    num_steps = steps_of(job, global_F)
    num_samples, compute_s, step_s = map(believed, ("num_samples", "compute_time_s", "step_time_s"))
    sync_s = np.where(column(obs_WF, "sync_time_s") == 0, 0.0, believed("sync_time_s"))
    usable = np.isfinite(num_samples) & np.isfinite(compute_s) & (column(obs_WF, "age_windows") == 0)
    rest_s, least_s = np.maximum(step_s - compute_s - sync_s, 0.0), of_known(np.min, sync_s[usable])
    communication_s = (sync_s - column(obs_WF, "waiting_time_s"))[usable]
    shared_s = float(np.median(communication_s).clip(0.0, least_s)) if communication_s.size else math.nan
    return Window(
        samples_W=np.where(usable, num_samples / num_steps, np.nan),
        compute_W=np.where(usable, compute_s, np.nan),
        sync_s=least_s if math.isnan(shared_s) else shared_s,
        rest_s=of_known(np.median, rest_s[usable]),
        num_steps=num_steps,
        waited_s=least_s - shared_s,
    )


JUMP = math.exp(0.2)
"""Ratio of change that is adopted at once (change point)."""
SMOOTHING = 0.3
"""Weight of the newest value while nothing jumps."""
CERTAIN = 3.0
"""Changes above this many standard deviations are adopted at once; also the least tolerance for a pair."""
PRIOR = 0.01
"""Weight of "as the other ranks" and of "no overlap", as squared relative changes: one change by 10 % equals it."""

NUM_SATURATIONS = 36
"""Saturations that are compared beside none: the largest size, and down from it in steps of `QUARTER_OCTAVE`."""
QUARTER_OCTAVE = 0.8408964152537145
"""2^-0.25: the nearest of them is off by 9 % at most."""
PAIR_DECAY = WAITING_DECAY = 0.95
"""Weight that a rank's older pairs, or times waited, keep when a new one comes."""
MIN_WEIGHT = 0.01
"""Squared relative changes of size, summed, from which on a rank's own times tell what is fixed: one change by 10 %."""
MIN_EXPLAINED = 0.01
"""Squared relative errors that a saturation must explain: one time that was 10 % off."""
MAX_UNEXPLAINED = 0.4
"""Share of the squared errors without a saturation that one with it may leave."""
LEAST_SHARE = 0.02
"""Least assumed share of the samples in a time, with as many samples as ranks have on average."""
PAIR_TOLERANCE = 0.1
"""With more samples a time may fall by this share, or rise by so much more than they do; else the speed has changed."""
SAME_CHANGE = 0.25
"""A size changed with the global batch if it is this near to its old share of it, in proportion to its own change."""
SAME_DIVISION = 2.0
"""It changed with the division if it did so by no more than this factor more, or less, than the model expects."""

SLOPE_DECAY, SLOPE_LOW, SLOPE_HIGH = 0.8, -0.9, 0.4
MIN_SLOPE_CHANGE, MAX_SLOPE_CHANGE = 0.1, 0.2
"""Relative change of the slowest compute time: a pair with less is left out, one with more has the weight of this."""

FIRST_NOISE = 0.02
"""Assumed before any was measured; evidence from pairs is stated for this noise."""
MOST_NOISE = 0.3
MOST_GROWN = 40.0
"""Squares of changes count as so many times the noise's at most: the first window is often a slow one."""
NOISE_SMOOTHING = 0.25
MEDIAN_SQUARE = 0.455
"""Median of the squares of normally distributed numbers of variance 1."""

MAX_SPEAKING = 64
"""Ranks whose pairs are kept, 450 bytes each, at most: one of so many ranks speaks for all."""
MAX_ARRAY_BYTES = 208 * 1024

Value = TypeVar("Value", float, Array64)


class StepTimeFit(msgspec.Struct, frozen=True, array_like=True):
    """The model's fit to the windows so far.

    - Fixed time and saturation of a rank: from pairs of neighbouring windows between which the global batch changed. A
      rank whose own size changed otherwise is left out: under a fast split its size follows its speed, and would be
      taken for a fixed cost. While a rank's sizes tell little, its fixed time is drawn to that of all ranks, and that
      to 0. Of very many ranks as many as the carry has room for speak for all.
    - Seconds per sample of a rank: (compute time - fixed time) / samples. The compute time is filtered against what was
      expected at these sizes: a change of more than `JUMP` is believed at once, a smaller one averaged. A rank that was
      never measured counts as the mean of the others.
    - Exposed communication: what is left of the time until all ranks were in step, once the slowest rank's filtered
      compute time and its waiting for others are taken off; filtered alike.
    - Slope of exposed communication over compute: pairs between which the slowest compute time changed. It is a local
      slope of a bent line, so that far jumps count no more than near ones, and old pairs are soon forgotten. While they
      tell little it is what ranks of this noise wait for each other, unless these share their times.
    - Waiting, kappa, only where ranks share their times: compute time beyond 1.1 c(B), over c(B)^2.
    - Noise: relative changes of a rank's times that no model of constant speed explains, the median of all ranks. Where
      processors are shared out in time slices it is a sixth of a window's mean and more. The noisier, the more changes
      are averaged instead of believed, and the more pairs it takes to be sure of a fixed cost.
    """

    seconds_per_sample_W: Array64
    samples_W: Array64
    """Samples per step in the newest window with its times; `compute_W` is of it, NaN where the speed changed."""
    compute_W: Array64
    pair_sums: Array64
    """Sums over the pairs of the ranks that speak for all; see `_with_pair`."""
    overhead_s: Array64
    """Fixed cost of a step: of the ranks that represent all and, last, of any other."""
    saturation: Array64
    """Samples; as `overhead_s`."""
    sync_intercept_s: float = math.nan
    sync_slope: float = 0.0
    rest_s: float = math.nan
    slope_sums: tuple[float, float] = (0.0, 0.0)
    waiting_sums: tuple[float, float] = (0.0, 0.0)
    """Sums of weighted slopes, and of the weights; of times waited, and of the squares of the slowest compute times."""
    barrier_s: float = math.nan
    sync_s: float = math.nan
    """The slowest rank's compute and sync time, less waiting, in the newest window in which they were measured."""
    noise_2: float = FIRST_NOISE**2
    """Square of the relative noise of a window's mean compute time."""

    @classmethod
    def empty(cls, job: Job) -> "StepTimeFit":
        """Before the first window."""
        unknown, num = np.full(job.world_size, np.nan), len(range(0, job.world_size, _stride(job.world_size)))
        sums = np.zeros((NUM_SATURATIONS + 1) * 3 * num)
        return cls(unknown, unknown, unknown, sums, np.zeros(num + 1), np.zeros(num + 1))

    @classmethod
    def of(cls, kept: "StepTimeFit | None", job: Job) -> "StepTimeFit":
        """Restore from what `kept` left in a carry of the same job; else empty."""
        empty = cls.empty(job)
        if kept is None:
            return empty
        known = {name: getattr(kept, name) for name in ("seconds_per_sample_W", "samples_W", "compute_W")}
        sums = ("pair_sums", "overhead_s", "saturation")
        is_of_job = all(len(getattr(kept, name)) == len(getattr(empty, name)) for name in sums)
        if not is_of_job or any(len(values) not in (0, job.world_size) for values in known.values()):
            return empty
        return replace(kept, **{name: values if len(values) else empty.samples_W for name, values in known.items()})

    def kept(self) -> "StepTimeFit":
        """For a carry: of very many ranks without what it has no room for."""
        num, none = MAX_ARRAY_BYTES // (4 * len(self.samples_W)), np.zeros(0)
        names = ("seconds_per_sample_W", "samples_W", "compute_W")[num:]
        return replace(self, **dict.fromkeys(names, none)) if names else self

    def observe(self, job: Job, window: Window, *, jump: float = JUMP, smoothing: float = SMOOTHING) -> "StepTimeFit":
        """The fit after one more window; an infinite `jump` makes a plain moving average."""
        known = np.isfinite(window.compute_W)
        if not known.any():
            return self
        samples_W, saturation_W = window.samples_W, _spread(self.saturation, len(known))
        expected = self._fixed_s + np.maximum(samples_W, saturation_W) * self.seconds_per_sample_W
        with np.errstate(invalid="ignore"):  # factors that neither the model nor the change of sizes explains
            grown, changed = samples_W / self.samples_W, 1.0 + PAIR_TOLERANCE
            late_W = window.compute_W / np.fmax(expected, self.compute_W * np.maximum(grown, 1.0))
            early_W = np.fmin(expected, self.compute_W * np.minimum(grown, 1.0)) / window.compute_W
        steady_W = np.where(np.fmax(late_W, early_W) > changed, np.nan, window.compute_W)
        noise_2 = self._noise_2(window)
        noise, doubt = math.sqrt(noise_2), max(noise_2 / FIRST_NOISE**2, 1.0)
        jump = max(jump, math.exp(CERTAIN * noise))
        pair_sums = self._with_pair(job, window._replace(compute_W=steady_W), max(PAIR_TOLERANCE, CERTAIN * noise))
        compute_W = filtered(expected, window.compute_W, jump, smoothing)
        barrier_s, sync_s, is_shared = float(window.compute_W[known].max()), window.sync_s, window.waited_s >= 0.0
        slowest_s = barrier_s if is_shared else float(compute_W[known].max())
        waits = 0.0 if is_shared else waiting_share(job, window.num_steps, noise_2)
        slope_sums, dc, de = self.slope_sums, barrier_s - self.barrier_s, sync_s - self.sync_s
        change = abs(_relative(self.barrier_s, barrier_s))
        # one that is too steep for overlap or jitter: the network itself changed
        if math.isfinite(de) and change >= MIN_SLOPE_CHANGE and -1.1 < de / dc < 0.6:
            weight = min(change, MAX_SLOPE_CHANGE) ** 2
            slope_sums = SLOPE_DECAY * slope_sums[0] + float(weight * de / dc), SLOPE_DECAY * slope_sums[1] + weight
        slope = (slope_sums[0] + doubt * PRIOR * waits) / (slope_sums[1] + doubt * PRIOR)
        slope = float(min(max(slope, SLOPE_LOW), max(SLOPE_HIGH, waits)))
        intercept = max(barrier_s + sync_s - (1.0 + slope) * slowest_s, 0.0) if math.isfinite(sync_s) else math.nan
        most_W, speaking = fixed_share(samples_W) * compute_W, slice(None, None, _stride(len(known)))
        overhead_s, saturation = fixed_costs(job, pair_sums, compute_W[speaking], most_W[speaking], doubt)
        left_W = compute_W - np.minimum(_spread(overhead_s, len(known)), most_W)
        per_sample = left_W / np.maximum(samples_W, _spread(saturation, len(known)))
        fit = StepTimeFit(
            seconds_per_sample_W=np.where(known, per_sample, self.seconds_per_sample_W),
            samples_W=np.where(known, samples_W, self.samples_W),
            compute_W=np.where(known, steady_W, self.compute_W),
            pair_sums=pair_sums,
            overhead_s=overhead_s,
            saturation=saturation,
            sync_intercept_s=float(filtered(self.sync_intercept_s, intercept, jump, smoothing)),
            sync_slope=slope,
            rest_s=float(filtered(self.rest_s, window.rest_s, math.inf, smoothing)),
            slope_sums=slope_sums,
            waiting_sums=self.waiting_sums,
            barrier_s=barrier_s if math.isfinite(sync_s) else self.barrier_s,
            sync_s=sync_s if math.isfinite(sync_s) else self.sync_s,
            noise_2=noise_2,
        )
        model = fit.model(job)
        if not is_shared or model is None or not np.isfinite(self.seconds_per_sample_W).any():
            return fit  # the first sizes are not divided by speed yet
        level_s = float(model.slowest_s(np.nansum(samples_W, keepdims=True))[0])
        sums = max(barrier_s + window.waited_s - changed * level_s, 0.0), level_s**2
        decayed = (WAITING_DECAY * before + now for before, now in zip(self.waiting_sums, sums, strict=True))
        return replace(fit, waiting_sums=tuple(decayed))

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
            overhead_W=self._fixed_s,
            saturation_W=_spread(self.saturation, job.world_size),
            sync_intercept_s=self.sync_intercept_s if math.isfinite(self.sync_intercept_s) else 0.0,
            sync_slope=self.sync_slope,
            waiting_per_s=self.waiting_sums[0] / max(self.waiting_sums[1], 1e-12),
            rest_s=self.rest_s if math.isfinite(self.rest_s) else 0.0,
            noise=math.sqrt(self.noise_2),
        )

    @property
    def _fixed_s(self) -> Array64:
        """The fixed time, at most what the samples' time leaves."""
        overhead_W, saturation_W = (_spread(part, len(self.samples_W)) for part in (self.overhead_s, self.saturation))
        known = np.isfinite(self.samples_W) & np.isfinite(self.seconds_per_sample_W)
        if not known.any():
            return overhead_W
        share = fixed_share(self.samples_W)
        most_W = share / (1.0 - share) * self.seconds_per_sample_W * np.maximum(self.samples_W, saturation_W)
        return np.where(known, np.minimum(overhead_W, most_W), overhead_W)

    def _noise_2(self, window: Window) -> float:
        """The noise after one more window: of changes that lie outside of all that a constant speed can explain."""
        with np.errstate(invalid="ignore", divide="ignore"):
            grown, slowed = window.samples_W / self.samples_W, window.compute_W / self.compute_W
            low, high = np.log(np.minimum(grown, 1.0)), np.log(np.maximum(grown, 1.0))
            unexplained = np.maximum(np.maximum(np.log(slowed) - high, low - np.log(slowed)), 0.0)
        known = unexplained[np.isfinite(unexplained)]
        if not known.size:
            return self.noise_2
        measured = float(np.median(known)) ** 2 / (2.0 * MEDIAN_SQUARE)
        measured = min(measured, MOST_GROWN * max(self.noise_2, FIRST_NOISE**2), MOST_NOISE**2)
        return self.noise_2 + NOISE_SMOOTHING * (measured - self.noise_2)

    def _with_pair(self, job: Job, window: Window, tolerance: float) -> Array64:
        """`pair_sums` with the pair of the last window and this one; old pairs fade only as new ones come.

        Two times t of a rank at two sizes are a pair. Under a saturation S it tells what is fixed: with
        m = max(size, S), m_1 t_0 - m_0 t_1 = fixed (m_1 - m_0), in short P = fixed Q. Both sides are divided by the
        mean m and the mean t, which makes their error the relative error of the times; Q P, Q^2 and P^2 are summed over
        pairs, for each of some saturations. A pair is left out where no model of a constant speed explains it, but for
        that tolerance.
        """
        both, model = np.isfinite(self.samples_W) & np.isfinite(window.samples_W), self.model(job)
        if not both.any() or model is None:
            return self.pair_sums
        took_part, speaking = both & self._is_expected(window.samples_W, model), slice(None, None, _stride(len(both)))
        size_0, size_1 = (np.where(took_part, sizes, np.nan)[speaking] for sizes in (self.samples_W, window.samples_W))
        time_0, time_1 = self.compute_W[speaking], window.compute_W[speaking]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            grown, slowed = size_1 / size_0, time_1 / time_0
            low, high = np.minimum(grown, 1.0), np.maximum(grown, 1.0)
            is_possible = (slowed >= low * (1.0 - tolerance)) & (slowed <= high * (1.0 + tolerance))
            usable = is_possible & (grown != 1.0)
            if not usable.any():
                return self.pair_sums
            at_0, at_1 = (np.maximum(size, _saturations(job)[:, None]) for size in (size_0, size_1))
            scale = (at_0 + at_1) * (time_0 + time_1) / 4.0
            p, q = (at_1 * time_0 - at_0 * time_1) / scale, (at_1 - at_0) / scale
            sums = self.pair_sums.reshape(NUM_SATURATIONS + 1, 3, -1)
            added = PAIR_DECAY * sums + np.stack([q * p, q * q, p * p], axis=1)
        return np.where(usable, added, sums).ravel()

    def _is_expected(self, samples_W: Array64, model: StepTime) -> npt.NDArray[np.bool_]:
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
        in_proportion = abs(off_proportion) <= SAME_CHANGE * abs(moved)
        by_time = (share >= 1.0 / SAME_DIVISION) & (share <= SAME_DIVISION)
        balanced = ((moved < 0.0) & too_slow) | ((moved > 0.0) & too_fast)
        result: npt.NDArray[np.bool_] = by_time | in_proportion | balanced
        return result


def fixed_costs(
    job: Job, pair_sums: Array64, times_s: Array64, most_s: Array64, doubt: float = 1.0
) -> tuple[Array64, Array64]:
    """Fixed seconds and saturations of ranks whose steps take `times_s` now, from the pairs.

    Least squares gives what is fixed under each saturation, at most `most_s`, and what it leaves unexplained tells the
    saturations apart. Each rank's fixed time is drawn to that of all, and that to 0. With a `doubt` above 1 it takes so
    much more evidence.
    """
    known, prior = np.isfinite(times_s), doubt * PRIOR
    if not known.any():
        return np.zeros(len(known) + 1), np.zeros(len(known) + 1)
    qp, qq, pp = pair_sums.reshape(NUM_SATURATIONS + 1, 3, -1).swapaxes(0, 1)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        fixed_s = np.clip(np.where(qq > 0.0, qp / qq, 0.0), 0.0, most_s)
        errors = pp - 2.0 * fixed_s * qp + fixed_s * fixed_s * qq
        enough = qq * times_s * times_s >= doubt * MIN_WEIGHT
    ranks = np.arange(qp.shape[1])
    best = np.where(enough, errors, np.inf).argmin(axis=0)
    at_best, at_none = errors[best, ranks], errors[0]
    is_better = (at_none - at_best >= doubt * MIN_EXPLAINED) & (at_best <= MAX_UNEXPLAINED * at_none)
    best = np.where(is_better, best, 0)
    saturation, weighted_s, weight = _saturations(job)[best], qp[best, ranks], qq[best, ranks]
    shared = max(float(weighted_s.sum()) / (float(weight.sum()) + prior / float(times_s[known].mean()) ** 2), 0.0)
    drawn = prior / np.where(known, times_s, 1.0) ** 2
    own = (weighted_s + drawn * shared) / (weight + drawn)
    own = np.where(known, np.clip(own, 0.0, most_s), shared)
    return np.append(own, shared), np.append(saturation, np.median(saturation))


def fixed_share(sizes: Array64) -> Array64:
    """Greatest assumed share of each rank's time that is fixed, at these sizes; NaN where a size is."""
    return 1.0 - LEAST_SHARE * np.minimum(sizes / np.nanmean(sizes), 1.0)


def waiting_share(job: Job, num_steps: int, noise_2: float) -> float:
    """The time per step that ranks wait for the slowest because of noise, over the compute time.

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
    return np.where(np.isnan(new), old, np.where(jumped, new, average))


def _saturations(job: Job) -> Array64:
    """Candidates: none, the largest size of any rank, and down from it."""
    steps = [float(max(job.max_local_batch_sizes)), *[QUARTER_OCTAVE] * (NUM_SATURATIONS - 1)]
    return np.append(0.0, np.cumprod(steps))


def _relative(old: Value, new: Value) -> Value:
    return 2 * (new - old) / (new + old)


def _stride(world_size: int) -> int:
    return -(-world_size // MAX_SPEAKING)


def _spread(values: Array64, world_size: int) -> Array64:
    """Each speaking rank's own number, and the last one for all others."""
    spread = np.full(world_size, values[-1])
    spread[:: _stride(world_size)] = values[:-1]
    return spread


# --- sizes for a wanted global batch ---------------------------------------------------------------------------------

GAIN = 0.7
"""Share of the logarithmic distance to the target that a decision covers."""
SPLIT_DEAD_BAND = 0.03
"""Sizes stay as they are while another division of the same batch shortens the predicted step by less than this."""


def towards(target: float, current: float, *, max_change: float, dead_band: float = 0.03) -> float:
    """The next global batch on the way from `current` to `target`, both positive.

    It changes by a factor of `max_change` at most, and stays within the relative distance `dead_band`. Nothing here
    changes where it settles: decisions take effect two windows later and the target is noisy, so that going the whole
    way at once swings about it.
    """
    distance = math.log(target / current)
    if abs(distance) <= math.log1p(dead_band):
        return current
    limit = math.log(max_change)
    return current * math.exp(min(max(GAIN * distance, -limit), limit))


def clamp_total(job: Job, global_batch_size: float) -> int:
    """The nearest global batch that the job's bounds can hold."""
    low, high = job.min_local_batch_size * job.world_size, sum(job.max_local_batch_sizes)
    return round(min(max(global_batch_size, low), high))


def divided(job: Job, total: int, weights: Array64) -> tuple[int, ...]:
    """`total` samples in proportion to `weights`, within the job's bounds."""
    upper = np.array(job.max_local_batch_sizes, dtype=np.int64)
    return apportion(total, weights, np.full_like(upper, job.min_local_batch_size), upper)


def scaled(job: Job, total: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """`total` samples in proportion to given sizes, within the job's bounds."""
    return divided(job, total, np.maximum(np.asarray(sizes, dtype=np.float64), 1.0))


def by_speed(job: Job, total: int, model: StepTime | None, current: tuple[int, ...]) -> tuple[int, ...]:
    """`total` samples divided so that compute times are equal.

    The current sizes stay while they sum to `total` and are nearly as good; without a model they are scaled.
    """
    if model is None:
        return current if sum(current) == total else scaled(job, total, current)
    proposed = model.divide(total)
    if sum(current) == total and model.of(proposed) > (1 - SPLIT_DEAD_BAND) * model.of(current):
        return current
    return proposed
