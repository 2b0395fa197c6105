"""Runs: what their identity covers, and a ledger that a kill cannot spoil."""

import os
from pathlib import Path

import msgspec
import pytest
from tests.support.small_suites import outcome, write_suite

from dynamix.lab.experiments.comparison.contenders import Setting
from dynamix.lab.experiments.comparison.runs import Ledger, RunTask


@pytest.fixture
def task(tmp_path: Path) -> RunTask:
    (scenario,) = write_suite(tmp_path / "suite", mixed=1000).scenarios
    return RunTask(scenario=scenario, setting=Setting(policy="static"), seed=3)


def test_everything_that_determines_a_run_is_in_its_identity(task: RunTask) -> None:
    replace = msgspec.structs.replace
    others = [
        replace(task, seed=4),
        replace(task, scenario=replace(task.scenario, learning_rate=0.1)),
        replace(task, setting=Setting(policy="random")),
        replace(task, setting=Setting(policy="static", options={"track": 1.0})),
        replace(task, setting=Setting(policy="static", policy_digest="ab")),
        replace(task, setting=Setting(policy="static", initial_local_batch_size=64)),
        replace(task, setting=Setting(policy="static", learning_rate_rule="linear")),
    ]
    assert len({other.key for other in others} | {task.key}) == 8
    assert replace(task, setting=Setting(policy="static", policy_file="/elsewhere")).key == task.key


def test_the_code_is_in_the_identity(task: RunTask, monkeypatch: pytest.MonkeyPatch) -> None:
    key = task.key
    monkeypatch.setattr("dynamix.lab.experiments.comparison.runs.code_digest", lambda: "other code")
    assert msgspec.structs.replace(task).key != key


@pytest.mark.parametrize(("asked", "ruling"), [(None, None), (64, 64), (1024, 256), (1, 8)])
def test_a_size_to_start_with_keeps_to_the_scenarios_bounds(
    task: RunTask, asked: int | None, ruling: int | None
) -> None:
    setting = Setting(policy="static", initial_local_batch_size=asked)
    assert msgspec.structs.replace(task, setting=setting).initial_local_batch_size == ruling


def test_a_learning_rate_rule_overrides_the_scenarios(task: RunTask) -> None:
    linear = msgspec.structs.replace(task, setting=Setting(policy="static", learning_rate_rule="linear"))
    assert (task.ruling_scenario.learning_rate_rule, linear.ruling_scenario.learning_rate_rule) == ("sqrt", "linear")


def test_a_ledger_knows_again_what_it_was_told(task: RunTask, tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    with Ledger(path) as ledger:
        assert task not in ledger
        ledger.add(task, outcome(1.5), "static in mixed")
    with Ledger(path) as ledger:
        assert ledger.get(task) == outcome(1.5)


def test_a_line_torn_by_a_kill_is_dropped_and_the_others_stand(task: RunTask, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    later = msgspec.structs.replace(task, seed=4)
    with Ledger(path) as ledger:
        ledger.add(task, outcome(1.5), "first")
        ledger.add(later, outcome(None), "second")
    path.write_bytes(path.read_bytes()[:-20])
    with Ledger(path) as ledger:
        assert task in ledger
        assert later not in ledger
        ledger.add(later, outcome(2.5), "second, again")
    with Ledger(path) as ledger:
        assert ledger.get(later) == outcome(2.5)


def test_without_resume_old_results_are_put_aside_not_lost(task: RunTask, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with Ledger(path) as ledger:
        ledger.add(task, outcome(1.5), "first")
    with Ledger(path, resume=False) as ledger:
        assert task not in ledger
    with Ledger(tmp_path / "runs.jsonl.old") as ledger:
        assert task in ledger


@pytest.mark.parametrize("resume", [False, True])
def test_a_path_that_is_not_a_regular_file_is_neither_renamed_nor_read(
    task: RunTask, resume: bool, tmp_path: Path
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)  # like /dev/null, which a rename by root would take from the whole machine
    with Ledger(path, resume=resume) as ledger:
        ledger.add(task, outcome(1.5), "in memory")
        assert ledger.get(task) == outcome(1.5)
    assert path.is_fifo()
    assert not (tmp_path / "pipe.old").exists()


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("something else\n")
    with pytest.raises(ValueError, match=r"notes\.txt, line 1.*no file of results"):
        Ledger(path)
    assert path.read_text() == "something else\n"
