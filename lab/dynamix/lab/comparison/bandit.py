"""A bandit over three fixed exchanges, as a baseline of `ppo`: it tries each, and takes the fastest. Pure."""

from typing import ClassVar

import msgspec
import numpy as np
from msgspec.structs import replace

from dynamix.arbitrator.policies.policy import (
    Array32,
    Decision,
    allocation_of,
    decided_sizes,
    job_value,
    pack,
    steps_of,
    unpack,
)
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT, Exchange, is_permitted
from dynamix.schemas.policies import Options, track

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
    """`bandit`: the batch of the script, divided by the ranks, and of three exchanges the one of most progress."""

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
