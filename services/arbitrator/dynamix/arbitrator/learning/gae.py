"""Advantages and returns of one trajectory: pure numpy, decisions beside each other as columns.

A transition may last several windows (a decision rules until the next one does), so each has its own discount:
gamma to the power of its windows. Within a transition rewards are summed.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array64 = npt.NDArray[np.float64]


class Advantages(NamedTuple):
    """Advantages and returns, T x D each."""

    advantages: Array64
    returns: Array64
    """Advantages plus values: what the critic learns."""


def gae(
    rewards_TD: Array64,
    values_TD: Array64,
    next_values_D: Array64,
    discounts_T: Array64,
    gae_lambda: float,
) -> Advantages:
    """Generalised advantage estimation (Schulman et al., 2015, equation 16).

    Args:
        rewards_TD: sum over the windows of each transition.
        values_TD: the critic's, when the decision was made.
        next_values_D: the critic's at the end; zeros when the trajectory terminated, since nothing comes after. A
            trajectory that was cut off ends with what the critic expects.
        discounts_T: gamma ** windows of each transition.
        gae_lambda: 0 trusts the critic alone, 1 the rewards alone.
    """
    advantages = np.zeros_like(rewards_TD)
    following, advantage = next_values_D, np.zeros_like(next_values_D)
    for t in reversed(range(len(rewards_TD))):
        delta = rewards_TD[t] + discounts_T[t] * following - values_TD[t]
        advantage = delta + discounts_T[t] * gae_lambda * advantage
        advantages[t], following = advantage, values_TD[t]
    return Advantages(advantages, advantages + values_TD)


def discounted_returns(rewards_TD: Array64, discounts_T: Array64) -> Array64:
    """The discounted sum of rewards from each transition on: the weight of the paper's objective, without a critic."""
    no_values = np.zeros_like(rewards_TD)
    return gae(rewards_TD, no_values, np.zeros(rewards_TD.shape[1]), discounts_T, gae_lambda=1.0).returns


def explained_variance(values: Array64, returns: Array64) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 an uninformative one; NaN without variance."""
    variance = float(np.var(returns))
    return float("nan") if variance == 0 else 1 - float(np.var(returns - values)) / variance
