"""`doubling`: the initial batch, doubled repeatedly (Smith et al., arXiv 1711.00489).

It doubles after a number of samples, as published schedules do, or when the training loss stalls.
"""

import math
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from dynamix.schemas.messages import Job
from dynamix.schemas.policies import POLICY_OPTIONS, Options

from .carry import pack, unpack
from .model.observation import Array32, decided_sizes, job_value, steps_of
from .model.step_time import StepTimeFit, window_of
from .options import allocation_of, option
from .policy import Decision
from .sizing import by_speed, clamp_total, scaled

LOSS_SMOOTHING = 0.2
"""Weight of the newest window in the average of the loss that is watched for stalls."""

MAX_DOUBLINGS = 30
"""More would leave every bound."""


class _Schedule(msgspec.Struct, array_like=True):
    """The progress of the schedule."""

    samples: float = 0.0
    """Samples since the last doubling."""
    num_doublings: int = 0
    loss: float = math.nan
    best_loss: float = math.inf
    num_stalled: int = 0
    """Windows since the averaged loss was last better than the best by `min_improvement`."""
    fit: StepTimeFit | None = None

    def observe(self, samples: float, loss: float, min_improvement: float) -> "_Schedule":
        seen = replace(self, samples=self.samples + (round(samples) if 0 < samples < math.inf else 0))
        if math.isnan(loss):
            return seen
        average = loss if math.isnan(self.loss) else (1 - LOSS_SMOOTHING) * self.loss + LOSS_SMOOTHING * loss
        if average < (1 - min_improvement) * self.best_loss:
            return replace(seen, loss=average, best_loss=average, num_stalled=0)
        return replace(seen, loss=average, num_stalled=self.num_stalled + 1)


class Doubling:
    """Doubles the global batch until the job's bounds; never shrinks it."""

    name = "doubling"
    version = 3
    options: ClassVar[Options] = POLICY_OPTIONS["doubling"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The initial batch times a power of two. Samples are counted from the job's own totals."""
        schedule = unpack(_Schedule, carry)
        samples = job_value(global_F, "throughput") * job_value(global_F, "step_time_s") * steps_of(job, global_F)
        improvement = option(self.options, job, "min_improvement")
        schedule = schedule.observe(samples, job_value(global_F, "loss"), improvement)
        if self._is_due(job, schedule):
            schedule = replace(schedule, samples=0.0, num_doublings=schedule.num_doublings + 1, num_stalled=0)
        fit = StepTimeFit.of(schedule.fit, job).observe(job, window_of(job, obs_WF, global_F))
        carry = pack(replace(schedule, fit=fit.kept()))
        sizes = self._sizes(job, schedule, fit, decided_sizes(obs_WF))
        reason = f"doubled {schedule.num_doublings} times; {schedule.num_stalled} windows without a lower loss"
        return Decision(allocation_of(self.options, job, sizes), carry=carry, reason=reason)

    def _is_due(self, job: Job, schedule: _Schedule) -> bool:
        known, every = self.options, option(self.options, job, "every_samples")
        is_stalled = schedule.num_stalled >= option(known, job, "patience_windows")
        is_over = schedule.num_doublings >= option(known, job, "max_doublings")
        return not is_over and (schedule.samples >= every if every > 0 else is_stalled)

    def _sizes(self, job: Job, schedule: _Schedule, fit: StepTimeFit, current: tuple[int, ...]) -> tuple[int, ...]:
        initial = job.initial_local_batch_sizes
        total = clamp_total(job, sum(initial) * 2 ** min(schedule.num_doublings, MAX_DOUBLINGS))
        if option(self.options, job, "proportional") == 1:
            return by_speed(job, total, fit.model(job), current)
        return scaled(job, total, initial)
