from pathlib import Path

import msgspec
import pytest
from bench.harness.command import BenchmarkError
from bench.stigmergy.__main__ import ARMS, chosen_arms
from bench.stigmergy.clusters import DEATH_WINDOW, WithHalfOfTheAgents, WithoutArbitrator, scaled, traffic
from bench.stigmergy.curve import panels_of
from bench.stigmergy.families import OVERALL, FamilyComparison, compare, tables_of, with_agents
from tests.support import virtual
from tests.support.small_suites import made_up, write_suite

from dynamix.arbitrator.policies.registry import policy_named
from dynamix.lab.experiments.comparison import evaluation
from dynamix.lab.experiments.comparison.runs import RunTask
from dynamix.lab.experiments.episodes.episode import run_episode
from dynamix.lab.experiments.episodes.suite import HELD_OUT, suite_named

DOCS = Path(__file__).parents[2] / "docs"


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


def test_every_worker_of_a_held_out_scenario_has_an_agent_of_its_own() -> None:
    held_out = suite_named(HELD_OUT)
    suite = with_agents(held_out)
    assert [len(scenario.nodes) for scenario in suite.scenarios] == [each.world_size for each in held_out.scenarios]
    assert {scenario.world_size for scenario in suite.scenarios} == {8, 32, 128}


def test_families_are_compared_by_pairs_of_seeds_and_count_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `a` agents take twice as long as the rule, in `b` eight times; with what they learned they miss."""

    def known_time_s(task: RunTask) -> float | None:
        if task.setting.options.get("learned"):
            return None
        slower = {"a": 2.0, "b": 8.0}[task.scenario.family] if task.setting.policy == "stigmergy" else 1.0
        return slower * (0.1 + 0.01 * task.seed)

    monkeypatch.setattr(evaluation, "outcomes", made_up(known_time_s))
    suite = write_suite(tmp_path, a=500, b=1000)
    found = compare(suite, "rule,ppo,stigmergy,stigmergy:learned=1", "rule", 5)
    rows = {(row.family, row.policy): row for row in found.rows}
    ratios = {place: row.against["rule"] for place, row in rows.items()}
    assert [ratios[family, "stigmergy"].ratio for family in ("a", "b", OVERALL)] == pytest.approx([2.0, 8.0, 4.0])
    assert (rows["a", "stigmergy:learned=1"].num_missed, rows[OVERALL, "stigmergy:learned=1"].num_missed) == (5, 10)
    assert rows["a", "ppo"].median_s == pytest.approx(0.12)
    assert {row.num_runs for row in found.rows} == {5, 10}  # one of its seeds of learning for each seed of `ppo`
    assert "| b | 2 | 0.1 | 1.00 [1.00, 1.00] | 8.00 [8.00, 8.00] |" in tables_of(found)
    with pytest.raises(BenchmarkError, match="--bases 'static': it must be one of --policies rule"):
        compare(suite, "rule", "static", 5)
    with pytest.raises(BenchmarkError, match="--seeds 0: at least 1"):
        compare(suite, "rule", "rule", 0)


def test_the_page_holds_the_held_out_tables_that_the_figures_make() -> None:
    found = msgspec.json.decode((DOCS / "results" / "stigmergy-heldout.json").read_bytes(), type=FamilyComparison)
    assert (found.suite, found.ranks_per_node) == (HELD_OUT, 1)
    page = (DOCS / "stigmergy.md").read_text()
    assert [table for table in tables_of(found).split("\n\n") if table not in page] == []
