"""Arms: how a job is steered, from plain DDP without a session to each policy. Pure."""

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from dynamix.schemas.messages.allocation import ExchangePermission

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
    options: dict[str, float | str] = {}
    exchange: ExchangePermission = "exact"
    """How gradients may travel."""
    window_steps: int | None = None
    """k; `None`: what `attach` gives it."""
    max_local_batch_size: int | None = None
    """`None`: what `attach` gives it."""

    @property
    def label(self) -> str:
        """Such as `ddp@64`, `goodput:track=1` or `rule/exchange=local`."""
        spelled = (value if isinstance(value, str) else f"{value:g}" for value in self.options.values())
        options = ",".join(f"{name}={value}" for name, value in zip(self.options, spelled, strict=True))
        size = "" if self.local_batch_size == SCRIPT_SIZE and self.policy else f"@{self.local_batch_size}"
        exchange = "" if self.exchange == "exact" else f"/exchange={self.exchange}"
        return f"{self.policy or 'ddp'}{':' if options else ''}{options}{size}{exchange}"

    def learning_rate(self, world_size: int) -> float:
        """What the optimizer is given: a session scales it by itself."""
        if self.policy is not None:
            return LEARNING_RATE
        return LEARNING_RATE * math.sqrt(world_size * self.local_batch_size / BASE_GLOBAL_BATCH_SIZE)


STATICS = tuple(TargetArm(policy=None, local_batch_size=size) for size in STATIC_SIZES)
"""Plain DDP; the best one is found by search."""
GOODPUTS = (
    TargetArm(policy="goodput"),
    TargetArm(policy="goodput", options={"track": 1.0, "hysteresis": 0.0}),
    TargetArm(policy="goodput", options={"track": 1.0, "noise_multiplier": 4.0}),
)
"""Goodput as published, with the fast loop, and with our weight of the noise; the best one is found by search."""
RECORDED = TargetArm(policy="random", window_steps=3, max_local_batch_size=256)
"""Its sizes vary, which calibration needs, in as many windows as a short run can have; it is in no comparison."""


def keeping_sum(policy: str, local_batch_size: int) -> TargetArm:
    """A policy that only divides the global batch of a script of that size."""
    return TargetArm(policy=policy, local_batch_size=local_batch_size, global_batch="fixed")


def static_local(local_batch_size: int) -> TargetArm:
    """Local steps of a script of that size, whose sum stays."""
    arm = keeping_sum("static", local_batch_size)
    return msgspec.structs.replace(arm, options=dict(LOCAL_OPTIONS), exchange="local")


PLAIN, STATIC, PROPORTIONAL, GOODPUT, SPLIT, RULE, PPO, STATIC_LOCAL, RULE_LOCAL = ROWS = (
    *("plain", "static", "proportional", "goodput", "split", "rule", "ppo", "static-local", "rule-local"),
)
"""Rows of a comparison; `-local`: gradients may travel rounded, and parameters be averaged every few steps."""
LOCAL_OPTIONS: Mapping[str, float | str] = {"track": 1.0, "every": 4.0, "codec": "int8"}
"""How the static row that is compared with `rule` travels."""
DIVIDED = (PROPORTIONAL, SPLIT)
"""Rows that divide the global batch of the best static size, their gradients exact."""
