"""Sizes for a wanted global batch: limited steps, and the division among the ranks."""

import math
from typing import NamedTuple

import numpy as np

from dynamix.schemas.apportion import apportion
from dynamix.schemas.messages import Job

from .policy import Array64
from .step_time import StepTime

SPLIT_DEAD_BAND = 0.03
"""Sizes stay as they are while another division of the same batch shortens the predicted step by less than this."""


class Pace(NamedTuple):
    """Speed at which a global batch may follow its target.

    Nothing here changes where it settles. Decisions rule two windows later and the target is noisy, so that going the
    whole way at once swings about it.
    """

    max_change: float = 2.0
    """Greatest factor per decision, up or down."""
    gain: float = 0.7
    """Share of the logarithmic distance covered per decision."""
    dead_band: float = 0.03
    """Relative distance at which it stays."""

    def step(self, current: float, target: float) -> float:
        """The next global batch on the way from `current` to `target`, both positive."""
        distance = math.log(target / current)
        if abs(distance) <= math.log1p(self.dead_band):
            return current
        limit = math.log(self.max_change)
        return current * math.exp(min(max(self.gain * distance, -limit), limit))


def clamp_total(job: Job, global_batch_size: float) -> int:
    """The nearest global batch that the job's bounds can hold."""
    low, high = job.min_local_batch_size * job.world_size, sum(job.max_local_batch_sizes)
    return round(min(max(global_batch_size, low), high))


def divided(job: Job, total: int, weights: Array64) -> tuple[int, ...]:
    """`total` samples in proportion to `weights`, within the job's bounds."""
    upper = np.array(job.max_local_batch_sizes, dtype=np.int64)
    return apportion(total, weights, np.full_like(upper, job.min_local_batch_size), upper)


def equally(job: Job, total: int) -> tuple[int, ...]:
    """`total` samples in equal parts, within the job's bounds."""
    return divided(job, total, np.ones(job.world_size))


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
