"""Clusters drawn at random, and levers that are learned on them."""

import msgspec
import pytest
from tests.support import learned, learning, virtual

from dynamix.lab.experiments.learning import learn
from dynamix.lab.experiments.learning.episodes import EpisodeTask, play
from dynamix.lab.experiments.learning.variation import FAMILIES, drawn_scenarios
from dynamix.lab.simulator.scenario import Network


@pytest.mark.parametrize("family", FAMILIES)
def test_draws_are_equal_for_equal_seeds_and_differ_otherwise(family: str) -> None:
    first, again, other = drawn_scenarios(family, 3), drawn_scenarios(family, 3), drawn_scenarios(family, 3, seed=1)
    assert first == again
    assert len({scenario.workers for scenario in (*first, *other)}) == 6
    assert len({scenario.name for scenario in (*first, *other)}) == 6
    assert drawn_scenarios(family, 5)[:3] == first


def test_episodes_of_untrained_levers_take_as_long_as_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    learning.with_made_up_data(monkeypatch)
    scenario = virtual.scenario(
        exchange="local", network=Network(bandwidth_mbit_s=400.0, gradient_bytes=4_000_000), target_accuracy=0.7
    )
    untrained = learned.policy_file("levers", policy="levers").to_bytes()
    times_s = {play(EpisodeTask(scenario, 5, policy, "greedy")).time_s for policy in (b"", untrained)}
    assert len(times_s) == 1


def test_levers_are_learned_and_the_same_plan_gives_the_same_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    learning.with_made_up_data(monkeypatch)
    plan = learning.plan("levers", num_episodes=8)
    lossy = tuple(msgspec.structs.replace(scenario, exchange="lossy") for scenario in plan.scenarios)
    plan = msgspec.structs.replace(plan, scenarios=lossy)
    first, second = (learn(plan, num_workers=1) for _ in range(2))
    assert first.file.to_bytes() == second.file.to_bytes()
    assert first.file.metadata.action_set == "levers"
    assert [row.update for row in first.history] == [1, 2]
    assert all(row.entropy > 0 and row.num_decisions > 4 for row in first.history)
