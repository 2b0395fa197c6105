"""The step-time model: how long a step of a given global batch takes. Pure numpy; fitted in `step_time_fit`.

    c_i  = overhead_i + max(b_i, saturation_i) * seconds_per_sample_i    compute time of rank i with b_i samples
    c(B) = max_i c_i                                                     the barrier waits for the slowest
    T(B) = c(B) + exposed(c(B)) + rest
    exposed(c) = max(SYNC_FLOOR * intercept, intercept + slope * c)

`exposed` is the communication that compute does not hide. It carries the whole gradient whatever the sizes are, so it
is a constant that a larger batch shares out over more samples; where it overlaps with compute it shrinks as compute
grows (slope < 0), and what all ranks lose to each other's jitter grows with compute (slope > 0).

Below its saturation a rank costs no less, so that it is given as much for nothing, and a global batch below what all
have then is no faster. With B divided so that compute times are equal within the bounds, c(B) is piecewise linear:
sorting the 2 W times at which a rank leaves its lower bound or its saturation, or meets its upper bound, gives it
exactly, in O(W log W).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dynamix.schemas.apportion import divide_by_time
from dynamix.schemas.progress import progress

from .observation import Array64

SYNC_FLOOR = 0.1
"""Share of the communication that no overlap hides: the last bucket is ready only when compute ends."""

_CANDIDATES = 65
"""Batches compared per pass, geometric between the bounds; a second pass refines between the neighbours of the best."""


@dataclass(frozen=True)
class StepTime:
    """A fitted model of one job's steps, and the bounds of its ranks."""

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
    rest_s: float = 0.0
    """Waiting for data, and the optimizer."""

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
        total: Array64 = self.rest_s + compute_s + exposed
        return total

    def balanced(self, global_batch_sizes: Array64) -> Array64:
        """T(B) with B divided so that compute times are equal where the bounds allow it."""
        return self.step_time_s(self.slowest_s(global_batch_sizes))

    def slowest_s(self, global_batch_sizes: Array64) -> Array64:
        """c(B) with that division."""
        batches, times_s = self._line
        slowest: Array64 = np.maximum(np.interp(global_batch_sizes, batches, times_s), self._least_s)
        return slowest

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
        seconds: Array64 = self.overhead_W + np.maximum(sizes, self.saturation_W) * self.seconds_per_sample_W
        return seconds

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
        """What each rank has at least, within its bounds: fewer samples would save nothing."""
        return np.minimum(np.maximum(self.lower_W, self.saturation_W), self.upper_W)

    @cached_property
    def _least_s(self) -> float:
        """Compute time of the slowest rank at its fewest: up to the batch reached by then, samples are free."""
        return float(np.max(self.compute_s(self._free)))

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


def best_global_batch(model: StepTime, noise_scale: float, rate_exponent: float = 0.0, most: float = math.inf) -> float:
    """The B of the greatest progress(B) / T(B) with B divided as `balanced` does, within the model's bounds."""
    low, high = max(model.smallest, 1.0), max(model.largest, 1.0)
    best = low
    for _ in range(3):  # after two the steps are still 0.24 % of B, which is lost where a cliff follows
        candidates = np.geomspace(low, high, _CANDIDATES)
        worth = progress(candidates, noise_scale, rate_exponent, most)
        index = int(np.argmax(worth / np.maximum(model.balanced(candidates), 1e-12)))
        best = float(candidates[index])
        low, high = float(candidates[max(0, index - 1)]), float(candidates[min(_CANDIDATES - 1, index + 1)])
    return best
