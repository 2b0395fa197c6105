import numpy as np
import pytest
from tests.support import virtual

from dynamix.lab.simulator.clock import SLOW, Disturbances, Jitter, Switching
from dynamix.lab.simulator.scenario import Congestion, SpeedChange, Stragglers

EIGHT = (virtual.Workers(count=8, samples_per_s=1000.0),)
HEAVY = Stragglers(factor=4.0, mean_normal_s=2.0, mean_slow_s=1.0, jitter=0.1)


def test_what_is_slow_depends_on_the_time_and_not_on_when_one_looked() -> None:
    often = Switching(5, SLOW, 8, off_s=2.0, on_s=1.0)
    seldom = Switching(5, SLOW, 8, off_s=2.0, on_s=1.0)
    for tick in range(1000):
        state = often.at(tick * 0.05)
        if tick % 111 == 0:
            assert (seldom.at(tick * 0.05) == state).all()


def test_workers_are_slow_for_the_share_of_time_that_the_means_give() -> None:
    switching = Switching(1, SLOW, 16, off_s=2.0, on_s=1.0)
    seen = np.array([switching.at(tick * 0.1).copy() for tick in range(10_000)])
    assert seen.mean() == pytest.approx(1 / 3, abs=0.03)
    switches = np.abs(np.diff(seen.astype(int), axis=0)).sum() / 16
    assert switches == pytest.approx(2 * 1000 / 3.0, rel=0.1)  # on and off once in 3 s, over 1000 s


def test_one_seed_disturbs_alike_and_another_differently() -> None:
    scenario = virtual.scenario(workers=EIGHT, stragglers=HEAVY)
    first, again, other = (Disturbances(scenario, seed) for seed in (7, 7, 8))
    draws = [[each.at(step, step * 0.3).slowdown for step in range(300)] for each in (first, again, other)]
    assert np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])


def test_a_straggler_is_slower_by_the_factor_times_the_jitter_of_the_step() -> None:
    scenario = virtual.scenario(workers=EIGHT, stragglers=HEAVY)
    disturbances, jitter, states = Disturbances(scenario, 7), Jitter(7, 8, 0.1), Switching(7, SLOW, 8, off_s=2, on_s=1)
    for step in range(300):
        expected = jitter.of_step(step) * np.where(states.at(step * 0.3), 4.0, 1.0)
        assert disturbances.at(step, step * 0.3).slowdown == pytest.approx(expected, rel=1e-12)


def test_jitter_has_the_median_one_and_the_sigma_that_was_asked_for() -> None:
    jitter = Jitter(1, 4, 0.25)
    logs = np.log([jitter.of_step(step) for step in range(5000)])
    assert np.median(logs) == pytest.approx(0.0, abs=0.01)
    assert logs.std() == pytest.approx(0.25, rel=0.02)
    assert np.array_equal(jitter.of_step(17), np.exp(logs[17]))  # back in an earlier block


@pytest.mark.parametrize("shared", [True, False])
def test_congestion_is_of_the_whole_network_or_of_single_links(shared: bool) -> None:
    congestion = Congestion(factor=8.0, mean_clear_s=2.0, mean_congested_s=1.0, shared=shared)
    disturbances = Disturbances(virtual.scenario(workers=EIGHT, congestion=congestion), 2)
    seen = [disturbances.at(step, step * 0.5) for step in range(200)]
    assert {float(factor) for conditions in seen for factor in conditions.congestion} == {1.0, 8.0}
    assert all(((c.congestion == 8.0) == c.congested).all() for c in seen)
    assert all(len(set(c.congestion.tolist())) == 1 for c in seen) == shared


def test_a_change_of_speed_rules_from_its_time_to_the_next_one_of_its_rank() -> None:
    changes = (
        SpeedChange(rank=1, at_s=4.0, factor=0.5),
        SpeedChange(rank=1, at_s=1.0, factor=3.0, exchange_s=0.02),
        SpeedChange(rank=6, at_s=2.0, factor=2.0, exchange_s=0.01),
    )
    jitter, stragglers = Jitter(7, 8, 0.1), Stragglers(jitter=0.1)
    changing = Disturbances(virtual.scenario(workers=EIGHT, stragglers=stragglers, speed_changes=changes), 7)
    seen = []
    for step, time_s in enumerate((0.0, 0.999, 1.0, 1.5, 2.0, 3.9, 4.0, 99.0)):
        conditions = changing.at(step, time_s)
        factors = (conditions.slowdown / jitter.of_step(step)).round(9).tolist()
        assert [factors[rank] for rank in (0, 2, 3, 4, 5, 7)] == [1.0] * 6
        seen.append((factors[1], factors[6], conditions.exchange_s))
    calm, first, both, last = (1.0, 1.0, 0.0), (3.0, 1.0, 0.02), (3.0, 2.0, 0.02), (0.5, 2.0, 0.01)
    assert seen == [calm, calm, first, first, both, both, last, last]


def test_a_calm_cluster_is_never_disturbed() -> None:
    conditions = Disturbances(virtual.scenario(workers=EIGHT), 0).at(3, 9.0)
    assert (conditions.slowdown == 1.0).all()
    assert (conditions.congestion == 1.0).all()
    assert not conditions.congested.any()
