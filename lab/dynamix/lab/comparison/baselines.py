"""Baselines of comparisons that are not policies of the product: OmniLearn's controller, and a bandit. Pure."""

from typing import ClassVar

import msgspec
import numpy as np
from msgspec.structs import replace

from dynamix.arbitrator.policies.policy import (
    Array32,
    Decision,
    allocation_of,
    column,
    decided_sizes,
    job_value,
    option,
    pack,
    steps_of,
    unpack,
)
from dynamix.schemas.apportion import apportion
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT, Allocation, Exchange, is_permitted
from dynamix.schemas.policies import Option, Options, track


class OmniLearn:
    """`omnilearn`: equalises the ranks' compute times at the job's own global batch.

    Written from the published description (Tyagi and Sharma, arXiv 2503.17469): a proportional controller whose error
    is the distance of a rank's compute time from the mean, b_i <- b_i mean(t) / t_i, on smoothed times, with a dead
    band and a constant global batch. Since b_i / t_i is rank i's throughput, that is a split by smoothed throughput. A
    size changes only together with all others, when any would move by more than the dead band; then the smoothing
    begins again.
    """

    name = "omnilearn"
    version = 1
    options: ClassVar[Options] = {
        "smoothing": Option(0.5, 0.01, 1, "weight of the newest throughput in the moving average"),
        "dead_band": Option(0.05, 0, 1, "relative change of any size from which all are set again"),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """Sizes in proportion to throughput, once one is off by the dead band; unchanged until every rank is known."""
        current = decided_sizes(obs_WF)
        samples, times_s = column(obs_WF, "num_samples"), column(obs_WF, "compute_time_s")
        is_known = (column(obs_WF, "age_windows") == 0) & (samples > 0) & (times_s > 0)
        newest = np.divide(samples, times_s, out=np.full_like(samples, np.nan), where=is_known)
        before = np.full(job.world_size, np.nan)
        if len(carry) == 4 * job.world_size:
            before = np.frombuffer(carry, dtype="<f4").astype(np.float64)
        average = before + option(self.options, job, "smoothing") * (newest - before)
        throughput = np.where(np.isnan(newest), before, np.where(np.isnan(before), newest, average))
        unchanged = Decision(Allocation(current), carry=throughput.astype("<f4").tobytes())
        if np.isnan(throughput).any():
            return unchanged
        upper = job.max_local_batch_sizes
        lower = [min(job.min_local_batch_size, most) for most in upper]
        wanted = apportion(sum(job.initial_local_batch_sizes), throughput, lower, upper)
        moved = np.abs(np.subtract(wanted, current)) / np.maximum(current, 1)
        is_small = float(moved.max()) <= option(self.options, job, "dead_band")
        return unchanged if is_small else Decision(Allocation(wanted))


ARMS = (EXACT, Exchange(codec="int8"), Exchange(codec="int8", every=4))
TRIAL, LAG, HOLD = 6, 2, 60
"""Windows of an arm's trial, of them those before it takes effect, and windows between two searches."""


class _Tried(msgspec.Struct, frozen=True, array_like=True):
    window: int = 0
    """Windows of this search."""
    gains: tuple[float, ...] = (0.0,) * len(ARMS)
    """Fall of the logarithm of the loss in each arm's windows."""
    times_s: tuple[float, ...] = (1e-9,) * len(ARMS)


class Bandit:
    """`bandit`: the batch of the script, divided by the ranks, and of three exchanges the one of most progress.

    A baseline of `ppo`: it tries each exchange, and takes the fastest.
    """

    name = "bandit"
    version = 1
    options: ClassVar[Options] = {"track": track(1)}

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The arm on trial; after the trials the best one."""
        tried = unpack(_Tried, carry)
        arm, age = divmod(tried.window, TRIAL)
        fall = float(-np.log1p(job_value(global_F, "loss_change") / job_value(global_F, "loss")))
        if arm < len(ARMS) and age >= LAG and np.isfinite(fall):
            taken_s = job_value(global_F, "step_time_s") * steps_of(job, global_F)
            gains = tuple(gain + fall * (at == arm) for at, gain in enumerate(tried.gains))
            times_s = tuple(time_s + taken_s * (at == arm) for at, time_s in enumerate(tried.times_s))
            tried = replace(tried, gains=gains, times_s=times_s)
        tried = replace(tried, window=tried.window + 1)
        arm = min(tried.window // TRIAL, len(ARMS))
        if arm == len(ARMS):
            permitted = [at for at, exchange in enumerate(ARMS) if is_permitted(exchange, job.exchange)]
            arm = max(permitted, key=lambda at: tried.gains[at] / tried.times_s[at])
        if tried.window > TRIAL * len(ARMS) + HOLD:
            tried = _Tried()
        allocation = allocation_of(self.options, job, decided_sizes(obs_WF), ARMS[arm])
        return Decision(allocation, pack(tried), reason=f"arm {ARMS[arm].label}")
