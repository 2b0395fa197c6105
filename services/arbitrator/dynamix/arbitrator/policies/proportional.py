"""`proportional`: the job's global batch, divided in proportion to each rank's measured throughput.

It helps with slow processors only: the time of a slow link does not depend on the sizes.
"""

import math
from typing import ClassVar

import numpy as np

from dynamix.schemas.apportion import apportion
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import Allocation
from dynamix.schemas.policies import POLICY_OPTIONS, Options

from .model.observation import Array32, Array64, decided_sizes
from .model.step_time import filtered, window_of
from .options import allocation_of, option
from .policy import Decision


class Proportional:
    """Equalises compute times at a constant global batch size."""

    name = "proportional"
    version = 1
    options: ClassVar[Options] = POLICY_OPTIONS["proportional"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """A split in proportion to smoothed throughput; the last decision while it is nearly as good.

        A rank that was never measured keeps its size, and the others share what is left of the global batch.
        """
        current = decided_sizes(obs_WF)
        smoothing = option(self.options, job, "smoothing")
        measured = window_of(job, obs_WF, global_F)  # NaN for a stale row and for a rank that had no samples
        previous = _unpack(carry, job.world_size)
        smoothed = filtered(previous, measured.samples_W / measured.compute_W, math.inf, smoothing)
        proposed = _split(job, current, smoothed)
        gain = 1 - _step_time_s(proposed, smoothed) / max(_step_time_s(current, smoothed), 1e-12)
        settled = sum(current) == sum(proposed) and gain <= option(self.options, job, "dead_band")
        sizes = current if settled else proposed
        allocation = allocation_of(self.options, job, sizes)
        return Decision(
            allocation,
            carry=smoothed.astype("<f4").tobytes(),
            reason=_reason(allocation, gain, settled=settled, measured=not np.isnan(smoothed).all()),
        )


def _reason(allocation: Allocation, gain: float, *, settled: bool, measured: bool) -> str:
    if allocation.split == "tracking":
        return f"the ranks divide {allocation.global_batch_size} samples by their speed after every step"
    if not measured:
        return "no rank's speed is known yet"
    if settled:
        return f"another split would make computing {max(gain, 0.0):.1%} shorter, which is too little"
    return f"divided by measured speed: computing gets {gain:.1%} shorter"


def _split(job: Job, current: tuple[int, ...], throughput: Array64) -> tuple[int, ...]:
    """The job's global batch in proportion to throughput, over the ranks whose throughput is known."""
    known = ~np.isnan(throughput)
    if not known.any():
        return current
    sizes = np.array(current, dtype=np.int64)
    left = sum(job.initial_local_batch_sizes) - int(sizes[~known].sum())
    upper = np.array(job.max_local_batch_sizes, dtype=np.int64)[known]
    sizes[known] = apportion(left, throughput[known], np.full_like(upper, job.min_local_batch_size), upper)
    return tuple(sizes.tolist())


def _step_time_s(sizes: tuple[int, ...], throughput: Array64) -> float:
    """Compute time of the slowest rank known: what a step cannot be shorter than; 0 when none is."""
    known = ~np.isnan(throughput)
    return float(np.max(np.asarray(sizes, dtype=np.float64)[known] / throughput[known], initial=0.0))


def _unpack(carry: bytes, world_size: int) -> Array64:
    if len(carry) != 4 * world_size:
        return np.full(world_size, np.nan)
    throughput = np.frombuffer(carry, dtype="<f4").astype(np.float64)
    return np.where((throughput > 0) & np.isfinite(throughput), throughput, np.nan)
