"""Comparisons with made-up outcomes: numbers known in advance."""

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.support.learned import policy_file
from tests.support.small_suites import made_up, tuned_for, write_suite

from dynamix.lab.comparison import verdict
from dynamix.lab.comparison.rows import make_row, parse_rows, with_references
from dynamix.lab.comparison.runs import Ledger, RunTask, fill, plan
from dynamix.lab.comparison.verdict import OutcomeTable, Verdict, VerdictRow, judge, note_on
from dynamix.lab.simulator.scenario import Suite, suite_named

TIMES_S = {"static": 1.0, "random": 2.0, "goodput": 0.8, "rule": 0.4}
TUNED = tuned_for(mixed=128, alike=64)


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return write_suite(tmp_path / "suite", mixed=1000, alike=4000)


def known_time_s(task: RunTask) -> float | None:
    """By policy; the rule gains in the mixed family only, random misses in the mixed one on seed 1."""
    if task.setting.policy == "random" and task.scenario.family == "mixed" and task.seed == 1:
        return None
    if task.setting.policy == "rule" and task.scenario.family == "alike":
        return TIMES_S["static"]
    return TIMES_S[task.setting.policy]


def compared(
    suite: Suite,
    rows: str,
    seeds: int,
    monkeypatch: pytest.MonkeyPatch,
    time_s: Callable[[RunTask], float | None] = known_time_s,
) -> tuple[Verdict, OutcomeTable]:
    monkeypatch.setattr("dynamix.lab.comparison.runs.run_episodes", made_up(time_s))
    monkeypatch.setattr("dynamix.lab.comparison.rows.shipped_files", lambda _: [])
    rows = with_references(parse_rows(rows))
    cells = plan(suite, rows, range(seeds), TUNED)
    with Ledger() as ledger:
        fill(cells, ledger)
        return judge(suite, rows, cells, ledger, TUNED)


def row(rows: list[VerdictRow], policy: str) -> VerdictRow:
    return next(found for found in rows if found.policy == policy)


