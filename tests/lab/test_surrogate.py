"""The surrogate: its clock is that of virtual clusters, its reward the published one, and credit goes to the cause."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support import examples, virtual

from dynamix.arbitrator.learned.policy import LAG, Columns, Levers
from dynamix.arbitrator.learning.rollout import Trajectory
from dynamix.lab.learning.surrogate import RATE_EXPONENT, Chooser, SurrogateJobs, play_deltas, play_levers
from dynamix.lab.simulator.clock import Conditions, VirtualClock
from dynamix.lab.simulator.scenario import Network, Scenario, Workers
from dynamix.reward.formula import Weights, reward_of
from dynamix.schemas.messages import RankMetrics, SystemMetrics

EXACT = Levers(np.ones(1), np.ones(1), np.zeros(1))
UNLIKE = (
    Workers(count=1, samples_per_s=4000.0, overhead_s=0.002, saturation=64),
    Workers(count=2, samples_per_s=1000.0),
    Workers(count=1, samples_per_s=2000.0, bandwidth_mbit_s=300.0),
)
ALIKE = (Workers(count=4, samples_per_s=1000.0, overhead_s=0.003),)
NETWORKS = {
    "fast": Network(gradient_bytes=1_000_000),
    "latency": Network(gradient_bytes=10_000, latency_s=0.002, num_buckets=2),
    "bandwidth": Network(gradient_bytes=20_000_000, bandwidth_mbit_s=800.0, overlap=0.3),
}


def jobs_of(scenario: Scenario, num: int = 1) -> SurrogateJobs:
    """Jobs exactly as the scenario has them."""
    return SurrogateJobs([scenario], num, seed=0, spread=0.0)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("sizes", [(32, 32, 32, 32), (256, 64, 64, 128), (1, 500, 20, 3)])
def test_a_step_takes_as_long_as_on_the_virtual_clock(network: str, sizes: tuple[int, ...]) -> None:
    scenario = virtual.scenario(workers=UNLIKE, network=NETWORKS[network])
    conditions = Conditions(np.ones(4), np.ones(4), np.zeros(4, dtype=bool))
    expected = VirtualClock(scenario, 0).step(np.array(sizes, dtype=np.float64), conditions)
    seen = jobs_of(scenario).run_window(np.array([sizes], dtype=np.float64), EXACT, tracks=False)
    assert seen["step_time_s"][0] == pytest.approx([expected.step_s] * 4)
    assert seen["compute_time_s"][0] == pytest.approx(expected.compute_s)
    assert seen["sync_time_s"][0] == pytest.approx(expected.sync_s)
    assert seen["window_s"] == pytest.approx(scenario.window_steps * expected.step_s)


def test_rounds_of_local_steps_go_on_across_windows_and_hide_no_communication() -> None:
    scenario = virtual.scenario(workers=UNLIKE, network=NETWORKS["bandwidth"])
    conditions, sizes = Conditions(np.ones(4), np.ones(4), np.zeros(4, dtype=bool)), np.full(4, 64.0)
    clock, jobs = VirtualClock(scenario, 0), jobs_of(scenario)
    every_4 = EXACT._replace(every=np.full(1, 4.0))
    took_s = sum(float(jobs.run_window(sizes[None], every_4, tracks=False)["window_s"][0]) for _ in range(4))
    slowest_s = float(clock.step(sizes, conditions).compute_s.max())
    assert took_s == pytest.approx(20 * slowest_s + 5 * clock.communication_s(conditions))


def test_ranks_that_divide_their_sum_are_as_fast_as_each_other() -> None:
    scenario = virtual.scenario(workers=ALIKE)
    conditions = Conditions(np.ones(4), np.ones(4), np.zeros(4, dtype=bool))
    expected = VirtualClock(scenario, 0).step(np.full(4, 64.0), conditions)
    seen = jobs_of(scenario).run_window(np.array([[10.0, 20.0, 30.0, 196.0]]), EXACT)
    assert seen["step_time_s"][0] == pytest.approx([expected.step_s] * 4)
    unlike = jobs_of(virtual.scenario(workers=UNLIKE[1:], network=NETWORKS["fast"]))
    assert unlike.run_window(np.full((1, 3), 100.0), EXACT)["num_samples"][0] == pytest.approx([375, 375, 750])


@pytest.mark.parametrize(
    ("fields", "every", "expected"),
    [
        ({}, 1, 0.5),
        ({"base_global_batch_size": 15}, 1, 0.5 * 2**RATE_EXPONENT),
        ({"base_global_batch_size": 15, "optimizer": "adam"}, 1, 0.5 * 4**RATE_EXPONENT),
        ({}, 2, 0.5 / (1 + 0.1 / 2**1.5)),
        ({}, 9, 0.5 / (1 + 0.8 / 2**1.5)),
    ],
)
def test_a_step_of_as_many_samples_as_the_noise_scale_is_worth_half(
    fields: dict[str, Any], every: int, expected: float
) -> None:
    """Eight ranks at the start, where the noise scale is 30."""
    workers = (Workers(count=8, samples_per_s=1000.0),)
    jobs = jobs_of(virtual.scenario(workers=workers, **({"base_global_batch_size": 30} | fields)))
    assert jobs.worth(np.array([30.0]), np.array([float(every)])) == pytest.approx([expected])


def choosing(*choices: tuple[int, ...], num_decisions: int = 1) -> Chooser:
    """The given choices of each window, alike for all decisions; neutral ones after them."""
    left = list(choices)

    def choose(inputs_DI: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        chosen = left.pop(0) if left else (0,) * len(choices[0])
        return np.tile(chosen, (num_decisions, 1)), np.zeros(len(inputs_DI)), np.zeros(len(inputs_DI))

    return choose


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_reward_of_deltas_is_the_published_one(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(accuracy=1.0, alpha=2.0, beta=0.5, delta=0.1, eta=0.02)
    jobs, windows = jobs_of(virtual.scenario(optimizer=optimizer)), []
    train: Callable[..., Columns] = jobs.run_window

    def run_window(sizes: np.ndarray, levers: Levers, *, tracks: bool) -> Columns:
        windows.append((sizes, train(sizes, levers, tracks=tracks)))
        return windows[-1][1]

    monkeypatch.setattr(jobs, "run_window", run_window)
    played = play_deltas(jobs, choosing((3,), (4,), (1,), num_decisions=4), 6, weights)
    assert len(windows) == 6
    for (sizes, seen), rewards in zip(windows[LAG:], played.rewards_TD, strict=True):
        names = ("accuracy", "accuracy_change", "step_time_s")
        of_rank = {name: float(seen[name][0, 1]) for name in names} | {"local_batch_size": int(sizes[0, 1])}
        rank = RankMetrics(rank=1, training=examples.training(**of_rank), system=SystemMetrics())
        metrics = examples.job_metrics(sigma_norm_sq=float(seen["sigma_norm_sq"][0, 0]))
        window = examples.window(optimizer_family=optimizer, job_metrics=metrics)
        expected = reward_of(msgspec.structs.replace(window, ranks=(rank,)), weights).ranks[0].reward
        assert rewards[1] == pytest.approx(expected)


def test_a_decision_is_rewarded_for_the_first_window_under_it() -> None:
    """Only the third decision changes anything."""

    def of_levers(choice: int) -> Trajectory:
        return play_levers(jobs_of(virtual.scenario()), choosing((0, 0, 0), (0, 0, 0), (choice, 0, 0)), 8)

    def of_deltas(choice: int) -> Trajectory:
        choose = choosing((0,), (0,), (choice,), num_decisions=4)
        return play_deltas(jobs_of(virtual.scenario()), choose, 8, Weights())

    for play in (of_levers, of_deltas):
        usual, changed = play(0), play(4)
        is_equal = (usual.rewards_TD == changed.rewards_TD).all(axis=1)
        assert is_equal.tolist() == [True, True, False, False, False, False]
        assert changed.actions_TDL[:, 0, 0].tolist() == [0, 0, 4, 0, 0, 0]


@pytest.mark.parametrize("action_set", ["levers", "deltas"])
def test_without_weights_the_reward_is_progress_per_second_over_that_of_the_first_window(action_set: str) -> None:
    if action_set == "levers":
        played = play_levers(jobs_of(virtual.scenario()), choosing((0, 0, 0)), 5)
    else:
        played = play_deltas(jobs_of(virtual.scenario()), choosing((0,), num_decisions=4), 5, None)
    jobs, levers = jobs_of(virtual.scenario()), Levers(np.full(1, 128.0), np.ones(1), np.zeros(1))
    seen = [jobs.run_window(np.full((1, 4), 32.0), levers, tracks=action_set == "levers") for _ in range(5)]
    speeds = [float(np.log2(each["progress"] / each["window_s"])[0]) for each in seen]
    expected = np.array([[0.1 * (speed - speeds[0])] for speed in speeds[LAG:]])
    assert played.rewards_TD == pytest.approx(expected + 0 * played.rewards_TD)
