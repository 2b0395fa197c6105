"""Learning-rate rules: what a change of the global batch size does to the learning rate.

The factor is put on right before `optimizer.step` and taken off right after it by restoring the very value, so that a
scheduler, a checkpoint or a log never sees it and nothing compounds.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch.utils.hooks import RemovableHandle

Rule = Literal["none", "linear", "sqrt"]

FACTORS: Mapping[Rule, Callable[[float], float]] = MappingProxyType(
    {
        "none": lambda ratio: 1.0,  # noqa: ARG005 - every rule takes the ratio
        "linear": lambda ratio: ratio,
        "sqrt": math.sqrt,
    }
)
"""Factor on the learning rate, from the scheduled global batch size over the one the user's rate was chosen for."""


class LearningRateScaler:
    """Scales the learning rates of one optimizer for the length of each step."""

    def __init__(self) -> None:
        self._saved: list[float | torch.Tensor] | None = None

    def scale(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Before `optimizer.step`: scale the learning rates."""
        self.restore(optimizer)  # where the last step raised
        if factor == 1.0:
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        self._saved = [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(factor)  # in place: captured graphs hold on to it
            else:
                group["lr"] *= factor

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """After `optimizer.step`: restore the learning rates exactly."""
        if self._saved is None:
            return
        for group, saved in zip(optimizer.param_groups, self._saved, strict=False):
            if isinstance(saved, torch.Tensor):
                group["lr"].copy_(saved)
            else:
                group["lr"] = saved
        self._saved = None


def scale_every_step(
    optimizer: torch.optim.Optimizer, factor: Callable[[], float]
) -> tuple[RemovableHandle, RemovableHandle]:
    """Scale whenever the optimizer steps; the handles' `remove` leaves it as it was."""
    scaler = LearningRateScaler()
    return (
        optimizer.register_step_pre_hook(lambda each, *_: scaler.scale(each, factor())),
        optimizer.register_step_post_hook(lambda each, *_: scaler.restore(each)),
    )
