"""Scores by hand, and the interval by simulation."""

import math

import numpy as np
import pytest

from dynamix.lab.comparison import verdict


def test_paired_ratios_are_averaged_over_pairs_not_over_sums() -> None:
    times = np.array([[[2.0, 50.0]]])  # twice as slow on the fast seed, half as slow on the slow one
    base = np.array([[1.0, 100.0]])
    found = verdict.paired_ratio(times, base)
    assert found is not None
    assert found.ratio == pytest.approx(1.0, rel=1e-12)


def test_ratios_of_two_policy_seeds_are_averaged() -> None:
    found = verdict.paired_ratio(np.array([[[1.0, 1.0]], [[4.0, 4.0]]]), np.ones((1, 2)))
    assert found is not None
    assert found.ratio == pytest.approx(2.0, rel=1e-12)


def test_families_count_alike_whatever_their_number_of_scenarios() -> None:
    weights = verdict.family_weights(["a", "a", "b"])
    assert weights.tolist() == [0.25, 0.25, 0.5]
    times = np.array([[[4.0, 4.0], [4.0, 4.0], [1.0, 1.0]]])
    found = verdict.paired_ratio(times, np.ones((3, 2)), families=["a", "a", "b"])
    assert found is not None
    assert found.ratio == pytest.approx(2.0, rel=1e-12)


def test_only_complete_pairs_count() -> None:
    times = np.array([[[2.0, np.nan, 8.0], [np.nan, np.nan, np.nan]]])
    base = np.array([[1.0, 1.0, np.nan], [1.0, 1.0, 1.0]])
    found = verdict.paired_ratio(times, base)
    assert found is not None
    assert found.ratio == pytest.approx(2.0, rel=1e-12)
    assert found.low is None
    assert verdict.paired_ratio(times, np.full((2, 3), np.nan)) is None


def test_equal_times_have_an_interval_without_width() -> None:
    found = verdict.paired_ratio(np.full((5, 2, 12), 3.0), np.full((2, 12), 6.0))
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(0.5), pytest.approx(0.5))


def test_the_same_results_give_the_same_interval() -> None:
    times = np.exp(np.random.default_rng(1).normal(0, 0.3, (5, 2, 12)))
    assert verdict.paired_ratio(times, np.ones((2, 12))) == verdict.paired_ratio(times, np.ones((2, 12)))


def test_one_seed_says_nothing_of_the_spread() -> None:
    found = verdict.paired_ratio(np.full((1, 2, 1), 3.0), np.full((2, 1), 6.0))
    assert found == verdict.RatioInterval(pytest.approx(0.5), None, None)


def test_few_draws_leave_out_less_at_the_ends() -> None:
    assert verdict.expanded_tail(5) < verdict.expanded_tail(12) < 0.025
    assert verdict.expanded_tail(10_000) == pytest.approx(0.025, rel=1e-2)


@pytest.mark.parametrize(
    ("num_policy_seeds", "policy_sd", "seed_sd"), [(1, 0.0, 0.3), (5, 0.1, 0.3), (5, 0.3, 0.1), (5, 0.0, 0.3)]
)
def test_the_interval_holds_the_truth_about_as_often_as_it_says(
    num_policy_seeds: int, policy_sd: float, seed_sd: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "NUM_RESAMPLES", 600)
    generator = np.random.default_rng(7)
    num_trials, num_held = 300, 0
    for _ in range(num_trials):
        logs = (
            math.log(0.5)
            + generator.normal(0, policy_sd, (num_policy_seeds, 1, 1))
            + generator.normal(0, seed_sd, (1, 1, 12))
            + generator.normal(0, 0.1, (num_policy_seeds, 2, 12))
        )
        found = verdict.paired_ratio(np.exp(logs), np.ones((2, 12)))
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        num_held += found.low <= 0.5 <= found.high
    assert 0.90 <= num_held / num_trials <= 0.99


