import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.data.plan import Schedule
from dynamix.trainer.steering.fast_loop import FastLoop, RateFilter

TIMES = st.lists(st.tuples(*[st.one_of(st.just(0.0), st.floats(1e-6, 1.0))] * 4), max_size=60)


def _tracking(fewest: int, upper: list[int]) -> FastLoop:
    return FastLoop(Schedule(Allocation((1,) * len(upper))), fewest, upper)


def _rates(measured: Sequence[Sequence[float]]) -> list[float] | None:
    rates = RateFilter(len(measured[0]))
    for step in measured:
        rates.observe(step)
    return rates.rates


@pytest.mark.parametrize("outlier", [9.0, 0.01])
def test_one_outlier_moves_nothing_and_a_second_one_is_a_change(outlier: float) -> None:
    assert _rates([[1.0], [outlier]]) == [1.0]
    assert _rates([[1.0], [outlier], [1.0]]) == [1.0]
    assert _rates([[1.0], [outlier], [1.0], [outlier], [1.0]]) == [1.0]
    assert _rates([[1.0], [9.0], [0.01]]) == [1.0]  # not to the same side
    assert _rates([[1.0], [outlier], [outlier / 2]]) == [outlier / 2]


def test_what_is_not_measured_is_kept_and_what_never_was_counts_as_the_slowest() -> None:
    assert _rates([[0.0, math.nan, math.inf, -1.0]]) is None
    assert _rates([[2.0, 0.0, 3.0], [0.0, 0.0, 0.0]]) == pytest.approx([2.0, 3.0, 3.0], rel=0.005)


def _step_s(noise: float, costs: Callable[[int, int], float], seed: int) -> float:
    """Mean over 300 steps of four ranks of what the slowest would take without its noise; 1 with equal sizes."""
    generator, tracker, sizes, total = Random(seed), _tracking(1, [1024] * 4), (32,) * 4, 0.0
    shape = noise**-2
    for step in range(300):
        times = [costs(step, rank) * size for rank, size in enumerate(sizes)]
        total += max(times) / 32
        measured = [generator.gammavariate(shape, 1 / shape) * time for time in times]
        seconds = [time / size for time, size in zip(measured, sizes, strict=True)]
        sizes = tracker.better_split(seconds, sizes, sizes) or sizes
    return total / 300


def test_a_change_is_followed_through_noise_that_hides_it_in_a_single_step() -> None:
    def costs(step: int, rank: int) -> float:
        return 3.0 if rank == 1 and step >= 60 else 1.0

    best = (60 + 240 * 1.2) / 300
    assert sum(_step_s(0.45, costs, seed) for seed in range(8)) < 8 * 1.15 * best


@given(TIMES, st.integers(1, 200), st.integers(0, 8), st.tuples(*[st.integers(8, 64)] * 4))
def test_every_split_keeps_the_global_batch_and_the_bounds(
    times: list[tuple[float, ...]], total: int, low: int, upper: tuple[int, ...]
) -> None:
    tracker = _tracking(low, upper)
    total = min(max(total, 4 * low), sum(upper))
    sizes = tracker.divide((total, 0, 0, 0))
    assert sizes == (total, 0, 0, 0)  # as decided, while nothing is known
    sizes = (total // 4 + total % 4, *[total // 4] * 3)
    for step in times:
        sizes = tracker.better_split(step, sizes) or sizes
        assert sum(sizes) == total
    if tracker.filter.rates is not None:
        for split in (sizes, tracker.divide(sizes)):
            assert sum(split) == total
        assert all(low <= size <= high for size, high in zip(tracker.divide(sizes), upper, strict=True))


def test_a_rank_that_slows_down_by_three_is_followed_after_two_steps() -> None:
    tracker, sizes = _tracking(8, [1024] * 4), (64,) * 4
    assert tracker.better_split([1e-3] * 4, sizes) is None
    assert tracker.better_split([1e-3, 1e-3, 3e-3, 1e-3], sizes) is None
    sizes = tracker.better_split([1e-3, 1e-3, 3e-3, 1e-3], sizes) or sizes
    assert sizes == (76, 76, 28, 76)
    for _ in range(4):  # it may have been noise so far
        sizes = tracker.better_split([1e-3, 1e-3, 3e-3, 1e-3], sizes) or sizes
    assert sizes == (77, 77, 26, 76)
    assert tracker.divide((32,) * 4) == (39, 38, 13, 38)


@pytest.mark.parametrize("overhead_s", [0.0, 0.02, 0.2])
def test_equal_times_are_approached_without_overshooting_whatever_the_overhead(overhead_s: float) -> None:
    """Times o + b c: the best split has all at once; the slowest rank's time only falls, to within the dead band."""
    costs_s = (1e-3, 1e-3, 2e-3, 8e-3)
    tracker, sizes, slowest = _tracking(1, [1024] * 4), (100,) * 4, []
    for _ in range(80):
        times = [overhead_s + size * cost for size, cost in zip(sizes, costs_s, strict=True)]
        slowest.append(max(times))
        sizes = tracker.better_split([time / size for time, size in zip(times, sizes, strict=True)], sizes) or sizes
    best = overhead_s + 400 / sum(1 / cost for cost in costs_s)
    assert all(after <= before for before, after in pairwise(slowest))
    assert best * 0.999 <= slowest[-1] <= best * 1.05
    assert slowest[0] == overhead_s + 0.8


@pytest.mark.parametrize(("noise", "most_changes", "widest"), [(0.02, 1, 2), (0.05, 90, 8)])
def test_noise_hardly_moves_the_split(noise: float, most_changes: int, widest: int) -> None:
    generator, tracker, sizes, changes = Random(3), _tracking(8, [1024] * 8), (64,) * 8, 0
    for _ in range(300):
        proposed = tracker.better_split([generator.lognormvariate(-7, noise) for _ in range(8)], sizes)
        changes += proposed is not None
        sizes = proposed or sizes
    assert changes <= most_changes
    assert max(sizes) - min(sizes) <= widest


def test_fixed_costs_are_fitted_per_rank_from_times_at_different_sizes() -> None:
    """In samples: 5 and 20 ms at 1 and 0.5 ms a sample."""
    rates = RateFilter(2)
    for counts in ((64, 64), (80, 48), (60, 68)):
        for _ in range(6):
            times = (0.005 + 0.001 * counts[0], 0.02 + 0.0005 * counts[1])
            rates.observe([time / count for time, count in zip(times, counts, strict=True)], counts)
    assert rates.fixed == [pytest.approx(5, abs=1), pytest.approx(40, abs=2)]
    assert rates.rates == [pytest.approx(0.001, rel=0.03), pytest.approx(0.0005, rel=0.03)]