def test_ratios_are_those_of_the_heterogeneous_families_and_the_control_stands_apart(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict, _ = compared(suite, "rule", 3, monkeypatch)
    rule = row(verdict.policies, "rule")
    static, goodput = rule.ratios["best-static"], rule.ratios["goodput"]
    assert (static.value, static.high, goodput.value) == pytest.approx((0.4, 0.4, 0.5))
    assert rule.num_runs == 3
    control = row(verdict.families["alike"].policies, "rule").ratios["best-static"]
    assert control.value == pytest.approx(1.0)
    assert (verdict.families["alike"].control, verdict.families["mixed"].control) == (True, False)
    assert verdict.heterogeneous_families == ["mixed"]
    random = row(verdict.families["mixed"].policies, "random")
    assert (random.misses, random.median_time_to_target_s) == (1, 2.0)  # a miss counts as the time limit


def test_the_headline_counts_the_control_among_all_families_and_shows_it_apart(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict, _ = compared(suite, "rule,best-static:track=1", 3, monkeypatch)
    assert list(verdict.headline) == ["best-static", "best-static+track", "goodput"]
    for base, ratios in (("best-static", (0.4**0.5, 0.4, 1.0)), ("goodput", ((0.5 * 1.25) ** 0.5, 0.5, 1.25))):
        found = [interval.value for interval in verdict.headline[base].values() if interval is not None]
        assert found == pytest.approx(ratios)
    over_all = verdict.headline["best-static"]["all families"]
    assert over_all.low == pytest.approx(0.4**0.5)  # for these two families nothing is left to chance
    assert over_all.family_low < 0.4  # two families say little of others


def test_runs_of_one_row_that_differ_too_much_are_a_failure_signature(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict, _ = compared(suite, "rule", 6, monkeypatch, lambda task: 0.1 if task.seed % 2 else 1.9)
    (found,) = row(verdict.families["mixed"].policies, "rule").signatures
    assert found.startswith("spread-between-runs in mixed-2")


def test_a_policy_that_learned_on_the_suites_scenarios_is_marked_and_on_others_of_their_name_is_not(
    tmp_path: Path,
) -> None:
    train = suite_named("train")
    known, other = train.scenarios[:2]
    path = tmp_path / "mine.safetensors"
    path.write_bytes(policy_file(scenarios=(known.name, other.name)).to_bytes())
    (row,) = parse_rows(f"mine:files={path}")
    changed = msgspec.structs.replace(other, learning_rate=0.5)
    suite = Suite(name="mixture", scenarios=(known, changed))
    assert note_on(row, suite) == f"learned on scenarios of this suite: {known.name}"
    assert note_on(row, Suite(name="new", scenarios=(changed,))) == ""
    assert note_on(row, suite_named("heldout")) == ""


def test_what_is_known_is_not_run_again_and_equal_runs_run_once(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def time_s(task: RunTask) -> float:
        ran.append(task.key)
        return 1.0

    monkeypatch.setattr("dynamix.lab.comparison.runs.run_episodes", made_up(time_s))
    rows = parse_rows("static:local_batch_size=128,best-static")  # the same in the mixed family, not in the control
    cells = plan(suite, rows, range(1), TUNED)
    told: list[tuple[int, int]] = []

    def tell(num_done: int, num_total: int, _: str) -> None:
        told.append((num_done, num_total))

    with Ledger() as ledger:
        fill(cells[:2], ledger, on_progress=tell)
        fill(cells, ledger, on_progress=tell)
    assert len(ran) == len(set(ran)) == 3
    assert told == [(1, 2), (2, 2), (3, 3)]


def test_each_scenario_seed_meets_one_policy_seed_in_turn(suite: Suite, tmp_path: Path) -> None:
    files = [tmp_path / f"mine-{number}.safetensors" for number in range(3)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]))
    rows = [make_row({"policy": "mine", "files": [str(file) for file in files]}), *parse_rows("static")]
    cells = plan(suite, rows, range(4), TUNED)
    assert [(cell.task.seed, cell.policy_seed) for cell in cells if cell.label == "mine"] == [
        (seed, seed % 3) for seed in range(4) for _ in suite.scenarios
    ]
    assert sum(cell.label == "static" for cell in cells) == 4 * len(suite.scenarios)


def time_by_rate_s(task: RunTask) -> float | None:
    """Twice the rate is best in the mixed family and missed on seed 1; half of it is worst in both."""
    if task.setting.policy == "static":
        return 1.0
    by_rate = {"mixed": {0.5: 1.8, 1.0: 0.8, 2.0: 0.2}, "alike": {0.5: 1.0, 1.0: 0.5, 2.0: 0.6}}
    if (task.scenario.family, task.setting.learning_rate_factor, task.seed) == ("mixed", 2.0, 1):
        return None
    return by_rate[task.scenario.family][task.setting.learning_rate_factor]


def test_the_best_of_some_rows_is_chosen_by_scenario_over_all_seeds(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamix.lab.comparison.runs.run_episodes", made_up(time_by_rate_s))
    rows = parse_rows("static,rule:learning_rate_factor=best")
    cells = plan(suite, rows, range(2), TUNED)
    assert len(cells) == 4 * 2 * 2
    with Ledger() as ledger:
        fill(cells, ledger)
        table = OutcomeTable(suite.scenarios, cells, ledger, rows)
    assert table.chosen["rule/rate=best"] == {"mixed-2": "rule/rate=2", "alike-2": "rule"}  # 0.63 of 0.8; 0.5
    assert table.times("rule/rate=best", ["mixed"]).tolist() == [[[0.2, 2.0]]]
    assert table.num_misses("rule/rate=best", ["mixed", "alike"]) == 1
    found = table.ratio("rule/rate=best", "static", ["alike"])
    assert found.value == pytest.approx(0.5)


def test_families_count_alike_and_only_complete_pairs_count() -> None:
    times = np.array([[[4.0, 4.0], [4.0, 4.0], [1.0, 1.0]]])
    assert verdict.paired_ratio(times, np.ones((3, 2)), ["a", "a", "b"]).value == pytest.approx(2.0, rel=1e-12)

    times = np.array([[[2.0, np.nan, 8.0], [np.nan, np.nan, np.nan]]])
    base = np.array([[1.0, 1.0, np.nan], [1.0, 1.0, 1.0]])
    found = verdict.paired_ratio(times, base)
    assert (found.value, found.low) == (pytest.approx(2.0, rel=1e-12), None)
    assert verdict.paired_ratio(times, np.full((2, 3), np.nan)) is None


@pytest.mark.parametrize(("num_policy_seeds", "policy_sd", "seed_sd"), [(1, 0.0, 0.3), (5, 0.3, 0.1)])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(
    num_policy_seeds: int, policy_sd: float, seed_sd: float
) -> None:
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
        num_held += found.low <= 0.5 <= found.high
    assert 0.90 <= num_held / num_trials <= 0.99


def test_the_mean_of_one_policy_has_students_interval() -> None:
    found = verdict.mean_interval(np.array([[[1.0, 2.0, 3.0, np.nan]]]))  # standard error 1 / sqrt(3), t(2) = 4.303
    assert found.value == pytest.approx(2.0)
    assert found.low == pytest.approx(2.0 - 4.303 / 3**0.5, abs=1e-3)
    assert verdict.mean_interval(np.array([[[4.0]], [[2.0]]])) == verdict.Interval(3.0)
    assert verdict.mean_interval(np.full((2, 1, 3), 5.0)) == verdict.Interval(5.0, 5.0, 5.0)
    assert verdict.mean_interval(np.full((2, 1, 3), np.nan)) is None
