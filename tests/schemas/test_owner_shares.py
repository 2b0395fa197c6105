"""Shares of owners: the closed form against every division of a gradient into thirtieths."""

import itertools

import pytest

from dynamix.schemas.apportion import balanced_shares, ring_time, shared_time

PARTS = 30


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
    divisions = itertools.product(range(PARTS + 1), repeat=len(rates) - 1)
    least = min(
        shared_time(rates, (*division, PARTS - sum(division))) for division in divisions if sum(division) <= PARTS
    )
    assert best <= least * (1 + 1e-9)
    assert least <= best + (len(rates) - 2) / PARTS / min(rates), "the grid is fine enough to come near"


def test_times_are_those_of_the_bytes_over_each_link() -> None:
    assert ring_time((100.0, 100.0, 100.0, 20.0)) == pytest.approx(1.5 / 20)
    assert shared_time((100.0, 100.0, 100.0, 20.0), (1.0, 1.0, 1.0, 0.0)) == pytest.approx(1 / 20)
    assert shared_time((100.0, 100.0, 100.0, 100.0), (5.0, 5.0, 5.0, 5.0)) == ring_time((100.0,) * 4)
    assert shared_time((50.0, 20.0), (3.0, 1.0)) == ring_time((50.0, 20.0)), "of two ranks owners save nothing"
