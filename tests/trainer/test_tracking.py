import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamix.trainer.steering.fast_loop import FilterState, RateFilter, Tracker

TIMES = st.lists(st.tuples(*[st.one_of(st.just(0.0), st.floats(1e-6, 1.0))] * 4), max_size=60)


def _settle(tracker: Tracker, sizes: tuple[int, ...], time_s: Callable[[int, int], float], steps: int) -> list[float]:
    """Run a virtual job of `steps` steps; the slowest rank's time on each."""
    slowest = []
    for _ in range(steps):
        times = [time_s(rank, size) for rank, size in enumerate(sizes)]
        slowest.append(max(times))
        rates = [time / size if size else 0.0 for time, size in zip(times, sizes, strict=True)]
        sizes = tracker.better_split(rates, sizes) or sizes
    return slowest


def _rates(measured: Sequence[Sequence[float]]) -> list[float] | None:
    rates = RateFilter(len(measured[0]))
    for step in measured:
        rates.observe(step)
    return rates.rates


def test_the_first_measurements_are_averaged_alike() -> None:
    assert _rates([[1.0], [1.1]]) == [1.05]
    assert _rates([[1.0], [1.1], [0.9]]) == [pytest.approx(1.0)]


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
    generator, tracker, sizes, total = Random(seed), Tracker(1, [1024] * 4), (32,) * 4, 0.0
    shape = noise**-2
    for step in range(300):
        times = [costs(step, rank) * size for rank, size in enumerate(sizes)]
        total += max(times) / 32
        measured = [generator.gammavariate(shape, 1 / shape) * time for time in times]
        seconds = [time / size for time, size in zip(measured, sizes, strict=True)]
        sizes = tracker.better_split(seconds, sizes, sizes) or sizes
    return total / 300


@pytest.mark.parametrize(("noise", "most"), [(0.05, 1.01), (0.2, 1.03), (0.45, 1.06)])
def test_equal_ranks_whose_times_are_noise_lose_next_to_nothing(noise: float, most: float) -> None:
    """Shares of a processor make equal steps differ by half; sizes that followed that would lose as much."""
    assert sum(_step_s(noise, lambda *_: 1.0, seed) for seed in range(8)) < 8 * most


def test_a_change_is_followed_through_noise_that_hides_it_in_a_single_step() -> None:
    def costs(step: int, rank: int) -> float:
        return 3.0 if rank == 1 and step >= 60 else 1.0

    best = (60 + 240 * 1.2) / 300
    assert sum(_step_s(0.45, costs, seed) for seed in range(8)) < 8 * 1.15 * best


@given(TIMES, st.integers(0, 60))
def test_a_restored_filter_goes_on_as_the_first_would_have(times: list[tuple[float, ...]], cut: int) -> None:
    straight, first, second = RateFilter(4), RateFilter(4), RateFilter(4)
    for step in times:
        straight.observe(step)
    for step in times[:cut]:
        first.observe(step)
    second.restore(first.state)
    for step in times[cut:]:
        second.observe(step)
    assert second.state == straight.state


def test_the_rates_of_another_world_are_refused() -> None:
    with pytest.raises(ValueError, match="rates of 2 ranks for a world of 3"):
        RateFilter(3).restore(FilterState((), (0, 0), (False, False), ()))


@given(TIMES, st.integers(1, 200), st.integers(0, 8), st.tuples(*[st.integers(8, 64)] * 4))
def test_every_split_keeps_the_global_batch_and_the_bounds(
    times: list[tuple[float, ...]], total: int, low: int, upper: tuple[int, ...]
) -> None:
    tracker = Tracker(low, upper)
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
    tracker, sizes = Tracker(8, [1024] * 4), (64,) * 4
    assert tracker.better_split([1e-3] * 4, sizes) is None
    assert tracker.better_split([1e-3, 1e-3, 3e-3, 1e-3], sizes) is None
    sizes = tracker.better_split([1e-3, 1e-3, 3e-3, 1e-3], sizes) or sizes
    assert sizes == (76, 76, 28, 76)
    for _ in range(4):  # it may have been noise so far
        sizes = tracker.better_split([1e-3, 1e-3, 3e-3, 1e-3], sizes) or sizes
    assert sizes == (77, 77, 26, 76)
    assert tracker.divide((32,) * 4) == (39, 38, 13, 38)


