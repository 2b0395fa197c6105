"""Arms: how a job is steered, from plain DDP without a session to each policy. Pure."""

import math
from typing import Literal

import msgspec

SCRIPT_SIZE = 32
"""Samples per rank and step of the script as it was written: its learning rate was chosen for four such ranks."""
BASE_GLOBAL_BATCH_SIZE = 128
LEARNING_RATE = 0.02
"""For `BASE_GLOBAL_BATCH_SIZE` samples per step; any other number scales it by the square root rule, in every arm."""
STATIC_SIZES = (32, 64, 128, 256, 16, 8)
"""In the order of the search."""


class TargetArm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train."""

    policy: str | None
    """`None`: plain DDP with torch's own loader and sampler, without a session."""
    local_batch_size: int = SCRIPT_SIZE
    """To begin with."""
    global_batch: Literal["fixed", "adaptive"] = "adaptive"
    options: dict[str, float] = {}
    window_steps: int = 10
    """k, as in the scenarios of virtual clusters."""
    max_local_batch_size: int | None = None
    """`None`: what `attach` gives it."""

    @property
    def label(self) -> str:
        """Such as `ddp@64` or `goodput:track=1`."""
        options = ",".join(f"{name}={value:g}" for name, value in self.options.items())
        size = "" if self.local_batch_size == SCRIPT_SIZE and self.policy else f"@{self.local_batch_size}"
        return f"{self.policy or 'ddp'}{':' if options else ''}{options}{size}"

    def learning_rate(self, world_size: int) -> float:
        """What the optimizer is given: a session scales it by itself."""
        if self.policy is not None:
            return LEARNING_RATE
        return LEARNING_RATE * math.sqrt(world_size * self.local_batch_size / BASE_GLOBAL_BATCH_SIZE)


STATICS = tuple(TargetArm(policy=None, local_batch_size=size) for size in STATIC_SIZES)
"""Plain DDP; the best one is found by search."""
GOODPUTS = tuple(
    TargetArm(policy="goodput", options=options)
    for options in ({}, {"track": 1.0, "hysteresis": 0.0}, {"track": 1.0, "noise_multiplier": 4.0})
)
"""As published, with the fast loop, and with our weight of the noise; the best one is found by search."""
RECORDED = TargetArm(policy="random", window_steps=3, max_local_batch_size=256)
"""Its sizes vary, which calibration needs, in as many windows as a short run can have; it is in no comparison."""


def keeping_sum(policy: str, local_batch_size: int) -> TargetArm:
    """A policy that only divides the global batch of a script of that size."""
    return TargetArm(policy=policy, local_batch_size=local_batch_size, global_batch="fixed")


PLAIN, STATIC, PROPORTIONAL, GOODPUT, SPLIT, RULE, PPO = ROWS = (
    *("plain", "static", "proportional", "goodput", "split", "rule", "ppo"),
)
"""Rows of a comparison."""
DIVIDED = (PROPORTIONAL, SPLIT)
"""Rows that divide the global batch of the best static size."""
