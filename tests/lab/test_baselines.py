"""OmniLearn's controller, and the clairvoyant division that bounds what dividing can gain."""

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.support import examples
from tests.support.small_suites import write_suite
from tests.support.virtual import action, cluster, data, scenario

from dynamix.arbitrator.policies.model.observation import Array32
from dynamix.lab.comparison.omnilearn import OmniLearn
from dynamix.lab.comparison.rows import Row, known_policy
from dynamix.lab.comparison.runs import RunTask, run_task
from dynamix.lab.simulator.cluster import ClairvoyantCluster, ComputeTimes, best_split
from dynamix.lab.simulator.scenario import SpeedChange, Stragglers, Workers
from dynamix.schemas.features import GLOBAL_FEATURES, RANK_FEATURES, RANK_INDEX

JOB = examples.job()
GLOBAL_F = np.full(len(GLOBAL_FEATURES), np.nan, dtype=np.float32)


def observe(sizes: tuple[int, ...], throughput: tuple[float, ...]) -> Array32:
    """What ranks show after a window of 10 steps."""
    obs_WF = np.full((len(sizes), len(RANK_FEATURES)), np.nan, dtype=np.float32)
    obs_WF[:, RANK_INDEX["num_samples"]] = np.array(sizes) * JOB.window_steps
    obs_WF[:, RANK_INDEX["compute_time_s"]] = np.array(sizes) / np.array(throughput)
    obs_WF[:, RANK_INDEX["age_windows"]] = 0
    obs_WF[:, RANK_INDEX["decided_local_batch_size"]] = sizes
    return obs_WF


def test_omnilearn_divides_the_global_batch_by_throughput_and_begins_to_smooth_again() -> None:
    decision = OmniLearn().decide(JOB, 0, observe((128,) * 4, (3000.0, 3000.0, 3000.0, 1000.0)), GLOBAL_F, b"")
    assert decision.allocation.local_batch_sizes == (154, 154, 153, 51)
    assert decision.allocation.split == "fixed"
    assert decision.carry == b""


def test_omnilearn_smooths_until_a_size_leaves_its_dead_band() -> None:
    first = OmniLearn().decide(JOB, 0, observe((128,) * 4, (1000.0, 1000.0, 1000.0, 960.0)), GLOBAL_F, b"")
    assert first.allocation.local_batch_sizes == (128,) * 4  # 124 would be off by 3 %
    slower = observe((128,) * 4, (1000.0, 1000.0, 1000.0, 840.0))
    second = OmniLearn().decide(JOB, 1, slower, GLOBAL_F, first.carry)
    assert second.allocation.local_batch_sizes == (132, 131, 131, 118)  # 900, the mean of both


def test_omnilearn_waits_for_the_first_times_of_all() -> None:
    obs_WF = observe((128,) * 4, (1000.0,) * 4)
    obs_WF[2, RANK_INDEX["compute_time_s"]] = np.nan
    decision = OmniLearn().decide(JOB, 0, obs_WF, GLOBAL_F, b"")
    assert decision.allocation.local_batch_sizes == (128,) * 4


def test_baselines_and_policies_are_found_by_name() -> None:
    assert known_policy("omnilearn").name == "omnilearn"
    assert known_policy("rule").name == "rule"
    with pytest.raises(ValueError, match="no policy is called 'omnilearm'"):
        known_policy("omnilearm")


@pytest.mark.parametrize("seed", range(6))
def test_the_best_split_is_the_best_of_all_there_are(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    times = ComputeTimes(drawn.uniform(0, 0.08, 3), drawn.uniform(0, 0.03, 3), drawn.uniform(0.001, 0.02, 3))
    lower, upper = np.array([1, 2, 0]), np.array([9, 12, 20])

    def slowest_s(sizes: tuple[int, ...]) -> float:
        return float(np.max(np.maximum(times.least_s, times.fixed_s + times.s_per_sample * np.array(sizes))))

    every = [
        sizes
        for sizes in itertools.product(*(range(low, high + 1) for low, high in zip(lower, upper, strict=True)))
        if sum(sizes) == 20
    ]
    found = best_split(20, times, lower, upper)
    assert found in every
    assert slowest_s(found) == pytest.approx(min(map(slowest_s, every)))
    assert best_split(1000, times, lower, upper) == (9, 12, 20)
    assert best_split(1, times, lower, upper) == (1, 2, 0)


def test_a_clairvoyant_cluster_meets_every_slowdown_with_equal_times_and_takes_no_action() -> None:
    job = scenario(
        workers=(Workers(samples_per_s=4000, count=2), Workers(samples_per_s=1000, count=2)),
        stragglers=Stragglers(factor=3.0, mean_normal_s=0.05, mean_slow_s=0.05, jitter=0.1),
        min_local_batch_size=1,
        initial_local_batch_size=128,
    )
    run = ClairvoyantCluster(job, data(6000), seed=3, policy="static")
    run.run_window()
    run.offer(action(run.job, 0, (8, 24, 40, 56)))
    report = run.run_window()[0]
    assert run.applied == []
    assert sum(row.num_samples for row in report.rows) == 5 * 512
    plain = cluster(job, data=data(6000))
    plain.run_window()
    plain.run_window()
    assert run.time_s < 0.6 * plain.time_s
    waits = [row.sync_time_s or 0.0 for row in report.rows]
    assert max(waits) - min(waits) < 0.1 * run.time_s / 10  # whole samples alone keep times apart


def test_a_clairvoyant_cluster_divides_by_a_changed_speed_from_the_first_step_that_has_it() -> None:
    workers = (Workers(samples_per_s=1000, count=2),)
    change = SpeedChange(rank=1, at_s=0.08, factor=3.0)
    job = scenario(workers=workers, speed_changes=(change,), initial_local_batch_size=32)
    rows = ClairvoyantCluster(job, data(6000), seed=3, policy="static").run_window()[0].rows
    # three steps of 32 ms and some communication begin before 0.08 s, the others divide 64 samples as 48 and 16
    assert [row.num_samples for row in rows] == [3 * 32 + 2 * 48, 3 * 32 + 2 * 16]


def test_runs_at_a_constant_batch_are_fastest_under_the_oracle_and_slowest_undivided(tmp_path: Path) -> None:
    job = write_suite(tmp_path, mixed=1000).scenarios[0]
    times_s = []
    for policy in ("oracle", "omnilearn", "static"):
        task = RunTask(scenario=job, setting=Row(policy=policy, local_batch_size=32), seed=0)
        done = run_task(task)
        assert done.evaluated_samples == sorted(done.evaluated_samples)
        assert len(done.evaluated_samples) == len(done.evaluations)
        times_s.append(done.virtual_time_s / done.num_steps)
    assert times_s[0] < 0.98 * times_s[1]
    assert times_s[1] < 0.8 * times_s[2]


def test_the_learning_rate_of_a_run_is_the_scenarios_times_its_factor() -> None:
    job = scenario(learning_rate=0.1)
    task = RunTask(scenario=job, setting=Row(policy="static", learning_rate_factor=0.5), seed=0)
    assert task.effective_scenario.learning_rate == pytest.approx(0.05)
    assert task.key != RunTask(scenario=job, setting=Row(policy="static"), seed=0).key
    assert msgspec.structs.replace(task.effective_scenario, learning_rate=0.1) == job