def test_gains_within_the_dead_band_change_no_shape() -> None:
    sizes = (64,) * 4
    assert Tracker(8, [1024] * 4).better_split([1.0, 1.0, 1.0, 1.03], sizes) is None
    assert Tracker(8, [1024] * 4).better_split([1.0, 1.0, 1.0, 1.1], sizes) == (65, 65, 65, 61)
    tracker = Tracker(8, [1024] * 4)  # 6 % may be noise of a single step, and are not after three
    assert (65, 65, 65, 61) in [tracker.better_split([1.0, 1.0, 1.0, 1.06], sizes) for _ in range(3)]


def test_a_rank_never_loses_its_last_sample_while_there_are_enough() -> None:
    assert Tracker(0, [64] * 3).better_split([1.0, 1.0, 1000.0], (4, 4, 4)) == (6, 5, 1)
    assert Tracker(0, [64] * 3).better_split([1.0, 1.0, 1000.0], (0, 0, 2)) == (1, 1, 0)


@pytest.mark.parametrize("overhead_s", [0.0, 0.02, 0.2])
def test_equal_times_are_approached_without_overshooting_whatever_the_overhead(overhead_s: float) -> None:
    """Times o + b c: the best split has all at once; the slowest rank's time only falls, to within the dead band."""
    costs_s = (1e-3, 1e-3, 2e-3, 8e-3)
    slowest = _settle(
        Tracker(1, [1024] * 4), (100,) * 4, lambda rank, size: overhead_s + size * costs_s[rank], steps=80
    )
    best = overhead_s + 400 / sum(1 / cost for cost in costs_s)
    assert all(after <= before for before, after in pairwise(slowest))
    assert best * 0.999 <= slowest[-1] <= best * 1.05
    assert slowest[0] == overhead_s + 0.8


@pytest.mark.parametrize(("noise", "most_changes", "widest"), [(0.02, 1, 2), (0.05, 90, 8)])
def test_noise_hardly_moves_the_split(noise: float, most_changes: int, widest: int) -> None:
    generator, tracker, sizes, changes = Random(3), Tracker(8, [1024] * 8), (64,) * 8, 0
    for _ in range(300):
        proposed = tracker.better_split([generator.lognormvariate(-7, noise) for _ in range(8)], sizes)
        changes += proposed is not None
        sizes = proposed or sizes
    assert changes <= most_changes
    assert max(sizes) - min(sizes) <= widest


def _best_s(total: int, costs: Sequence[float], saturations: Sequence[int], fixed: float) -> float:
    """The least time that the slowest rank can take, each sample put where it costs least."""
    ranks, sizes = list(zip(costs, saturations, strict=True)), [1] * len(costs)
    for _ in range(total - len(costs)):
        after = [
            (cost * (fixed + max(size + 1, least)), size) for (cost, least), size in zip(ranks, sizes, strict=True)
        ]
        sizes[after.index(min(after))] += 1
    return max(cost * (fixed + max(size, least)) for (cost, least), size in zip(ranks, sizes, strict=True))


@pytest.mark.parametrize("mean_size", [12, 24, 40, 64])
@pytest.mark.parametrize("saturations", [(32,) * 8, (32, 0) * 4])
@pytest.mark.parametrize("slow_cost", [1e-3, 4e-3])
def test_where_nothing_is_gained_under_32_samples_the_step_is_as_short_as_it_can_be(
    mean_size: int, saturations: tuple[int, ...], slow_cost: float
) -> None:
    """Within 5 % of the best division over 300 steps; one rank is three times as slow in a third of them."""
    costs = (1e-3,) * 4 + (slow_cost,) * 4
    slowed = (costs[0], 3 * costs[1], *costs[2:])
    best = [_best_s(8 * mean_size, each, saturations, 2.0) for each in (costs, slowed)]
    generator, tracker, sizes, total_s = Random(0), Tracker(1, [1024] * 8), (mean_size,) * 8, 0.0
    for step in range(300):
        now = slowed if 100 <= step < 200 else costs
        times = [cost * (2.0 + max(size, least)) for cost, size, least in zip(now, sizes, saturations, strict=True)]
        total_s += max(times)
        seconds = [generator.lognormvariate(0, 0.02) * time / size for time, size in zip(times, sizes, strict=True)]
        sizes = tracker.better_split(seconds, sizes, sizes) or sizes
    assert total_s < 1.05 * (200 * best[0] + 100 * best[1])


