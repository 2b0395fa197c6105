import math
from collections.abc import Iterable
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.schemas.apportion import PARTS, apportion, balanced_shares, divide_by_time, ring_time, shared_time

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


@pytest.mark.parametrize(
    ("total", "weights", "lower", "upper", "sizes"),
    [
        (512, np.array([3.0, 3.0, 3.0, 1.0]), [1] * 4, [1024] * 4, (154, 154, 153, 51)),
        (512, [1, 1, 1, 100], [32] * 4, [128, 256, 256, 256], (86, 85, 85, 256)),
        (9999, np.ones(2), [32] * 2, [64, 100], (64, 100)),  # the nearest sum that the bounds hold
        (7, [], [], [], ()),
        (100, [0.0, 1.0, 0.0], [4, 4, 4], [50, 20, 50], (40, 20, 40)),  # weights of 0 wait until all others are full
    ],
)
def test_a_total_is_divided_by_weight_within_bounds(
    total: int, weights: Any, lower: list[int], upper: list[int], sizes: tuple[int, ...]
) -> None:
    assert apportion(total, weights, lower, upper) == sizes


@pytest.mark.parametrize(
    ("weights", "lower", "upper", "fixed"),
    [
        ([1.0, -1.0], [0, 0], [9, 9], [0.0, 0.0]),
        ([1.0, math.nan], [0, 0], [9, 9], [0.0, 0.0]),
        ([1.0, 1.0], [0, 10], [9, 9], [0.0, 0.0]),
        ([1.0, 1.0], [0], [9, 9], [0.0, 0.0]),
        ([1.0, 1.0], [0, 0], [9, 9], [math.inf, 0.0]),
        ([1.0, 1.0], [0, 0], [9, 9], [-1.0, 0.0]),
    ],
)
def test_what_cannot_be_divided_is_refused(
    weights: list[float], lower: list[int], upper: list[int], fixed: list[float]
) -> None:
    with pytest.raises(ValueError, match=r"weights|bounds|fixed costs"):
        divide_by_time(9, weights, lower, upper, fixed=fixed, saturations=[0, 0])


@given(st.integers(0, 400), WHOLE_RANKS)
def test_the_result_is_that_of_giving_one_sample_after_the_other(total: int, ranks: list[Rank]) -> None:
    assert _divide(total, ranks) == _by_definition(total, ranks)


@given(st.integers(0, 1000), RANKS)
def test_the_sum_and_the_bounds_hold_for_any_weights(total: int, ranks: list[Rank]) -> None:
    sizes = _divide(total, ranks)
    lowest, highest = sum(low for _, low, _ in ranks), sum(low + span for _, low, span in ranks)
    assert sum(sizes) == min(max(total, lowest), highest)
    assert all(low <= size <= low + span for size, (_, low, span) in zip(sizes, ranks, strict=True))


def test_bounds_on_both_sides_and_totals_beyond_64_bits_are_divided() -> None:
    weights = [float(10**rank) for rank in range(8)]
    for total in (8 * 64, 2**40):
        sizes = apportion(total, weights, [8] * 8, [2**38] * 8)
        assert sum(sizes) == total
        assert min(sizes) >= 8


# --- by time -----------------------------------------------------------------------------------------------------


Timed = tuple[int, int, int, int, int]
"""Rate, sixteenths of a sample that are fixed, saturation, lower bound, span of the bounds."""

TIMED = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 200), st.integers(0, 9), st.integers(0, 4), st.integers(0, 9)),
    min_size=1,
    max_size=4,
)


def _divide_by_time(total: int, ranks: list[Timed]) -> tuple[int, ...]:
    rates, parts, saturations, lower, span = (np.array(each) for each in zip(*ranks, strict=True))
    return divide_by_time(total, rates, lower, lower + span, fixed=parts / PARTS, saturations=saturations)


def _slowest(sizes: Iterable[int], ranks: list[Timed]) -> Fraction:
    """The longest time of any rank, exactly."""
    return max(
        (Fraction(parts, PARTS) + max(size, saturation)) / rate
        for size, (rate, parts, saturation, _, _) in zip(sizes, ranks, strict=True)
    )


