"""Rows that are the best of others, accuracies at equal samples, and what a comparison will cost."""

from pathlib import Path

import msgspec
import pytest
from tests.support.small_suites import made_up, outcome, tuned_for, write_suite

from dynamix.lab.experiments.comparison import evaluation
from dynamix.lab.experiments.comparison.contenders import parse_contenders
from dynamix.lab.experiments.comparison.evaluation import TYPICAL_RUN_S, estimate, fill, plan
from dynamix.lab.experiments.comparison.outcomes import OutcomeTable, counted_time_s
from dynamix.lab.experiments.comparison.runs import Ledger, RunTask
from dynamix.lab.experiments.episodes.suite import Suite

TUNED = tuned_for(mixed=128, alike=64)


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return write_suite(tmp_path / "suite", mixed=1000, alike=4000)


def test_a_miss_counts_as_the_time_limit() -> None:
    assert counted_time_s(None, 120.0) == 120.0
    assert counted_time_s(30.0, 120.0) == 30.0


def known_time_s(task: RunTask) -> float | None:
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
    monkeypatch.setattr(evaluation, "outcomes", made_up(known_time_s))
    contenders = parse_contenders("static,rule/rate=best")
    cells = plan(suite, contenders, range(2), TUNED)
    assert len(cells) == 4 * 2 * 2
    with Ledger() as ledger:
        fill(cells, ledger)
        table = OutcomeTable(suite.scenarios, cells, ledger, contenders)
    assert table.chosen["rule/rate=best"] == {"mixed-2": "rule/rate=2", "alike-2": "rule"}  # 0.63 of 0.8; 0.5
    assert table.times("rule/rate=best", ["mixed"]).tolist() == [[[0.2, 2.0]]]
    assert table.num_misses("rule/rate=best", ["mixed", "alike"]) == 1
    found = table.ratio("rule/rate=best", "static", ["alike"])
    assert found is not None
    assert found.ratio == pytest.approx(0.5)


def test_the_best_is_not_chosen_before_all_have_run(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "outcomes", made_up(known_time_s))
    contenders = parse_contenders("static,rule/rate=best")
    cells = plan(suite, contenders, range(1), TUNED)
    with Ledger() as ledger:
        fill(cells[:-1], ledger)
        table = OutcomeTable(suite.scenarios, cells, ledger, contenders)
    assert table.chosen["rule/rate=best"] == {"alike-2": "rule"}
    assert table.outcomes("rule/rate=best", ["mixed"]) == []


def test_accuracies_are_compared_after_the_samples_that_every_run_saw(suite: Suite) -> None:
    cells = plan(suite, parse_contenders("static,rule"), range(1), TUNED)
    with Ledger() as ledger:
        for cell in cells:
            is_rule, is_mixed = cell.label == "rule", cell.family == "mixed"
            made = msgspec.structs.replace(
                outcome(1.0),
                evaluations=[(0.1, 0.2), (0.2, 0.6)] if is_rule else [(0.1, 0.4), (0.2, 0.5), (0.3, 0.7)],
                evaluated_samples=[100, 300] if is_rule else [200, 400, 600],
            )
            ledger.record_outcome(cell.task, made if is_mixed else outcome(1.0), "")
        table = OutcomeTable(suite.scenarios, cells, ledger)
    assert table.equal_samples("mixed") == {"mixed-2": 300}
    assert table.equal_samples("alike") == {}
    assert table.accuracy_at_equal_samples("rule", ["mixed", "alike"]) == pytest.approx(0.6)
    assert table.accuracy_at_equal_samples("static", ["mixed"]) == pytest.approx(0.45)
    assert table.accuracy_at_equal_samples("static", ["alike"]) is None


def test_an_estimate_counts_what_is_left_at_what_its_family_took(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "outcomes", made_up(lambda _: 1.0))  # half a second each
    cells = plan(suite, parse_contenders("static,best-static,rule"), range(10), TUNED)
    with Ledger() as ledger:
        before = estimate(cells, ledger)
        assert (before.num_runs, before.core_minutes) == (60, pytest.approx(60 * TYPICAL_RUN_S / 60))
        assert before.text(2) == "60 runs to do: some 2 minutes with --jobs 2."
        fill([cell for cell in cells if cell.family == "mixed" and cell.task.seed < 5], ledger)
        left = estimate(cells, ledger)
    assert left.num_runs == 45
    assert left.core_minutes == pytest.approx((15 * 0.5 + 30 * TYPICAL_RUN_S) / 60)
