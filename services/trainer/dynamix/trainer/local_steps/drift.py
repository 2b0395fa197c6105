"""Drift: how far the ranks' parameters came apart in rounds of local steps, over how far they came together. Pure.

With d_i how far rank i moved in a round, its weight w_i = n_i / sum n and d = sum_i w_i d_i:

    spread = sum_i w_i |d_i - d|^2 = sum_i w_i |d_i|^2 - |d|^2        moved = |d|^2

Each rank knows its own addend and |d|^2, so that the one gather of a window's end is enough; both are summed over
the window's rounds. With a codec that rounds, d is what arrived.
"""

from dataclasses import dataclass, field

import torch

Scalar = float | torch.Tensor
"""On a GPU it stays there until the window ends."""


@dataclass(slots=True)
class RoundDrift:
    """One rank's part of a round: its buckets' squared norms."""

    own: list[Scalar] = field(default_factory=list)
    """w_i |d_i|^2"""
    mean: list[Scalar] = field(default_factory=list)
    """|d|^2, the same on all ranks."""

    def add_own(self, moved: torch.Tensor, weight: float) -> None:
        """Add a bucket's d_i times w_i."""
        self.own.append(torch.dot(moved, moved) / weight if weight else 0.0)

    def add_mean(self, moved: torch.Tensor) -> None:
        """Add a bucket's d."""
        self.mean.append(torch.dot(moved, moved))
