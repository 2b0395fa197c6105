"""Advantages and returns against the definitions, summed term by term."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamix.arbitrator.learning.ppo import discounted_returns, gae


def definition(
    rewards: list[float], values: list[float], next_value: float, discounts: list[float], gae_lambda: float
) -> list[float]:
    """A_t = sum_l (prod_{j<l} lambda g_{t+j}) delta_{t+l}: the sum itself, not the recursion."""
    following = [*values[1:], next_value]
    deltas = [r + g * v1 - v0 for r, g, v0, v1 in zip(rewards, discounts, values, following, strict=True)]
    advantages = []
    for t in range(len(rewards)):
        total, weight = 0.0, 1.0
        for later in range(t, len(rewards)):
            total += weight * deltas[later]
            weight *= discounts[later] * gae_lambda
        advantages.append(total)
    return advantages


numbers = st.floats(-10, 10)


@given(st.lists(st.tuples(numbers, numbers, st.integers(1, 4)), min_size=1, max_size=20), numbers, st.floats(0, 1))
def test_advantages_and_returns_equal_their_definition(
    rows: list[tuple[float, float, int]], next_value: float, gae_lambda: float
) -> None:
    rewards, values, windows = (list(column) for column in zip(*rows, strict=True))
    discounts = [0.9**n for n in windows]
    expected = definition(rewards, values, next_value, discounts, gae_lambda)
    advantages, returns = gae(
        np.array(rewards)[:, None],
        np.array(values)[:, None],
        np.array([next_value]),
        np.array(discounts),
        gae_lambda,
    )
    assert advantages[:, 0] == pytest.approx(expected, abs=1e-9)
    assert returns[:, 0] == pytest.approx(np.add(expected, values), abs=1e-9)


def test_a_truncated_trajectory_ends_with_the_critics_value_and_a_terminated_one_with_zero() -> None:
    rewards, values, discounts = np.array([[1.0]]), np.array([[0.5]]), np.array([0.9])
    _, cut_off = gae(rewards, values, np.array([2.0]), discounts, 0.95)
    assert cut_off[0, 0] == pytest.approx(1 + 0.9 * 2)
    _, over = gae(rewards, values, np.array([0.0]), discounts, 0.95)
    assert over[0, 0] == pytest.approx(1)


def test_returns_of_the_papers_variant_by_hand() -> None:
    returns = discounted_returns(np.array([[1.0], [2.0], [4.0]]), np.array([0.5, 0.25, 0.5]))
    assert returns[:, 0].tolist() == [1 + 0.5 * (2 + 0.25 * 4), 2 + 0.25 * 4, 4.0]
