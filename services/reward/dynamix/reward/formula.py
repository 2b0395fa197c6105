"""The reward formulas by name: two published ones and a time-aware one; pure functions of one metric window.

`paper-sgd`   r = w A_mean + alpha max(0, dA) - beta T_iter - delta (log2 b - 5)   (arXiv:2510.08522, section IV-D)
`paper-adam`  the same, - eta (sigma_norm^2 + sigma_norm)
`time-aware`  r = alpha dA - beta T_window

The published rewards can be raised by shrinking batches: T_iter is per iteration, however few samples it holds, and
the size term is one-sided. Under a barrier T_iter is the same for all ranks, whichever was slow. The time-aware one
telescopes: summed over a run it is alpha times the accuracy gained less beta times the training seconds spent, so no
choice of batch sizes earns anything but accuracy sooner. Judge policies by time to a held-out target, never by reward.
"""

import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from dynamix.schemas.messages import MetricWindow, OptimizerFamily, RankMetrics, RankReward, Reward

Formula = Literal["paper-sgd", "paper-adam", "time-aware"]

SMALLEST_PUBLISHED_SIZE_LOG2 = 5.0
"""log2(32): the published size term is 0 at b = 32 and 5 at b = 1024, so it only ever penalises LARGE batches."""


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of the terms. None is published (method section 3): ours are of the order that balances the terms."""

    accuracy: float = 1.0
    """Weight of the mean batch accuracy (w; the published formulas have 1)."""
    alpha: float = 1.0
    """Weight of the rise of accuracy, 0 ... 1."""
    beta: float = 0.1
    """Weight per second of iteration time (time-aware: window time): a step of 1 s costs a tenth of full accuracy."""
    delta: float = 0.01
    """Weight per doubling of the local batch size above 32: 0.05 at 1024."""
    eta: float = 0.01
    """Weight of the gradient noise sigma_norm^2 + sigma_norm, which is about 2 where the global batch equals the noise
    scale (adaptive optimizers)."""

    def __post_init__(self) -> None:
        """Raise ValueError for a weight that is not a finite number."""
        for name in Weights.__struct_fields__:
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, not {getattr(self, name)}")


TIME_ONLY = Weights(accuracy=0.0, alpha=0.0, beta=1.0, delta=0.0, eta=0.0)
"""For learning by `time-aware`: the return of an episode is minus its training time."""


def formula_for(family: OptimizerFamily) -> Formula:
    """The published formula for an optimizer: adaptive ones get the noise term."""
    return "paper-adam" if family == "adam" else "paper-sgd"


def reward_of(window: MetricWindow, weights: Weights, formula: Formula | None = None) -> Reward:
    """Rewards of a node's ranks for one window; without a `formula` the published one for the job's optimizer.

    Each reward is the exact sum of its terms in the order of the formula; a term that cannot be computed is left out.
    """
    chosen, ranks = formula or formula_for(window.optimizer_family), []
    for rank in window.ranks:
        terms = _terms(rank, window, weights, chosen)
        known = {name: weight * value for name, weight, value in terms if value is not None}
        ranks.append(RankReward(rank=rank.rank, reward=sum(known.values(), 0.0), terms=known))
    return Reward(
        job=window.job,
        generation=window.generation,
        window=window.window,
        node=window.node,
        formula=chosen,
        ranks=tuple(ranks),
    )


def _terms(
    rank: RankMetrics, window: MetricWindow, weights: Weights, formula: Formula
) -> Iterator[tuple[str, float, float | None]]:
    """Name, weight and value; `None` where the window does not know enough, so that "not measured" is never 0."""
    training, of_job = rank.training, window.job_metrics
    if formula == "time-aware":
        yield "accuracy_change", weights.alpha, of_job.accuracy_change  # of the whole job, a mean over samples
        yield "window_time", -weights.beta, of_job.step_time_s * window.num_steps  # seconds, slowest rank
        return
    rise, size, noise = training.accuracy_change, training.local_batch_size, of_job.sigma_norm_sq
    yield "accuracy", weights.accuracy, training.accuracy
    yield "accuracy_rise", weights.alpha, None if rise is None else max(0.0, rise)
    yield "iteration_time", -weights.beta, training.step_time_s
    yield "size", -weights.delta, math.log2(size) - SMALLEST_PUBLISHED_SIZE_LOG2 if size > 0 else None
    if formula == "paper-adam":  # the noise is `None` or negative while it is masked
        yield "gradient_noise", -weights.eta, None if noise is None or noise < 0 else noise + math.sqrt(noise)
