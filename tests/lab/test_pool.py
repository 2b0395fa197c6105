"""Worker processes: the same outcomes as in one process, failures that name the run, nothing left behind."""

import multiprocessing
from pathlib import Path

import msgspec
import pytest
from tests.support.small_suites import write_suite

from dynamix.lab.experiments.comparison.contenders import Setting
from dynamix.lab.experiments.comparison.pool import RunFailedError, outcomes, parallel_outcomes, run_task
from dynamix.lab.experiments.comparison.runs import RunOutcome, RunTask


@pytest.fixture
def tasks(tmp_path: Path) -> list[RunTask]:
    (scenario,) = write_suite(tmp_path / "suite", mixed=1000).scenarios
    return [
        RunTask(scenario=scenario, setting=Setting(policy=policy), seed=seed)
        for policy in ("static", "random")
        for seed in (0, 1)
    ]


def without_clock(outcome: RunOutcome) -> RunOutcome:
    return msgspec.structs.replace(outcome, wall_s=0.0)


def test_workers_find_what_one_process_finds_and_end_when_nobody_asks_any_more(tasks: list[RunTask]) -> None:
    before = set(multiprocessing.active_children())
    running = parallel_outcomes(tasks, run_task, jobs=1)
    task, outcome = next(running)
    running.close()
    for child in set(multiprocessing.active_children()) - before:
        child.join(30)  # its pool has told it to end; who does not is found below
    assert set(multiprocessing.active_children()) <= before
    ((_, alone),) = outcomes([task], jobs=1)
    assert without_clock(outcome) == without_clock(alone)
    assert outcome.time_to_target_s is not None
    assert outcome.num_steps > 0


def test_a_run_that_fails_is_named(tasks: list[RunTask]) -> None:
    broken = msgspec.structs.replace(tasks[0], setting=Setting(policy="no-such-policy"))
    with pytest.raises(RunFailedError, match="no-such-policy in scenario mixed-2, seed 0: ValueError: no policy"):
        list(outcomes([broken], jobs=1))
