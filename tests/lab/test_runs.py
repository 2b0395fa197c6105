"""Runs: what their identity covers, and a ledger that a kill cannot spoil."""

import itertools
import multiprocessing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.support import examples
from tests.support.small_suites import outcome, write_suite

from dynamix.arbitrator.policies.policy import Array32
from dynamix.lab.comparison.baselines import Bandit, OmniLearn
from dynamix.lab.comparison.rows import Row
from dynamix.lab.comparison.runs import Ledger, RunTask, run_task
from dynamix.lab.simulator.clock import ComputeTimes
from dynamix.lab.simulator.cluster import best_split
from dynamix.lab.simulator.episode import EpisodeError, RunOutcome, run_episodes
from dynamix.schemas.features import GLOBAL_FEATURES, GLOBAL_INDEX, RANK_FEATURES, RANK_INDEX


@pytest.fixture
def task(tmp_path: Path) -> RunTask:
    (scenario,) = write_suite(tmp_path / "suite", mixed=1000).scenarios
    return RunTask(scenario=scenario, setting=Row(policy="static"), seed=3)


def test_everything_that_determines_a_run_is_in_its_identity(task: RunTask, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = msgspec.structs.replace
    others = [
        replace(task, seed=4),
        replace(task, scenario=replace(task.scenario, learning_rate=0.1)),
        replace(task, setting=Row(policy="random")),
        replace(task, setting=Row(policy="static", options={"track": 1.0})),
        replace(task, setting=Row(policy="static", local_batch_size=64)),
        replace(task, setting=Row(policy="static", exchange="local")),
    ]
    assert len({other.key for other in others} | {task.key}) == 7
    monkeypatch.setattr("dynamix.lab.comparison.runs.code_digest", lambda: "other code")
    assert replace(task).key != task.key


def test_a_published_policy_does_not_go_below_its_published_sizes(task: RunTask) -> None:
    replace = msgspec.structs.replace
    scenario = replace(task.scenario, min_local_batch_size=1, initial_local_batch_size=64)
    for policy, size, least in (("ppo-paper", 64, 32), ("ppo-paper", 16, 16), ("rule", 64, 1)):
        job = replace(scenario, initial_local_batch_size=size)
        run = replace(task, scenario=job, setting=Row(policy=policy))
        assert run.effective_scenario.min_local_batch_size == least
    asked = Row(policy="ppo-paper", local_batch_size=8)
    assert replace(task, scenario=scenario, setting=asked).initial_local_batch_size == 32


def test_a_line_torn_by_a_kill_is_dropped_and_the_others_stand(task: RunTask, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    later = msgspec.structs.replace(task, seed=4)
    with Ledger(path) as ledger:
        ledger.record_outcome(task, outcome(1.5), "first")
        ledger.record_outcome(later, outcome(None), "second")
    path.write_bytes(path.read_bytes()[:-20])
    with Ledger(path) as ledger:
        assert task in ledger
        assert later not in ledger
        ledger.record_outcome(later, outcome(2.5), "second, again")
    with Ledger(path) as ledger:
        assert ledger.get(later) == outcome(2.5)


@pytest.fixture
def tasks(tmp_path: Path) -> list[RunTask]:
    (scenario,) = write_suite(tmp_path / "suite", mixed=1000).scenarios
    return [
        RunTask(scenario=scenario, setting=Row(policy=policy), seed=seed)
        for policy in ("static", "random")
        for seed in (0, 1)
    ]


def without_clock(outcome: RunOutcome) -> RunOutcome:
    return msgspec.structs.replace(outcome, wall_s=0.0)


def test_workers_find_what_one_process_finds_and_end_when_the_iterator_is_closed(tasks: list[RunTask]) -> None:
    before = set(multiprocessing.active_children())
    running = run_episodes(run_task, tasks, jobs=2)
    index, outcome = next(running)
    running.close()
    assert set(multiprocessing.active_children()) <= before
    ((_, alone),) = run_episodes(run_task, [tasks[index]], jobs=1)
    assert without_clock(outcome) == without_clock(alone)
    assert outcome.time_to_target_s is not None
    assert outcome.num_steps > 0


def test_a_run_that_fails_is_named(tasks: list[RunTask]) -> None:
    broken = msgspec.structs.replace(tasks[0], setting=Row(policy="no-such-policy"))
    with pytest.raises(EpisodeError, match="no-such-policy in scenario mixed-2, seed 0: ValueError: no policy"):
        list(run_episodes(run_task, [broken], jobs=1))


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


def test_omnilearn_divides_by_throughput_and_smooths_until_a_size_leaves_its_dead_band() -> None:
    decision = OmniLearn().decide(JOB, 0, observe((128,) * 4, (3000.0, 3000.0, 3000.0, 1000.0)), GLOBAL_F, b"")
    assert decision.allocation.local_batch_sizes == (154, 154, 153, 51)
    assert decision.allocation.split == "fixed"
    assert decision.carry == b""
    first = OmniLearn().decide(JOB, 0, observe((128,) * 4, (1000.0, 1000.0, 1000.0, 960.0)), GLOBAL_F, b"")
    assert first.allocation.local_batch_sizes == (128,) * 4  # 124 would be off by 3 %
    slower = observe((128,) * 4, (1000.0, 1000.0, 1000.0, 840.0))
    second = OmniLearn().decide(JOB, 1, slower, GLOBAL_F, first.carry)
    assert second.allocation.local_batch_sizes == (132, 131, 131, 118)  # 900, the mean of both


def test_the_best_split_is_the_best_of_all_there_are() -> None:
    drawn = np.random.default_rng(0)
    times = ComputeTimes(drawn.uniform(0, 0.08, 3), drawn.uniform(0, 0.03, 3), drawn.uniform(0.001, 0.02, 3))
    lower, upper = np.array([1, 2, 0]), np.array([9, 12, 20])

    def slowest_s(sizes: tuple[int, ...]) -> float:
        return float(times.of(np.array(sizes)).max())

    ranges = (range(low, high + 1) for low, high in zip(lower, upper, strict=True))
    every = [sizes for sizes in itertools.product(*ranges) if sum(sizes) == 20]
    found = best_split(20, times, lower, upper)
    assert found in every
    assert slowest_s(found) == pytest.approx(min(map(slowest_s, every)))
    assert best_split(1000, times, lower, upper) == (9, 12, 20)


def test_runs_at_a_constant_batch_are_fastest_under_the_oracle_and_slowest_undivided(tmp_path: Path) -> None:
    job = write_suite(tmp_path, mixed=1000).scenarios[0]
    times_s = []
    for policy in ("oracle", "omnilearn", "static"):
        task = RunTask(scenario=job, setting=Row(policy=policy, local_batch_size=32), seed=0)
        done = run_task(task)
        times_s.append(done.virtual_time_s / done.num_steps)
    assert times_s[0] < 0.98 * times_s[1]
    assert times_s[1] < 0.8 * times_s[2]


def test_the_bandit_tries_each_exchange_and_keeps_the_one_of_most_progress_per_second() -> None:
    job = msgspec.structs.replace(JOB, exchange="local", supports_exchange=True)
    falls = {"none": 0.02, "int8": 0.08, "4 x int8": 0.04}
    carry, chosen, name = b"", [], "none"
    for window in range(30):
        global_F = np.full(len(GLOBAL_FEATURES), np.nan, dtype=np.float32)
        for feature, value in (("loss", 1.0), ("loss_change", -falls[name]), ("step_time_s", 0.1)):
            global_F[GLOBAL_INDEX[feature]] = value
        decision = Bandit().decide(job, window, observe((128,) * 4, (1000.0,) * 4), global_F, carry)
        exchange, carry = decision.allocation.exchange, decision.carry
        name = f"{exchange.every} x {exchange.codec}" if exchange.every > 1 else exchange.codec
        chosen.append(name)
    assert set(chosen[:17]) == set(falls)
    assert set(chosen[17:]) == {"int8"}
