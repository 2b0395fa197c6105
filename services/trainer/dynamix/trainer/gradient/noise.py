"""The gradient noise estimator of docs/architecture.md ("Where gradients are weighted"), unbiased for unequal batches.

With g_i the mean gradient of rank i's b_i samples, G = sum_i (b_i / B) g_i and N the ranks with b_i > 0:

    S = (sum_i b_i |g_i|^2 - B |G|^2) / (N - 1)        trace of the per-sample gradient covariance
    |G_true|^2 = |G|^2 - S / B

Both are linear in |g_i|^2 and |G|^2, so each rank sums its own part over a window's steps and one gather per window is
enough. They are averaged over the window's measured steps, then smoothed over windows separately: their ratio is not.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dynamix.schemas.messages import GradientNoise
from dynamix.trainer.data.plan import Counts

NUM_FIRST_MEASURED = 20
"""Steps of a job that are all measured: the first decisions go furthest, and a single step tells them little."""


def is_measured(step: int, noise_every: int) -> bool:
    """Whether the noise is measured on a step of the job: on each of the first ones, then on every `noise_every`-th."""
    return step < NUM_FIRST_MEASURED or step % noise_every == 0


class RoundMeasurement:
    """On which steps of rounds of local steps the noise is measured: a round's first one, where one is due.

    All ranks have the same parameters only there. Later on their gradients also differ because their parameters do:
    in the last of five steps the noise scale came out ten times too large (8 ranks x 64 samples, a small MLP).
    """

    def __init__(self, noise_every: int) -> None:
        self._noise_every = noise_every
        self._is_due = False

    def measures(self, step: int, *, begins_round: bool) -> bool:
        """Whether the noise is measured on a step; call it for each local step."""
        self._is_due = self._is_due or is_measured(step, self._noise_every)
        if not (begins_round and self._is_due):
            return False
        self._is_due = False
        return True


@dataclass(slots=True)
class NoiseSums:
    """One rank's sums over the steps of a window."""

    num_steps: int = 0
    local_trace: float = 0.0
    """sum over steps of b_i |g_i|^2 / (N - 1)"""
    local_signal: float = 0.0
    """sum over steps of b_i |g_i|^2 / ((N - 1) B)"""
    global_trace: float = 0.0
    """sum over steps of B |G|^2 / (N - 1); the same on all ranks"""
    global_signal: float = 0.0
    """sum over steps of |G|^2 N / (N - 1); the same on all ranks"""

    def add_step(self, counts: Counts, rank: int, local_squared_norm: float, global_squared_norm: float) -> None:
        """Add a step. One whose |G|^2 is not finite, or with less than two active ranks, is left out by all alike."""
        if counts.num_active < 2 or not math.isfinite(global_squared_norm):
            return
        others = counts.num_active - 1
        weighted = counts.values[rank] * local_squared_norm / others if counts.values[rank] else 0.0
        self.num_steps += 1
        self.local_trace += weighted
        self.local_signal += weighted / counts.total
        self.global_trace += counts.total * global_squared_norm / others
        self.global_signal += global_squared_norm * counts.num_active / others


def window_moments(sums: Iterable[NoiseSums]) -> GradientNoise | None:
    """The moments of a window from the sums of all ranks, in rank order; `None` when it has no usable step.

    What every rank should know alike (|G|^2, the number of steps) is taken from rank 0: on mixed processors the same
    sum can differ in its last bits, and the result must not.
    """
    rows = list(sums)
    first = rows[0]
    if first.num_steps < 1:
        return None
    trace = (sum(row.local_trace for row in rows) - first.global_trace) / first.num_steps
    squared_norm = (first.global_signal - sum(row.local_signal for row in rows)) / first.num_steps
    if not (math.isfinite(trace) and math.isfinite(squared_norm)):
        return None
    return GradientNoise(trace=trace, squared_norm=squared_norm)


DECAY = 0.9
"""Weight of the average so far, after its first windows."""

START = 3
"""Exponent of the weights of the averages: after t windows the weight of window s grows as s^START."""


