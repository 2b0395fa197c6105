"""Runs: what their identity covers, and a ledger that a kill cannot spoil."""

from importlib import import_module
from pathlib import Path

import msgspec
import pytest
from tests.support.devices import device_in, identity
from tests.support.small_suites import outcome, write_suite

from dynamix.lab.comparison import HEADER
from dynamix.lab.comparison.rows import LABORATORY, Row
from dynamix.lab.comparison.runs import Ledger, RunTask
from dynamix.runtime.output_files import RefusedOutputError


@pytest.fixture
def task(tmp_path: Path) -> RunTask:
    (scenario,) = write_suite(tmp_path / "suite", mixed=1000).scenarios
    return RunTask(scenario=scenario, setting=Row(policy="static"), seed=3)


def test_everything_that_determines_a_run_is_in_its_identity(task: RunTask) -> None:
    replace = msgspec.structs.replace
    others = [
        replace(task, seed=4),
        replace(task, scenario=replace(task.scenario, learning_rate=0.1)),
        replace(task, setting=Row(policy="random")),
        replace(task, setting=Row(policy="static", options={"track": 1.0})),
        replace(task, setting=Row(policy="static", local_batch_size=64)),
        replace(task, setting=Row(policy="static", learning_rate_rule="linear")),
        replace(task, setting=Row(policy="static", exchange="local")),
    ]
    assert len({other.key for other in others} | {task.key}) == 8


def test_a_permission_rules_where_another_exchange_can_be_carried_out(task: RunTask) -> None:
    replace = msgspec.structs.replace
    asked = replace(task, setting=Row(policy="static", exchange="local"))
    assert asked.effective_scenario.exchange == "local"
    servers = replace(task.scenario, network=replace(task.scenario.network, topology="parameter-server"))
    for unfit in (servers, replace(task.scenario, lag_windows=0)):
        assert replace(asked, scenario=unfit).effective_scenario.exchange == "exact"


def test_a_published_policy_does_not_go_below_its_published_sizes(task: RunTask) -> None:
    replace = msgspec.structs.replace
    scenario = replace(task.scenario, min_local_batch_size=1, initial_local_batch_size=64)
    for policy, size, least in (("ppo-paper", 64, 32), ("ppo-paper", 16, 16), ("rule", 64, 1)):
        job = replace(scenario, initial_local_batch_size=size)
        run = replace(task, scenario=job, setting=Row(policy=policy))
        assert run.effective_scenario.min_local_batch_size == least
    asked = Row(policy="ppo-paper", local_batch_size=8)
    assert replace(task, scenario=scenario, setting=asked).initial_local_batch_size == 32


def test_the_code_is_in_the_identity(task: RunTask, monkeypatch: pytest.MonkeyPatch) -> None:
    key = task.key
    monkeypatch.setattr("dynamix.lab.comparison.runs.code_digest", lambda: "other code")
    assert msgspec.structs.replace(task).key != key