def _disturbed(noise: float, disturbance: range, factor: float = 3.0, steps: int = 160) -> list[tuple[int, ...]]:
    """Sizes per step of three equal ranks with 30 ms fixed and 20 us per sample; rank 1 is slower for a while."""
    generator, tracker, sizes, history = Random(1), Tracker(8, [1024] * 3), (128,) * 3, []
    for step in range(steps):
        times = [(0.03 + 20e-6 * size) * generator.lognormvariate(0, noise) for size in sizes]
        times[1] *= factor if step in disturbance else 1.0
        seconds = [time / size for time, size in zip(times, sizes, strict=True)]
        sizes = tracker.better_split(seconds, sizes, sizes) or sizes
        history.append(sizes)
    return history


@pytest.mark.parametrize(("noise", "widest"), [(0.0, 0), (0.005, 12)])
@pytest.mark.parametrize("disturbance", [range(40, 44), range(40, 47), range(40, 80)])
def test_equal_ranks_that_are_mostly_fixed_cost_are_equal_again_30_steps_after_a_disturbance(
    noise: float, widest: int, disturbance: range
) -> None:
    history = _disturbed(noise, disturbance)
    assert min(history[disturbance.stop - 1]) < 60
    for sizes in history[disturbance.stop + 30 :]:
        assert max(sizes) - min(sizes) <= 2 * widest
        assert sum(sizes) == 384


def test_fixed_costs_are_fitted_per_rank_from_times_at_different_sizes() -> None:
    """In samples: 5 and 20 ms at 1 and 0.5 ms a sample."""
    rates = RateFilter(2)
    for counts in ((64, 64), (80, 48), (60, 68)):
        for _ in range(6):
            times = (0.005 + 0.001 * counts[0], 0.02 + 0.0005 * counts[1])
            rates.observe([time / count for time, count in zip(times, counts, strict=True)], counts)
    assert rates.fixed == [pytest.approx(5, abs=1), pytest.approx(40, abs=2)]
    assert rates.rates == [pytest.approx(0.001, rel=0.03), pytest.approx(0.0005, rel=0.03)]


def _steps_until_equal(seed: int) -> int:
    """After 100 steps at whose times other programs had a share, until four equal ranks have equal sizes for good."""
    generator, tracker, sizes, last = Random(seed), Tracker(1, [1024] * 4), (12,) * 4, 0
    for step in range(250):
        times = [2e-4 * size * generator.uniform(0.95, 1.05) for size in sizes]
        if step < 100:
            times = [time * generator.lognormvariate(0, 1) + generator.choice((0.0, 0.1)) for time in times]
        elif max(sizes) - min(sizes) > 4:
            last = step - 99
        sizes = (
            tracker.better_split([time / size for time, size in zip(times, sizes, strict=True)], sizes, sizes) or sizes
        )
    return last


def test_fixed_costs_that_noise_looked_like_are_forgotten() -> None:
    """A split by them swings between two that both disprove them."""
    assert max(map(_steps_until_equal, range(60))) <= 25


def test_times_that_get_shorter_with_more_samples_tell_nothing_of_fixed_costs() -> None:
    rates = RateFilter(1)
    for count, time in ((64, 0.1), (90, 0.09), (64, 0.1), (90, 0.09)):
        for _ in range(5):
            rates.observe([time / count], (count,))
    assert rates.fixed == [0]


def test_a_restored_filter_keeps_the_fitted_costs() -> None:
    straight, again = RateFilter(3), RateFilter(3)
    steps = [(64, 64, 64)] * 8 + [(80, 60, 52)] * 12
    seconds = [[(0.02 + 0.0002 * count * (rank + 1)) / count for rank, count in enumerate(step)] for step in steps]
    for measured, counts in zip(seconds, steps, strict=True):
        straight.observe(measured, counts)
    again.restore(straight.state)
    assert again.fixed == straight.fixed != [0, 0, 0]
    for _ in range(4):
        straight.observe(seconds[0], steps[0])
        again.observe(seconds[0], steps[0])
    assert again.state == straight.state