@pytest.mark.parametrize(
    ("family_sd", "scenario_sd", "seed_sd"), [(0.3, 0.0, 0.1), (0.3, 0.2, 0.1), (0.1, 0.0, 0.3), (0.5, 0.0, 0.02)]
)
def test_the_interval_over_families_holds_the_truth_of_all_there_could_be(
    family_sd: float, scenario_sd: float, seed_sd: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "NUM_RESAMPLES", 600)
    generator = np.random.default_rng(11)
    families = [name for name in "abcdefgh" for _ in range(2)]
    num_trials, num_held, num_held_by_seeds = 200, 0, 0
    for _ in range(num_trials):
        logs = (
            math.log(0.5)
            + np.repeat(generator.normal(0, family_sd, 8), 2)[None, :, None]
            + generator.normal(0, scenario_sd, (1, 16, 1))
            + generator.normal(0, seed_sd, (1, 16, 6))
        )
        found = verdict.paired_ratio(np.exp(logs), np.ones((16, 6)), families=families)
        assert found is not None
        assert None not in (found.low, found.high, found.family_low, found.family_high)
        num_held += found.family_low <= 0.5 <= found.family_high  # type: ignore[operator]
        num_held_by_seeds += found.low <= 0.5 <= found.high  # type: ignore[operator]
    assert 0.91 <= num_held / num_trials <= 1.0
    if family_sd > seed_sd:
        assert num_held_by_seeds / num_trials < 0.75  # it holds for these families only


def test_one_family_says_nothing_of_others() -> None:
    found = verdict.paired_ratio(np.full((1, 2, 6), 3.0), np.full((2, 6), 6.0), families=["a", "a"])
    assert found is not None
    assert (found.family_low, found.family_high) == (None, None)
    assert found.low is not None


def test_the_spread_is_that_within_scenarios() -> None:
    times = np.array([[[9.0, 11.0], [90.0, 110.0]]])  # both: sd sqrt(2) / 10 of the mean
    assert verdict.relative_spread(times) == pytest.approx(math.sqrt(2) / 10)
    assert verdict.relative_spread(np.array([[[1.0]]])) is None


def test_the_mean_of_one_policy_has_students_interval() -> None:
    found = verdict.crossed_mean(np.array([[[1.0, 2.0, 3.0, np.nan]]]))  # standard error 1 / sqrt(3), t(2) = 4.303
    assert found is not None
    assert found.value == pytest.approx(2.0)
    assert found.low == pytest.approx(2.0 - 4.303 / 3**0.5, abs=1e-3)
    assert verdict.crossed_mean(np.array([[[4.0]], [[2.0]]])) == verdict.MeanInterval(3.0, None, None)
    assert verdict.crossed_mean(np.full((2, 1, 3), 5.0)) == verdict.MeanInterval(5.0, 5.0, 5.0)
    assert verdict.crossed_mean(np.full((2, 1, 3), np.nan)) is None


def test_runs_of_the_same_policy_are_no_new_evidence_on_policies() -> None:
    few, many = (verdict.crossed_mean(np.repeat([[[1.0]], [[2.0]], [[3.0]]], number, axis=2)) for number in (2, 50))
    assert few is not None
    assert few == many
    assert few.low == pytest.approx(2.0 - 4.303 / 3**0.5, abs=1e-3)


@pytest.mark.parametrize(("of_policies", "of_seeds"), [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_the_interval_of_a_mean_covers_it_as_often_as_it_says(of_policies: float, of_seeds: float) -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        policies, seeds, rest = (generator.normal(size=shape) for shape in ((3, 1, 1), (1, 1, 6), (3, 1, 6)))
        found = verdict.crossed_mean(of_policies * policies + of_seeds * seeds + 0.5 * rest)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0 <= found.high
    assert covered / 1000 >= 0.92  # 0.94 to 0.96 in longer simulations; 0.7 percentage points of chance here
