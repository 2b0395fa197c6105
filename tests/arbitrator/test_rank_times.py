import numpy as np
import pytest

from dynamix.arbitrator.policies.model.rank_times import PairSums, RankFit, fixed_share

SECONDS_PER_SAMPLE = 1e-3


def fit_of(sizes: list[float], *, fixed: float, saturation: float, noise: float = 0.0, num_ranks: int = 1) -> RankFit:
    """What is told by times of 1 ms per sample at these sizes, one after the other; `fixed` in ms."""
    rng, sums = np.random.default_rng(0), PairSums.empty(1024, num_ranks)
    before = None
    for size in sizes:
        sizes_W = np.full(num_ranks, size)
        times_s = SECONDS_PER_SAMPLE * (fixed + np.maximum(sizes_W, saturation))
        times_s = times_s * (1 + noise * rng.standard_normal(num_ranks))
        if before is not None:
            sums = sums.add_pairs((before[0], sizes_W), (before[1], times_s))
        before = sizes_W, times_s
    assert before is not None
    return sums.fit(before[1], fixed_share(before[0]) * before[1])


@pytest.mark.parametrize("fixed", [0.0, 2.0, 40.0])
@pytest.mark.parametrize("saturation", [0.0, 32.0])
@pytest.mark.parametrize("sizes", [[64, 45, 30, 20, 16, 17], [16, 24, 36, 60, 80], [64, 45, 30, 20, 28, 35, 33]])
def test_fixed_time_and_saturation_are_exact_without_noise(fixed: float, saturation: float, sizes: list[float]) -> None:
    found = fit_of(sizes, fixed=fixed, saturation=saturation)
    assert found.saturation == pytest.approx(saturation)
    assert 1e3 * found.fixed_s == pytest.approx(fixed, abs=1e-6)


def test_a_saturation_between_those_compared_is_off_by_9_percent_at_most() -> None:
    for saturation in (23.0, 27.0, 35.0, 40.0, 43.0):
        found = fit_of([90, 64, 45, 30, 20, 16], fixed=2.0, saturation=saturation)
        assert found.saturation == pytest.approx(saturation, rel=0.1)


@pytest.mark.parametrize("noise", [0.016, 0.04])
def test_noise_looks_like_a_saturation_to_one_rank_in_twenty_at_most(noise: float) -> None:
    for sizes in ([64, 100, 150, 220, 200, 210], [64, 45, 30, 20, 16, 17]):
        for fixed in (0.0, 10.0, 40.0):
            found = fit_of(sizes, fixed=fixed, saturation=0.0, noise=noise, num_ranks=300)
            assert (found.saturation > 0).mean() <= 0.05
            assert 1e3 * np.median(found.fixed_s) == pytest.approx(fixed, abs=1.5)


def test_sizes_that_hardly_move_leave_what_is_fixed_unknown() -> None:
    found = fit_of([64, 66, 64, 63, 64], fixed=10.0, saturation=0.0)
    assert np.isnan(found.fixed_s).all()
    assert found.saturation.tolist() == [0.0]
    assert np.isnan(fit_of([64], fixed=10.0, saturation=0.0).fixed_s).all()


def test_a_change_of_speed_between_two_sizes_is_no_pair() -> None:
    sums = PairSums.empty(1024, 3)
    unknown = np.array([64.0, 64.0, np.nan]), np.array([32.0, 64.0, 32.0])
    times_s = np.array([0.064, 0.064, 0.064]), np.array([0.096, 0.064, 0.032])
    assert sums.add_pairs(unknown, times_s) is sums  # slower with fewer; the same size; not measured before


def test_pairs_fade_only_where_new_ones_come() -> None:
    sums = PairSums.empty(1024, 2).add_pairs((np.full(2, 64.0), np.full(2, 32.0)), (np.full(2, 0.07), np.full(2, 0.04)))
    more = sums.add_pairs((np.array([32.0, np.nan]), np.full(2, 64.0)), (np.full(2, 0.04), np.full(2, 0.07)))
    assert more.values[:, :, 1].tolist() == sums.values[:, :, 1].tolist()
    assert more.values[:, 1, 0] == pytest.approx(1.95 * sums.values[:, 1, 0])


def test_samples_take_a_share_of_the_time_that_is_the_smaller_the_fewer_they_are() -> None:
    assert fixed_share(np.array([10.0, 20.0, 30.0])) == pytest.approx([0.99, 0.98, 0.98])
