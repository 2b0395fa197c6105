"""A clairvoyant cluster: before every step it divides a constant global batch by the rates that this step will have.

No policy can know these: slowdowns and jitter are looked up before the step. The division is the best for the computing
time of the slowest worker, within the scenario's bounds, and costs nothing. What it gains over a policy is what could
still be gained by dividing better; the best of several constant batches shows what the size alone is worth.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamix.schemas.messages import Action
from dynamix.schemas.messages.allocation import Allocation

from .cluster import VirtualCluster

Array64 = npt.NDArray[np.float64]
Sizes = npt.NDArray[np.int64]

FAR = 2.0**20
"""Samples: above every saturation, where computing times are straight lines."""
NUM_HALVINGS = 60
ROUNDING = 1e-9
"""Samples: a whole size may come out a little less."""


class ComputeTimes(NamedTuple):
    """Seconds that each worker computes on `size` samples: max(least_s, fixed_s + s_per_sample * size)."""

    least_s: Array64
    fixed_s: Array64
    s_per_sample: Array64

    def within(self, time_s: float, lower: Sizes, upper: Sizes) -> Sizes:
        """The greatest sizes that take no longer than this; the lower bound where even that takes longer."""
        sizes = np.floor((time_s - self.fixed_s) / self.s_per_sample + ROUNDING)
        return np.clip(np.where(self.least_s <= time_s, sizes, lower), lower, upper).astype(np.int64)


class ClairvoyantCluster(VirtualCluster):
    """Trains at its initial global batch, divided again for every step; actions are dropped."""

    def offer(self, action: Action) -> None:
        """Drop it."""

    def _step(self) -> None:
        step = self.position.step
        conditions = self._disturbances.at(step, self.time_s)

        def compute_s(sizes: Array64) -> Array64:
            return self._clock.step(sizes, conditions).compute_s

        initial = self._options.initial_allocation
        upper = np.array(self._identity.max_local_batch_sizes)
        lower = np.minimum(self._options.min_local_batch_size, upper)
        ones = np.ones(len(upper))
        least_s, near_s, far_s = compute_s(ones), compute_s(FAR * ones), compute_s(2 * FAR * ones)
        s_per_sample = (far_s - near_s) / FAR
        times = ComputeTimes(least_s, near_s - FAR * s_per_sample, s_per_sample)
        split = best_split(sum(initial.local_batch_sizes), times, lower, upper)
        self._schedule.revise(step, Allocation(split))
        super()._step()


def best_split(total: int, times: ComputeTimes, lower: Sizes, upper: Sizes) -> tuple[int, ...]:
    """The whole sizes with the shortest slowest time. A total outside of the bounds becomes the nearest within."""
    total = int(np.clip(total, lower.sum(), upper.sum()))
    low, high = 0.0, float(np.max(np.maximum(times.least_s, times.fixed_s + times.s_per_sample * upper)))
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        if times.within(middle, lower, upper).sum() >= total:
            high = middle
        else:
            low = middle
    sizes = times.within(high, lower, upper)
    while (excess := int(sizes.sum()) - total) > 0:
        ends_s = np.where(sizes > lower, times.fixed_s + times.s_per_sample * sizes, -np.inf)
        slowest = np.argsort(-ends_s, kind="stable")[:excess]
        sizes[slowest[sizes[slowest] > lower[slowest]]] -= 1
    return tuple(sizes.tolist())
