"""Worker processes: the same outcomes as in one process, failures that name the run, nothing left behind."""

import multiprocessing
import operator
from pathlib import Path

import msgspec
import pytest
from tests.support.small_suites import write_suite

from dynamix.lab.comparison.rows import Row
from dynamix.lab.comparison.runs import RunOutcome, RunTask, outcomes
from dynamix.lab.simulator.episode import EpisodeError, run_in_order


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
    running = outcomes(tasks, jobs=2)
    task, outcome = next(running)
    running.close()  # type: ignore[attr-defined] - it is a generator
    assert set(multiprocessing.active_children()) <= before
    ((_, alone),) = outcomes([task], jobs=1)
    assert without_clock(outcome) == without_clock(alone)
    assert outcome.time_to_target_s is not None
    assert outcome.num_steps > 0


def test_results_of_a_pool_are_in_the_order_of_its_tasks(tasks: list[RunTask]) -> None:
    assert run_in_order(operator.attrgetter("name"), tasks, jobs=2) == [task.name for task in tasks]


def test_a_run_that_fails_is_named(tasks: list[RunTask]) -> None:
    broken = msgspec.structs.replace(tasks[0], setting=Row(policy="no-such-policy"))
    with pytest.raises(EpisodeError, match="no-such-policy in scenario mixed-2, seed 0: ValueError: no policy"):
        list(outcomes([broken], jobs=1))