def test_what_is_fixed_counts_as_samples_that_a_rank_has_before_the_first() -> None:
    """2 and 40 ms beside 1 ms a sample: 219 and 181 take 221 ms both."""
    assert divide_by_time(400, [1.0] * 2, [1] * 2, [1024] * 2, fixed=[2.0, 40.0], saturations=[0, 0]) == (219, 181)


def test_up_to_its_saturation_a_rank_has_samples_for_nothing() -> None:
    """The slow rank takes as long with 1 as with 32; a sample more would cost what 4 cost on the others."""
    for total, sizes in ((100, (34, 34, 32)), (90, (32, 32, 26))):
        found = divide_by_time(total, [4.0, 4.0, 1.0], [1] * 3, [1024] * 3, fixed=[0.0] * 3, saturations=[32] * 3)
        assert found == sizes
    assert divide_by_time(8, [1.0] * 2, [6, 1], [1024] * 2, fixed=[0.0] * 2, saturations=[32] * 2) == (6, 2)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 40), TIMED)
def test_no_division_within_the_bounds_has_a_faster_slowest_rank(total: int, ranks: list[Timed]) -> None:
    sizes = _divide_by_time(total, ranks)
    bounds = [range(low, low + span + 1) for _, _, _, low, span in ranks]
    assert all(size in allowed for size, allowed in zip(sizes, bounds, strict=True))
    best = min(_slowest(each, ranks) for each in product(*bounds) if sum(each) == sum(sizes))
    assert _slowest(sizes, ranks) == best


# --- shares of owners, against every division of a gradient into thirtieths -----------------------------------------

THIRTIETHS = 30


@pytest.mark.parametrize(
    "rates",
    [
        (100.0, 100.0, 100.0),
        (100.0, 50.0, 100.0),
        (10.0, 20.0, 30.0, 40.0),
        (100.0, 100.0, 100.0, 20.0),
        (100.0, 100.0, 100.0, 75.0),
        (100.0, 20.0, 100.0, 20.0),
        (1.0, 1.0, 1.0, 1000.0),
        (9.0, 8.0, 7.0, 6.0, 5.0),
    ],
)
def test_no_other_division_takes_less_than_the_closed_form(rates: tuple[float, ...]) -> None:
    shares = balanced_shares(rates)
    best = shared_time(rates, shares)
    assert sum(shares) == pytest.approx(1.0)
    assert best >= 1 / min(rates), "a rank sends its whole gradient in any case"
    divisions = product(range(THIRTIETHS + 1), repeat=len(rates) - 1)
    whole = ((*each, THIRTIETHS - sum(each)) for each in divisions if sum(each) <= THIRTIETHS)
    least = min(shared_time(rates, each) for each in whole)
    assert best <= least * (1 + 1e-9)
    assert least <= best + (len(rates) - 2) / THIRTIETHS / min(rates), "the grid is fine enough to come near"


def test_shares_of_ranks_and_servers_keep_all_links_equally_busy() -> None:
    assert balanced_shares([100] * 4, [100]) == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 3], abs=1e-6)
    assert balanced_shares([100] * 2, [100, 100]) == pytest.approx([0, 0, 1 / 2, 1 / 2], abs=1e-6)
    assert balanced_shares([100, 100], [50]) == pytest.approx([3 / 8, 3 / 8, 1 / 4], abs=1e-6)


def test_times_are_those_of_the_bytes_over_each_link() -> None:
    assert ring_time((100.0, 100.0, 100.0, 20.0)) == pytest.approx(1.5 / 20)
    assert shared_time((100.0, 100.0, 100.0, 20.0), (1.0, 1.0, 1.0, 0.0)) == pytest.approx(1 / 20)
    assert shared_time((100.0, 100.0, 100.0, 100.0), (5.0, 5.0, 5.0, 5.0)) == ring_time((100.0,) * 4)
    assert shared_time((50.0, 20.0), (3.0, 1.0)) == ring_time((50.0, 20.0)), "of two ranks owners save nothing"