@pytest.mark.usefixtures("example_extension")
def test_the_version_of_another_packages_policy_is_in_the_identity(
    task: RunTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = msgspec.structs.replace(task, setting=Row(policy="halving"))
    key = theirs.key
    monkeypatch.setattr(import_module("example_extension.policy").Halving, "version", 4)
    assert msgspec.structs.replace(theirs).key != key


def test_the_version_of_a_baseline_of_the_laboratory_is_in_the_identity(
    task: RunTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    controlled = msgspec.structs.replace(task, setting=Row(policy="omnilearn"))
    key = controlled.key
    monkeypatch.setattr(LABORATORY["omnilearn"], "version", 4)
    assert msgspec.structs.replace(controlled).key != key


@pytest.mark.parametrize(("asked", "ruling"), [(None, None), (64, 64), (1024, 256), (1, 8)])
def test_a_size_to_start_with_keeps_to_the_scenarios_bounds(
    task: RunTask, asked: int | None, ruling: int | None
) -> None:
    setting = Row(policy="static", local_batch_size=asked)
    assert msgspec.structs.replace(task, setting=setting).initial_local_batch_size == ruling


def test_a_learning_rate_rule_overrides_the_scenarios(task: RunTask) -> None:
    linear = msgspec.structs.replace(task, setting=Row(policy="static", learning_rate_rule="linear"))
    assert (task.effective_scenario.learning_rate_rule, linear.effective_scenario.learning_rate_rule) == (
        "sqrt",
        "linear",
    )


def test_a_ledger_knows_again_what_it_was_told(task: RunTask, tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    with Ledger(path) as ledger:
        assert task not in ledger
        ledger.record_outcome(task, outcome(1.5), "static in mixed")
    with Ledger(path) as ledger:
        assert ledger.get(task) == outcome(1.5)


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


def test_without_resume_old_results_are_put_aside_not_lost(task: RunTask, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with Ledger(path) as ledger:
        ledger.record_outcome(task, outcome(1.5), "first")
    later = msgspec.structs.replace(task, seed=4)
    with Ledger(path, resume=False) as ledger:
        assert task not in ledger
        assert path.exists()  # until there is something to take its place
        ledger.record_outcome(later, outcome(2.5), "second")
    with Ledger(path) as ledger:
        assert task not in ledger
        assert later in ledger
    with Ledger(tmp_path / "runs.jsonl.old") as ledger:
        assert task in ledger


def test_its_first_line_says_what_a_ledger_is(task: RunTask, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with Ledger(path) as ledger:
        ledger.record_outcome(task, outcome(1.5), "first")
    first, second = path.read_bytes().splitlines()
    assert first == b'{"dynamix":"results of runs, a line each","format":1}'
    assert second.startswith(b'{"key":"' + task.key.encode())


@pytest.mark.parametrize("length", [0, 1, 20, len(HEADER)])
def test_a_ledger_torn_in_its_first_line_is_an_empty_one(task: RunTask, tmp_path: Path, length: int) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(HEADER[:length])
    with Ledger(path) as ledger:
        assert task not in ledger
        ledger.record_outcome(task, outcome(1.5), "first")
    assert path.read_bytes().startswith(HEADER)
    with Ledger(path) as ledger:
        assert task in ledger


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    "content", [b"something else\n", b"without an end", b'{"key": 1}\n', b"\n", b"\x00\xff", HEADER[:-3] + b"2}\n"]
)
def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path, content: bytes, *, resume: bool) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(RefusedOutputError, match=r"notes\.txt is not a file of results and would be lost"):
        Ledger(path, resume=resume)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_ledger_with_a_foreign_line_is_not_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(HEADER + b"something else\n")
    with pytest.raises(RefusedOutputError, match="line 2"):
        Ledger(path)
    assert path.read_bytes() == HEADER + b"something else\n"


def test_what_old_results_would_replace_must_be_results(task: RunTask, tmp_path: Path) -> None:
    path, old = tmp_path / "runs.jsonl", tmp_path / "runs.jsonl.old"
    with Ledger(path) as ledger:
        ledger.record_outcome(task, outcome(1.5), "first")
    old.write_text("mine\n")
    with pytest.raises(RefusedOutputError, match=r"runs\.jsonl\.old is not a file of results"):
        Ledger(path, resume=False)
    assert old.read_text() == "mine\n"
    with Ledger(path) as ledger:
        assert task in ledger


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("linked", [True, False])
def test_a_device_is_no_ledger_and_stays_what_it_is(tmp_path: Path, *, resume: bool, linked: bool) -> None:
    device = device_in(tmp_path)
    path = tmp_path / "link" if linked else device
    if linked:
        path.symlink_to(device)
    before, held = identity(device), sorted(tmp_path.iterdir())
    with pytest.raises(RefusedOutputError, match=r"is a (device|FIFO): name a file"):
        Ledger(path, resume=resume)
    assert (identity(device), sorted(tmp_path.iterdir())) == (before, held)


def test_what_came_in_the_way_after_the_check_is_left_alone(task: RunTask, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with Ledger(path) as ledger:
        device_in(tmp_path).rename(path)
        before = identity(path)
        with pytest.raises(RefusedOutputError):
            ledger.record_outcome(task, outcome(1.5), "first")
    assert identity(path) == before
