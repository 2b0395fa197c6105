import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamix.trainer.data.plan import Counts, divide_tail, largest_remainder

WEIGHTS = st.lists(st.integers(0, 1024), min_size=1, max_size=64)


@given(WEIGHTS, st.integers(0, 10**6))
def test_a_division_loses_no_sample_and_stays_within_one_of_the_exact_share(weights: list[int], total: int) -> None:
    whole = sum(weights)
    if whole == 0:
        return
    shares = largest_remainder(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share * whole - total * weight) < whole
        assert weight > 0 or share == 0


@given(WEIGHTS, st.data())
def test_a_tail_gives_no_rank_more_than_its_size(weights: list[int], data: st.DataObject) -> None:
    tail = data.draw(st.integers(0, sum(weights)))
    shares = largest_remainder(tail, weights)
    assert all(share <= weight for share, weight in zip(shares, weights, strict=True))


@given(WEIGHTS, st.data())
def test_a_tail_gives_each_rank_two_samples_while_there_are_enough(sizes: list[int], data: st.DataObject) -> None:
    if sum(sizes) == 0:
        return
    total = data.draw(st.integers(0, sum(sizes)))
    shares = divide_tail(total, sizes)
    enough = min(2, total // sum(size > 0 for size in sizes))
    assert sum(shares) == total
    assert all(min(size, enough) <= share <= size for share, size in zip(shares, sizes, strict=True))


def test_a_tail_is_divided_in_proportion_unless_a_rank_would_have_too_few() -> None:
    assert divide_tail(20, [30, 10]) == (15, 5)
    assert divide_tail(8, [30, 2]) == (6, 2)
    assert divide_tail(3, [30, 2]) == (2, 1)
    assert divide_tail(1, [2, 30]) == (0, 1)
    assert divide_tail(0, [30, 2]) == (0, 0)


def test_equal_remainders_favour_the_lower_rank() -> None:
    assert largest_remainder(2, [1, 1, 1]) == (1, 1, 0)
    assert largest_remainder(7, [40, 20, 20]) == (3, 2, 2)
    assert largest_remainder(0, [0, 0]) == (0, 0)


@pytest.mark.parametrize(("total", "weights"), [(-1, [1]), (1, [0, 0]), (1, [2, -1]), (1, [])])
def test_what_cannot_be_divided_is_refused(total: int, weights: list[int]) -> None:
    with pytest.raises(ValueError, match=f"cannot divide {total} samples"):
        largest_remainder(total, weights)


def test_counts_know_their_sums() -> None:
    counts = Counts([3, 0, 5])
    assert (counts.total, counts.num_active, counts.starts) == (8, 2, (0, 3, 3, 8))
