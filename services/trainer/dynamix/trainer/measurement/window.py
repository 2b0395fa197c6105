"""What one rank gathers over the steps of a window.

Numbers that are still on a GPU stay there until the window ends: one transfer per window, no wait per step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dynamix.trainer.data.sampler import StepPlan
from dynamix.trainer.gradient.noise import NoiseSums
from dynamix.trainer.gradient.weighting import Reduction, SquaredNorms

Scalar = float | torch.Tensor
"""A number, or a tensor of one element."""


class _Step(NamedTuple):
    plan: StepPlan
    loss_sum: Scalar | None
    num_correct: Scalar | None
    norms: SquaredNorms


class WindowSums(NamedTuple):
    """A window's sums over this rank's samples."""

    num_samples: int
    loss_sum: float | None
    """`None` when a step came without a loss."""
    num_correct: float | None
    """`None` when a step came without a count."""
    noise: NoiseSums


class WindowSteps:
    """The steps since the last window ended."""

    def __init__(self, rank: int, reduction: Reduction) -> None:
        self._rank = rank
        self._reduction = reduction
        self._steps: list[_Step] = []

    def record_step(self, plan: StepPlan, loss: Scalar | None, num_correct: Scalar | None, norms: SquaredNorms) -> None:
        """Record a step: its loss as the user's criterion reduced it. A dummy batch counts for nothing."""
        count = plan.counts.values[self._rank]
        if count == 0:
            self._steps.append(_Step(plan, 0.0, 0.0, norms))
            return
        loss_sum = None if loss is None else detached(loss) * (count if self._reduction == "mean" else 1)
        correct = None if num_correct is None else detached(num_correct)
        self._steps.append(_Step(plan, loss_sum, correct, norms))

    def take_sums(self) -> WindowSums:
        """The sums since the last call; reads what is still on the device in one transfer."""
        steps, self._steps = self._steps, []
        return WindowSums(
            num_samples=sum(step.plan.counts.values[self._rank] for step in steps),
            loss_sum=_sum_if_known([step.loss_sum for step in steps]),
            num_correct=_sum_if_known([step.num_correct for step in steps]),
            noise=self._noise(steps),
        )

    def _noise(self, steps: Sequence[_Step]) -> NoiseSums:
        flat = to_floats([value for step in steps for part in step.norms for value in part])
        values = iter(flat)
        sums = NoiseSums()
        for step in steps:
            local = sum(next(values) for _ in step.norms.local)
            reduced = sum(next(values) for _ in step.norms.reduced)
            if step.norms.reduced:
                sums.add_step(step.plan.counts, self._rank, local, reduced)
        return sums


def _sum_if_known(values: Sequence[Scalar | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(to_floats(known)) if len(known) == len(values) else None


def detached(value: Scalar) -> Scalar:
    """A number that the user's code cannot change afterwards: at once on the CPU, a copy on the device elsewhere."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    return value.detach().clone().float() if value.is_cuda else value.item()


def to_floats(values: Sequence[Scalar]) -> list[float]:
    """The values as numbers; all that are on a device come over together."""
    tensors = [value.reshape(()).double() for value in values if isinstance(value, torch.Tensor)]
    fetched = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(fetched) if isinstance(value, torch.Tensor) else float(value) for value in values]
