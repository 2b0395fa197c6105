"""Episodes of one family: each begins with what the one before it taught, by the code that services run."""

import msgspec
import pytest
from tests.support import virtual

from dynamix.arbitrator.policies.rule import Rule
from dynamix.lab.simulator.episode import Episode, run_episode
from dynamix.lab.simulator.scenario import Network, Power
from dynamix.schemas.messages import ExploredArm, JobProfile, Report
from dynamix.schemas.messages.allocation import Objective

LONG = virtual.scenario(target_accuracy=0.5, fixed_time_s=2.0)
MEASURED = msgspec.structs.replace(LONG, power=(Power(busy_w=300.0, idle_w=60.0),) * 2)


def episode(
    profile: JobProfile | None = None,
    *explores: str,
    seed: int = 3,
    family: str = "virtual",
    objective: Objective = "time",
) -> Episode:
    return run_episode(
        *(LONG if objective == "time" else MEASURED, Rule()),
        data=virtual.data(),
        seed=seed,
        family=family,
        profile=profile,
        explores=explores,  # type: ignore[arg-type]
        objective=objective,
        keep_messages=True,
    )


def test_an_episode_leaves_a_profile_and_the_next_one_begins_with_it() -> None:
    first = episode()
    assert first.profile is not None
    assert (first.profile.run, first.profile.num_windows) == (1, first.num_windows)
    assert first.profile.noise
    second = episode(first.profile, seed=4)
    assert second.profile is not None
    assert second.profile.run == 2
    assert [bool(action.profile) for action in second.actions[:3]] == [True, False, False]
    assert any("the first windows agree with its profile" in action.reason for action in second.actions[:3])
    assert episode(family="").profile is None


def test_a_learning_rate_is_tried_only_where_the_job_lets_it() -> None:
    first = episode(None, "learning_rate")
    assert first.profile is not None
    assert [record.arm for record in first.profile.arms] == [ExploredArm()]
    second = episode(first.profile, "learning_rate", seed=4)
    assert {action.allocation.rate_factor for action in second.actions} <= {1.5, 1.0}
    assert second.actions[0].allocation.rate_factor == 1.5
    rates = [window.job_metrics.learning_rate for window in second.windows]
    sizes = [sum(rank.training.local_batch_size for rank in window.ranks) for window in second.windows]
    assert rates[0] is not None
    assert rates[2] is not None
    assert rates[2] / (sizes[2] / sizes[0]) ** 0.5 / rates[0] > 1.4


NARROW = virtual.scenario(
    network=Network(gradient_bytes=100_000_000, overlap=0.0),
    learning_rate=0.003,
    target_accuracy=1.0,
    fixed_time_s=40.0,
    time_limit_s=40.0,
    power=(Power(busy_w=300.0, idle_w=1.0), Power(busy_w=150.0, idle_w=1.0)),
)
"""Most of a step is communication: a larger batch is faster, and a smaller one computes less for the same accuracy."""
LEVELS = (0.6, 0.65, 0.7, 0.75, 0.78)


def chain_of(objective: Objective, num_runs: int) -> list[tuple[Episode, list[tuple[float, float]]]]:
    """Runs of a family under one seed, so that nothing but the arm differs; with time and joules after each window."""
    runs: list[tuple[Episode, list[tuple[float, float]]]] = []
    for number in range(num_runs):
        spent = [(0.0, 0.0)]

        def add(reports: list[Report], spent: list[tuple[float, float]] = spent) -> None:
            window_j = reports[0].energy_j
            assert window_j is not None
            spent.append((spent[-1][0] + reports[0].totals.time_s, spent[-1][1] + window_j))

        found = run_episode(
            *(NARROW, Rule()),
            data=virtual.data(4000),
            seed=3,
            job=f"run-{number}",
            family="virtual",
            profile=runs[-1][0].profile if runs else None,
            explores=("noise_multiplier",),
            objective=objective,
            on_window=add,
        )
        runs.append((found, spent))
    return runs


def cost_of(run: tuple[Episode, list[tuple[float, float]]]) -> tuple[float, float]:
    """Seconds and joules until the validation accuracy was first at some levels, summed over these."""
    episode, spent = run
    times = [next(each.time_s for each in episode.evaluations if each.accuracy >= level) for level in LEVELS]
    return sum(times), sum(next(joules for until_s, joules in spent if until_s >= time_s) for time_s in times)


def test_by_energy_the_arm_of_least_energy_is_taken_although_another_one_is_faster() -> None:
    by_time, by_energy = chain_of("time", 4), chain_of("energy", 4)
    assert "noise scale x" not in by_time[-1][0].actions[-1].reason
    assert by_energy[-1][0].actions[-1].reason.endswith("noise scale x 0.25")
    fast_s, fast_j = cost_of(by_time[-1])
    thrifty_s, thrifty_j = cost_of(by_energy[-1])
    assert fast_s < thrifty_s
    assert thrifty_j < 0.9 * fast_j
    profile = by_energy[-1][0].profile
    assert profile is not None
    assert (profile.arms, len(profile.energy_arms)) == ((), 3)


def test_energy_is_known_only_where_the_workers_power_is() -> None:
    with pytest.raises(ValueError, match=r"has no energy to compare runs by: add a table \[\[power\]\] per"):
        virtual.cluster(policy="rule", family="virtual", explores=("learning_rate",), objective="energy")
    power = (Power(busy_w=300.0, idle_w=50.0), Power(busy_w=100.0, idle_w=20.0))
    report = virtual.cluster(virtual.scenario(power=power)).run_window()[0]
    busy_s = [row.compute_time_s for row in report.rows]
    joules = 250.0 * (busy_s[0] + busy_s[1]) + 80.0 * (busy_s[2] + busy_s[3]) + 140.0 * report.totals.time_s
    assert report.energy_j == pytest.approx(joules)
    assert virtual.cluster().run_window()[0].energy_j is None
