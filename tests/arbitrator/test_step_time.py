from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.arbitrator.policies.model.step_time import SYNC_FLOOR, StepTime, best_global_batch
from dynamix.schemas.progress import progress


def model(
    rates: list[float],
    lower: float = 8.0,
    upper: float = 1024.0,
    overhead_s: float | list[float] = 0.0,
    saturation: float | list[float] = 0.0,
    **changes: float,
) -> StepTime:
    return StepTime(
        seconds_per_sample_W=1 / np.array(rates),
        lower_W=np.full(len(rates), lower),
        upper_W=np.full(len(rates), upper),
        overhead_W=np.broadcast_to(overhead_s, len(rates)).astype(np.float64),
        saturation_W=np.broadcast_to(saturation, len(rates)).astype(np.float64),
        **changes,
    )


def test_a_balanced_step_by_hand() -> None:
    """1000 and 3000 samples/s share 400 as 100 and 300: 0.1 s of compute, 2 ms overhead, 10 ms exposed, 1 ms rest."""
    fitted = model([1000.0, 3000.0], overhead_s=0.002, sync_intercept_s=0.010, rest_s=0.001)
    assert fitted.balanced(np.array([400.0]))[0] == pytest.approx(0.113)
    assert fitted.of((100, 300)) == pytest.approx(0.113)
    assert fitted.equal(np.array([400.0]))[0] == pytest.approx(0.213)


def test_below_what_the_slowest_takes_at_its_minimum_more_samples_are_free() -> None:
    fitted = model([100.0, 3000.0], lower=10.0)
    assert fitted.balanced(np.array([20.0, 100.0, 310.0, 620.0])) == pytest.approx([0.1, 0.1, 0.1, 0.2])


def test_a_rank_at_its_maximum_leaves_the_rest_to_the_others() -> None:
    """With at most 100 on the fast rank, 300 are 100 and 200."""
    fitted = replace(model([3000.0, 1000.0]), upper_W=np.array([100.0, 1000.0]))
    assert fitted.balanced(np.array([300.0]))[0] == pytest.approx(0.2)


def test_what_a_rank_has_below_its_saturation_is_free() -> None:
    """1000 and 4000 samples/s, nothing gained below 32: 32 ms for up to 32 + 128 samples, 33 ms for five more."""
    fitted = model([1000.0, 4000.0], lower=1.0, saturation=32.0)
    assert fitted.balanced(np.array([2.0, 64.0, 160.0, 165.0])) == pytest.approx([0.032, 0.032, 0.032, 0.033])
    assert fitted.of((1, 128)) == fitted.of((32, 32)) == pytest.approx(0.032)
    assert fitted.equal(np.array([20.0, 128.0])) == pytest.approx([0.032, 0.064])
    assert fitted.divide(160) == (32, 128)
    assert fitted.divide(165) == (33, 132)


def test_unequal_fixed_times_by_hand() -> None:
    """2 and 40 ms beside 1 ms a sample: 400 are 219 and 181 in 221 ms; up to 39 the second has its one sample."""
    fitted = model([1000.0, 1000.0], lower=1.0, overhead_s=[0.002, 0.040])
    assert fitted.balanced(np.array([2.0, 40.0, 400.0])) == pytest.approx([0.041, 0.041, 0.221])
    assert fitted.divide(400) == (219, 181)


def test_communication_hides_behind_compute_down_to_its_floor() -> None:
    fitted = model([1000.0], sync_intercept_s=0.1, sync_slope=-0.5)
    assert fitted.step_time_s(np.array([0.1, 0.15, 1.0])) == pytest.approx([0.15, 0.175, 1.0 + SYNC_FLOOR * 0.1])


def test_the_best_batch_is_the_square_root_of_noise_rate_and_fixed_cost() -> None:
    """B / (B + K) / (A + B/R) is greatest at sqrt(K A R) = sqrt(1000 * 0.012 * 12000)."""
    fitted = model([8000.0, 4000.0], overhead_s=0.002, sync_intercept_s=0.010)
    assert best_global_batch(fitted, 1000.0) == pytest.approx(np.sqrt(144_000), rel=2e-3)


