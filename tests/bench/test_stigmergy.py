import pytest
from bench.harness.command import BenchmarkError
from bench.stigmergy.__main__ import ARMS, chosen_arms
from bench.stigmergy.clusters import DEATH_WINDOW, WithHalfOfTheAgents, WithoutArbitrator, scaled, traffic
from bench.stigmergy.curve import panels_of
from tests.support import virtual

from dynamix.arbitrator.policies.registry import policy_named
from dynamix.lab.experiments.episodes.episode import run_episode


def test_a_scenario_is_scaled_in_its_proportions() -> None:
    of = scaled(virtual.scenario(), 16, 4, has_stragglers=False)
    assert ([workers.count for workers in of.workers], of.world_size, len(of.nodes)) == ([8, 8], 16, 4)
    assert of.time_limit_s == 4 * virtual.scenario().time_limit_s
    with pytest.raises(ValueError, match="5 workers cannot be divided"):
        scaled(virtual.scenario(), 5, 1, has_stragglers=False)


def test_what_died_sends_nothing_from_then_on() -> None:
    scenario, data = virtual.scenario(ranks_per_node=2, target_accuracy=1.0, time_limit_s=6.0), virtual.data()
    episode = run_episode(scenario, policy_named("rule"), data=data, seed=1, make_cluster=WithoutArbitrator)
    assert max(applied.decided_window for applied in episode.applied) == DEATH_WINDOW - 1
    seen: dict[str, list[bool]] = {"virtual-0": [], "virtual-1": []}
    run_episode(
        scenario,
        policy_named("stigmergy"),
        data=data,
        seed=1,
        make_cluster=WithHalfOfTheAgents,
        on_window=lambda reports: [
            seen[report.node].append(report.field is not None and report.field.own is not None) for report in reports
        ],
    )
    assert all(seen["virtual-0"][2:])
    assert (seen["virtual-1"][DEATH_WINDOW + 1], seen["virtual-1"][-1]) == (True, False)


def test_agents_publish_one_message_per_node_and_an_arbitrator_one_more() -> None:
    scenario, data = virtual.scenario(ranks_per_node=2), virtual.data()
    assert traffic(scenario, policy_named("stigmergy"), data).num_messages == 2
    assert traffic(scenario, policy_named("proportional"), data).num_messages == 3


def test_the_curve_of_learning_has_a_part_for_each_stage() -> None:
    row = {"entropy": 1.5, "validation_vs_rule": None}
    rows = [{**row, "num_episodes": 8 * (index + 1), "vs_rule": 1.0 + index} for index in range(4)]
    rows[-1]["validation_vs_rule"] = 0.9
    times, undecided = panels_of({"updates": rows, "metadata": {"scenarios": ["mixed-8-of-2", "a-of-2", "a-of-32"]}})
    assert [(curve.label, curve.points) for curve in times.curves] == [
        ("2 workers, drawn", [(8, 1.0), (16, 2.0)]),
        ("32 workers, drawn", [(24, 3.0), (32, 4.0)]),
        ("32 workers, likeliest", [(32, 0.9)]),
    ]
    assert len(undecided.curves) == 2


def test_arms_are_chosen_by_name_and_always_with_the_reference() -> None:
    assert [ARMS[index].name for index in chosen_arms("rule,stigmergy x half")] == ["rule", "stigmergy x half"]
    assert len(chosen_arms("")) == len(ARMS)
    with pytest.raises(BenchmarkError, match="--arms 'rules': there are static"):
        chosen_arms("rules")
    with pytest.raises(BenchmarkError, match="'rule', which must be among them"):
        chosen_arms("stigmergy")