@dataclass(slots=True)
class NoiseAverage:
    """Averages of both moments over windows: exponential ones, which forget their start.

    The first gradients of a training are large: |G_true|^2 falls by a factor of ten within as many windows. The newest
    of t windows gets the weight max(1 - DECAY, 4 / (t + 3)), as in polynomial-decay averaging (Shamir and Zhang, 2013):
    while B_noise grows in proportion to t the ratio is a quarter too low, and after 37 windows late by
    DECAY / (1 - DECAY) of them.
    """

    trace: float = 0.0
    squared_norm: float = 0.0
    num_windows: int = 0
    """Windows taken in."""

    def observe_window(self, moments: GradientNoise | None) -> None:
        """Take in a window; one without moments changes nothing."""
        if moments is None:
            return
        self.num_windows += 1
        weight = max(1 - DECAY, (START + 1) / (self.num_windows + START))
        self.trace += weight * (moments.trace - self.trace)
        self.squared_norm += weight * (moments.squared_norm - self.squared_norm)

    @property
    def value(self) -> GradientNoise | None:
        """The averages; `None` before the first window with moments."""
        if self.num_windows == 0:
            return None
        return GradientNoise(trace=self.trace, squared_norm=self.squared_norm)


class SquaredNorms(NamedTuple):
    """Per bucket of one step, |g_i|^2 of this rank's mean gradient and |G|^2; on a GPU still on the device.

    Both are empty on a step that was not measured.
    """

    local: list[float | torch.Tensor]
    reduced: list[float | torch.Tensor]
    counts: Counts | None = None
    """Sizes of the measured step; `None` if it is the step that just ended."""


NOT_MEASURED = SquaredNorms([], [])


SKETCH_CELLS = 1024
"""Numbers of a sketch; the relative standard deviation of its |G|^2 is sqrt(2 / 1024) = 4.4 %."""


class NormSketch:
    """|G|^2 of a gradient that no rank has, from a few numbers that are summed over ranks.

    In local steps gradients are not sent. Every rank adds the elements of its own, with its weight b_i / B and random
    signs that all ranks share, to 1024 cells in turn. Summed over ranks these are the cells of G, whose squared norm is
    |G|^2 on average over signs (Alon, Matias and Szegedy, 1996).
    """

    def __init__(self, step: int, weight: float, own: float = 1.0) -> None:
        """`weight` and `own` are factors on what is added, for its part of G and for the rank's mean gradient."""
        self.cells = torch.zeros(SKETCH_CELLS)
        self.local = 0.0
        """|g_i|^2 of this rank's own gradient."""
        self._seed = step
        self._weight, self._own = weight, own
        self._num_elements = 0

    def add(self, gradient: torch.Tensor, number: int) -> None:
        """Add a bucket; the first one starts again, as another backward pass does."""
        if number == 0:
            self.cells.zero_()
            self.local, self._num_elements = 0.0, 0
        values = gradient.detach().to("cpu", torch.float32, copy=True)
        self.local += self._own**2 * float(torch.dot(values, values))
        generator = torch.Generator().manual_seed(self._seed << 20 | number)
        signs = torch.randint(0, 2, (len(values),), generator=generator, dtype=torch.int8)
        values.mul_(signs.mul_(2).sub_(1)).mul_(self._weight) if self._weight else values.zero_()
        start = self._num_elements % SKETCH_CELLS
        self._num_elements += len(values)
        padded = values.new_zeros(-(-(start + len(values)) // SKETCH_CELLS) * SKETCH_CELLS)
        padded[start : start + len(values)] = values
        self.cells += padded.view(-1, SKETCH_CELLS).sum(0)

    def reduced(self) -> float:
        """|G|^2, once the cells are summed."""
        return float(torch.dot(self.cells, self.cells))


class StepSketches(NamedTuple):
    """The sketches of one local step, by model, until their cells are summed."""

    sketches: list[NormSketch]
    counts: Counts
    """Sizes of the step."""
    over_mean: float
    """The gradient of the step over that of a loss that is a mean."""

    def norms(self) -> SquaredNorms:
        """The squared norms, once the cells are summed."""
        squared = self.over_mean**2 or 1.0
        local: list[float | torch.Tensor] = [each.local / squared for each in self.sketches]
        return SquaredNorms(local, [each.reduced() / squared for each in self.sketches], self.counts)