def test_without_fixed_cost_the_smallest_batch_is_best_and_without_end_to_the_noise_the_largest() -> None:
    free = model([1000.0, 1000.0])
    assert best_global_batch(free, 1000.0) == pytest.approx(16.0)
    costly = model([1000.0, 1000.0], sync_intercept_s=10.0)
    assert best_global_batch(costly, 1e12) == pytest.approx(2048.0)


def test_a_small_step_is_worth_its_samples_and_a_large_one_no_more_than_one() -> None:
    assert progress(np.array([1.0, 1000.0, 1e9]), 1000.0) == pytest.approx([1 / 1001, 0.5, 1.0], rel=1e-5)


def test_a_step_worth_its_length_is_best_where_compute_takes_as_long_as_the_fixed_cost() -> None:
    """Without noise sqrt(B) / (A + B/R) is greatest at A R = 0.1 * 12000."""
    fitted = model([8000.0, 4000.0], sync_intercept_s=0.1)
    assert best_global_batch(fitted, 1e-6, rate_exponent=0.5) == pytest.approx(1200, rel=2e-3)


def test_a_step_above_the_most_is_worth_what_one_of_the_most_is() -> None:
    assert progress(np.array([100.0, 400.0, 1e9]), 100.0, 0.5, most=400.0) == pytest.approx([5.0, 16.0, 16.0])


def test_the_best_batch_is_the_most_where_a_longer_step_would_be_worth_more_without_end() -> None:
    fitted = model([8000.0, 4000.0], sync_intercept_s=0.1)
    assert best_global_batch(fitted, 1e-6, rate_exponent=0.5, most=300.0) == pytest.approx(300, rel=5e-3)
    assert best_global_batch(fitted, 1e-6, rate_exponent=0.5, most=1500.0) == best_global_batch(fitted, 1e-6, 0.5)


rates = st.lists(st.floats(10, 1e5), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.lists(st.tuples(st.floats(10, 1e5), st.floats(0, 0.1), st.floats(0, 2000)), min_size=1, max_size=12),
    share=st.floats(0, 1),
)
def test_the_line_equals_bisection_on_the_compute_time(ranks: list[tuple[float, float, float]], share: float) -> None:
    rates, overhead_s, saturation = (list(each) for each in zip(*ranks, strict=True))
    fitted = model(rates, overhead_s=overhead_s, saturation=saturation)
    total = fitted.smallest + share * (fitted.largest - fitted.smallest)
    low, high = 0.0, 1e3
    free = np.clip(saturation, 8, 1024)
    for _ in range(200):
        middle = (low + high) / 2
        held = np.clip((middle - fitted.overhead_W) / fitted.seconds_per_sample_W, free, 1024).sum()
        low, high = (middle, high) if held < total else (low, middle)
    expected = max(high, float(fitted.compute_s(free).max()))
    assert fitted.balanced(np.array([total]))[0] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert fitted.compute_s(fitted.shares(total)).max() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(rates=rates, noise=st.floats(0.1, 1e7), sync_s=st.floats(0, 1))
def test_the_best_batch_is_within_the_bounds_and_no_grid_point_beats_it(
    rates: list[float], noise: float, sync_s: float
) -> None:
    fitted = model(rates, overhead_s=0.001, sync_intercept_s=sync_s)
    best = best_global_batch(fitted, noise)
    assert fitted.smallest * (1 - 1e-9) <= best <= fitted.largest * (1 + 1e-9)
    grid = np.geomspace(fitted.smallest, fitted.largest, 500)
    worth = progress(grid, noise) / fitted.balanced(grid)
    chosen = progress(np.array([best]), noise) / fitted.balanced(np.array([best]))
    assert worth.max() <= chosen[0] * 1.002
