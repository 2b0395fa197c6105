"""Settings of the reward service: `DYNAMIX_REWARD_<FIELD>` or `--field`."""

import math
from typing import Literal

import msgspec

from .formula import Formula, Weights


class RewardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which formula, and the weights of its terms (see `dynamix.reward.formula.Weights`)."""

    formula: Literal["auto", "paper-sgd", "paper-adam", "time-aware"] = "auto"
    """`auto`: the published formula for each job's optimizer."""
    accuracy: float = 1.0
    """Weight of the mean batch accuracy."""
    alpha: float = 1.0
    """Weight of the rise of accuracy."""
    beta: float = 0.1
    """Weight per second of iteration time (time-aware: of window time)."""
    delta: float = 0.01
    """Weight per doubling of the local batch size above 32."""
    eta: float = 0.01
    """Weight of the gradient noise (adaptive optimizers)."""

    def __post_init__(self) -> None:
        """Raise ValueError for a weight that is not a finite number."""
        for name in ("accuracy", "alpha", "beta", "delta", "eta"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, not {getattr(self, name)}")

    def chosen_formula(self) -> Formula | None:
        """The formula for every job, or `None` to choose by each job's optimizer."""
        return None if self.formula == "auto" else self.formula

    def weights(self) -> Weights:
        """The weights as the formulas take them."""
        return Weights(accuracy=self.accuracy, alpha=self.alpha, beta=self.beta, delta=self.delta, eta=self.eta)
