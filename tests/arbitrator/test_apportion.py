import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynamix.arbitrator.apportion import apportion


def test_a_rank_three_times_slower_gets_a_third() -> None:
    assert apportion(512, np.array([3.0, 3.0, 3.0, 1.0]), [1] * 4, [1024] * 4) == (154, 154, 153, 51)


def test_bounds_hold_and_the_others_share_the_rest() -> None:
    assert apportion(512, np.array([1.0, 1.0, 1.0, 100.0]), [32] * 4, [128, 256, 256, 256]) == (86, 85, 85, 256)
    assert apportion(40, np.array([1.0, 1000.0]), [32, 0], [1024, 1024]) == (32, 8)


def test_a_total_outside_the_bounds_gives_the_nearest_sum() -> None:
    assert apportion(10, np.ones(4), [32] * 4, [64] * 4) == (32,) * 4
    assert apportion(9999, np.ones(2), [32] * 2, [64, 100]) == (64, 100)


@given(
    st.integers(0, 5000),
    st.lists(st.tuples(st.floats(0.01, 1e6), st.integers(0, 64), st.integers(0, 1024)), min_size=1, max_size=40),
)
def test_the_sum_and_the_bounds_hold_for_any_weights(total: int, ranks: list[tuple[float, int, int]]) -> None:
    weights = np.array([weight for weight, _, _ in ranks])
    low = [low for _, low, _ in ranks]
    high = [low + span for _, low, span in ranks]
    sizes = apportion(total, weights, low, high)
    assert sum(sizes) == min(max(total, sum(low)), sum(high))
    assert all(bottom <= size <= top for bottom, size, top in zip(low, sizes, high, strict=True))


@given(st.integers(1, 5000), st.lists(st.floats(0.1, 1000), min_size=1, max_size=40))
def test_without_bounds_no_rank_is_further_than_one_sample_from_its_share(total: int, weights: list[float]) -> None:
    array = np.array(weights)
    sizes = apportion(total, array, [0] * len(weights), [total] * len(weights))
    assert np.abs(np.array(sizes) - total * array / array.sum()).max() < 1 + 1e-6
