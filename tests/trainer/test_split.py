from hypothesis import given
from hypothesis import strategies as st

from dynamix.trainer.data.plan import divide_tail, largest_remainder

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
def test_a_tail_gives_each_rank_two_samples_while_there_are_enough(sizes: list[int], data: st.DataObject) -> None:
    if sum(sizes) == 0:
        return
    total = data.draw(st.integers(0, sum(sizes)))
    shares = divide_tail(total, sizes)
    enough = min(2, total // sum(size > 0 for size in sizes))
    assert sum(shares) == total
    assert all(min(size, enough) <= share <= size for share, size in zip(shares, sizes, strict=True))
