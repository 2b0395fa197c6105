"""Learning-rate rules: what a change of the global batch size does to the learning rate.

The factor is put on right before `optimizer.step` and taken off right after it by restoring the very value, so that a
scheduler, a checkpoint or a log never sees it and nothing compounds.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch

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
    """Scales the learning rates of an optimizer for the length of each step."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[], float]) -> None:
        self._factor = factor
        self._saved: list[float | torch.Tensor] | None = None
        self.handles = (
            optimizer.register_step_pre_hook(self.before_step),
            optimizer.register_step_post_hook(self.after_step),
        )
        """Their `remove` leaves the optimizer as it was."""

    def before_step(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Hook before `optimizer.step`: scale the learning rates."""
        if self._saved is not None:  # the last step raised between the two hooks
            self._restore(optimizer)
        factor = self._factor()
        if factor == 1.0:
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        self._saved = [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(factor)  # in place: captured graphs hold on to it
            else:
                group["lr"] *= factor

    def after_step(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Hook after `optimizer.step`: restore the learning rates exactly."""
        if self._saved is not None:
            self._restore(optimizer)

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._saved is not None
        for group, saved in zip(optimizer.param_groups, self._saved, strict=False):
            if isinstance(saved, torch.Tensor):
                group["lr"].copy_(saved)
            else:
                group["lr"] = saved
        self._saved = None
