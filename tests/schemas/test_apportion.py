from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamix.schemas import apportion as module
from dynamix.schemas.apportion import apportion

Rank = tuple[float, int, int]
"""Weight, lower bound, span of the bounds."""

RANKS = st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 20), st.integers(0, 60)), min_size=1, max_size=12)
WHOLE_RANKS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=9)


def _divide(total: int, ranks: list[Rank]) -> tuple[int, ...]:
    weights, lower, span = zip(*ranks, strict=True)
    return apportion(total, weights, lower, [low + more for low, more in zip(lower, span, strict=True)])


def _by_definition(total: int, ranks: list[Rank]) -> tuple[int, ...]:
    """One sample after the other, in fractions."""
    sizes = [low for _, low, _ in ranks]
    for _ in range(total - sum(sizes)):
        open_ranks = [rank for rank, (_, low, span) in enumerate(ranks) if sizes[rank] < low + span]
        if not open_ranks:
            break
        sizes[min(open_ranks, key=lambda rank: (Fraction(sizes[rank] + 1) / Fraction(ranks[rank][0]), rank))] += 1
    return tuple(sizes)


def test_a_rank_three_times_slower_gets_a_third() -> None:
    assert apportion(512, np.array([3.0, 3.0, 3.0, 1.0]), [1] * 4, [1024] * 4) == (154, 154, 153, 51)


def test_bounds_hold_and_the_others_share_the_rest() -> None:
    assert apportion(512, [1, 1, 1, 100], [32] * 4, [128, 256, 256, 256]) == (86, 85, 85, 256)
    assert apportion(40, [1.0, 1000.0], [32, 0], [1024, 1024]) == (32, 8)


def test_a_spare_sample_goes_where_it_costs_least_time() -> None:
    """Shares are 8.6 and 59.9: rounding to the nearest gives two slow ranks 9, 5 % more time; the fast ones bear 61."""
    assert apportion(4 * 8 + 2 * 61, [1, 1, 1, 1, 7, 7], [0] * 6, [100] * 6) == (8, 8, 8, 8, 61, 61)


def test_a_total_outside_the_bounds_gives_the_nearest_sum() -> None:
    assert apportion(10, np.ones(4), [32] * 4, [64] * 4) == (32,) * 4
    assert apportion(9999, np.ones(2), [32] * 2, [64, 100]) == (64, 100)
    assert apportion(7, [], [], []) == ()


def test_a_weight_of_zero_waits_until_all_others_are_full() -> None:
    assert apportion(100, [0.0, 1.0, 0.0], [4, 4, 4], [50, 200, 50]) == (4, 92, 4)
    assert apportion(100, [0.0, 1.0, 0.0], [4, 4, 4], [50, 20, 50]) == (40, 20, 40)
    assert apportion(9, [0.0, 0.0], [0, 0], [9, 9]) == (5, 4)


@pytest.mark.parametrize(
    ("weights", "lower", "upper", "text"),
    [
        ([1.0, -1.0], [0, 0], [9, 9], "not negative: they range from -1 to 1"),
        ([1.0, float("nan")], [0, 0], [9, 9], "must be finite"),
        ([float("inf"), 1.0], [0, 0], [9, 9], "must be finite"),
        ([1.0, 1.0], [0, 10], [9, 9], r"\[10, 9\] of rank 1 hold no size"),
        ([1.0, 1.0], [0], [9, 9], "2 weights for 1 lower and 2 upper bounds"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    weights: list[float], lower: list[int], upper: list[int], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wide in (1, 99):
        monkeypatch.setattr(module, "WIDE", wide)
        with pytest.raises(ValueError, match=text):
            apportion(9, weights, lower, upper)


@given(st.integers(0, 400), WHOLE_RANKS)
def test_the_result_is_that_of_giving_one_sample_after_the_other(total: int, ranks: list[Rank]) -> None:
    assert _divide(total, ranks) == _by_definition(total, ranks)


@given(st.integers(0, 1000), RANKS)
def test_many_ranks_are_divided_as_few_are(total: int, ranks: list[Rank]) -> None:
    narrow = _divide(total, ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WIDE", 1)
        assert _divide(total, ranks) == narrow


@given(st.integers(0, 1000), RANKS)
def test_the_sum_and_the_bounds_hold_for_any_weights(total: int, ranks: list[Rank]) -> None:
    sizes = _divide(total, ranks)
    lowest, highest = sum(low for _, low, _ in ranks), sum(low + span for _, low, span in ranks)
    assert sum(sizes) == min(max(total, lowest), highest)
    assert all(low <= size <= low + span for size, (_, low, span) in zip(sizes, ranks, strict=True))


@given(st.integers(0, 1000), st.lists(st.floats(0, 1e3), min_size=2, max_size=80))
def test_more_weight_never_means_fewer_samples_and_equal_weights_differ_by_one_at_most(
    total: int, weights: list[float]
) -> None:
    weights[0] = weights[-1]
    sizes = apportion(total, weights, [2] * len(weights), [40] * len(weights))
    by_weight = sorted(zip(weights, sizes, strict=True), key=lambda pair: (pair[0], -pair[1]))
    for (light, few), (heavy, many) in pairwise(by_weight):
        assert few <= many + (light == heavy or heavy < 1e-8 * max(weights))  # below the precision of a weight
    assert abs(sizes[0] - sizes[-1]) <= 1


@given(st.integers(0, 5000), st.lists(st.floats(0.1, 1000), min_size=1, max_size=40))
def test_no_rank_gets_less_than_its_share_rounded_down(total: int, weights: list[float]) -> None:
    sizes = apportion(total, weights, [0] * len(weights), [total] * len(weights))
    shares = total * np.array(weights) / sum(weights)
    assert (np.array(sizes) > shares - 1 - 1e-3).all()


@pytest.mark.parametrize("num_ranks", [8, 200])
def test_bounds_on_both_sides_and_totals_beyond_64_bits_are_divided(num_ranks: int) -> None:
    weights = [float(10 ** (rank % 7)) for rank in range(num_ranks)]
    for total in (num_ranks * 64, 2**40):
        sizes = apportion(total, weights, [8] * num_ranks, [2**38] * num_ranks)
        assert sum(sizes) == total
        assert min(sizes) >= 8
