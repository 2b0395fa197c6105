"""`dynamix evaluate` and `dynamix evaluate tune`, as they are typed."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_suites import made_up, tuned_for, write_suite

from dynamix.cli.commands.evaluate import comparison
from dynamix.cli.commands.up import exited
from dynamix.cli.main import main
from dynamix.lab.comparison import runs
from dynamix.lab.comparison.rows import Choice, Tuned, read_tuned, to_toml
from dynamix.lab.comparison.runs import RunTask
from dynamix.lab.comparison.tuning import settings_of
from dynamix.lab.simulator.episode import RunOutcome, code_digest
from dynamix.lab.simulator.scenario import Scenario, suite_named

ROW = {"policy", "median_time_to_target_s", "misses", "ratios"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a suite and the baselines' settings, to run commands in."""
    write_suite(tmp_path / "suite", mixed=1000, alike=4000)
    (tmp_path / "tuned.toml").write_text(to_toml(tuned_for(mixed=64, alike=64)))
    monkeypatch.setenv("FORCE_COLOR", "")
    return tmp_path


def arguments(place: Path, *more: str) -> list[str]:
    return [
        *("evaluate", "--scenarios", str(place / "suite"), "--tuned", str(place / "tuned.toml")),
        *("--results", str(place / "runs.jsonl"), "--json", str(place / "verdict.json"), *more),
    ]


def verdict(place: Path) -> dict[str, Any]:
    return json.loads((place / "verdict.json").read_text())


def test_the_json_has_the_promised_shape(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "run_episodes", made_up(lambda task: 0.5 if task.setting.policy == "rule" else 1.0))
    assert main(arguments(place, "--seeds", "3", "--jobs", "1", "--png", str(place / "figure.png"))) == 0
    found = verdict(place)
    assert found["suite"] == "suite"
    assert found["default_policy"] == "rule"
    assert [row["policy"] for row in found["policies"]][:6] == [
        *("best-static", "random", "goodput", "rule", "ppo", "ppo-paper")
    ]
    assert all(set(row) >= ROW for row in found["policies"])
    rule = next(row for row in found["policies"] if row["policy"] == "rule")
    assert set(rule["ratios"]["best-static"]) == {"value", "low", "high", "family_low", "family_high"}
    assert rule["ratios"]["best-static"]["value"] == pytest.approx(0.5)
    assert found["families"]["mixed"]["best_static_local_batch_size"] == 64
    assert all(set(row) >= ROW for row in found["families"]["alike"]["policies"])
    assert (place / "figure.png").stat().st_size > 10_000
    assert str(place) not in json.dumps(found["families"])


def test_rows_that_may_exchange_otherwise_are_compared_with_exact_ones(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = {None: 1.5, "exact": 1.0, "local": 0.5}
    monkeypatch.setattr(runs, "run_episodes", made_up(lambda task: seconds[task.setting.exchange]))
    rows = ("--policies", "rule,static:every=4,codec=int8,local_batch_size=64,rule:exchange=exact,against=1")
    assert main(arguments(place, *rows, "--exchange", "local", "--seeds", "2", "--png", str(place / "a.png"))) == 0
    found = verdict(place)
    assert found["against"] == ["rule/exchange=exact"]
    ratios = {row["policy"]: row["ratios"]["rule/exchange=exact"]["value"] for row in found["policies"]}
    assert ratios["rule"] == ratios["static:every=4,codec=int8@64"] == pytest.approx(0.5)
    assert ratios["goodput"] == pytest.approx(1.5)
    assert "time over that of rule/exchange=exact" in capsys.readouterr().out
    assert found["command"].endswith("rule:exchange=exact,against=1 --exchange local --seeds 2")


def test_an_interrupt_tells_what_there_is_and_resume_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def interrupted(work: Any, tasks: list[RunTask], **how: Any) -> Generator[tuple[int, RunOutcome]]:
        for index, outcome in made_up(lambda _: 1.0)(work, tasks, **how):
            if index == 4:
                raise KeyboardInterrupt
            ran.append(tasks[index].key)
            yield index, outcome

    monkeypatch.setattr(runs, "run_episodes", interrupted)
    typed = ("--policies", "rule", "--seeds", "2", "--jobs", "1")
    assert main(arguments(place, *typed)) == 130
    assert "best-static" in capsys.readouterr().out
    assert verdict(place)["num_runs_missing"] > 0
    while main(arguments(place, *typed)) == 130:
        pass
    assert verdict(place)["num_runs_missing"] == 0
    assert len(ran) == len(set(ran))  # nothing ran twice


def test_tune_reads_train_scenarios_only_and_writes_what_evaluate_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[Path] = []
    read = Scenario.read

    def noted(path: Path) -> Scenario:
        opened.append(Path(path))
        return read(path)

    monkeypatch.setattr(Scenario, "read", noted)
    monkeypatch.setattr(runs, "run_episodes", made_up(lambda _: 1.0))
    output = tmp_path / "tuned.toml"
    (tmp_path / "rows.toml").write_text('[[row]]\npolicy = "static"\n[[row]]\npolicy = "goodput"\n')
    chosen = ["--rows", str(tmp_path / "rows.toml"), "--seeds", "1", "-o", str(output)]
    assert main(["evaluate", "tune", *chosen, "--results", str(tmp_path / "runs.jsonl")]) == 0
    assert {path.parent.name for path in opened} == {"train"}
    tuned = read_tuned(output)
    assert tuned.command == f"dynamix evaluate tune --rows {tmp_path / 'rows.toml'} --seeds 1"
    assert list(tuned.overall) == ["static", "goodput"]
    assert "the best of 1 settings each for static, goodput" in capsys.readouterr().out


@pytest.mark.parametrize("option", [("--rows", "some.toml"), ("--scenarios", "suite")])
def test_tuning_a_part_does_not_take_the_place_of_the_whole(
    option: tuple[str, str], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(comparison, "scenario_root", lambda: place)
    before = (place / "tuned.toml").read_text()
    assert main(["evaluate", "tune", *option, "--results", str(place / "runs.jsonl")]) == 2
    assert "name another file with -o" in capsys.readouterr().err
    assert (place / "tuned.toml").read_text() == before
    assert not (place / "runs.jsonl").exists()


def test_what_makes_baselines_worse_than_they_could_be_is_said(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "run_episodes", made_up(lambda _: 1.0))
    typed = ("--policies", "doubling,static,rule", "--seeds", "1", "--jobs", "1")
    assert main(arguments(place, *typed)) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "The train scenarios have changed" in told
    assert "The code has changed since the baselines were tuned" in told
    assert "doubling is not tuned for alike, mixed" in told
    assert "static is not tuned" not in told
    assert "goodput is not tuned" not in told
    choices = {row.baseline: Choice(setting=row.baseline, initial_local_batch_size=64) for row in settings_of()}
    whole = Tuned(overall=choices, scenarios=suite_named("train").digest, code=code_digest())
    (place / "tuned.toml").write_text(to_toml(whole))
    assert main(arguments(place, "--policies", "rule", "--seeds", "1", "--jobs", "1")) == 0
    assert "tuned" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_evaluation_leaves_no_worker_and_keeps_its_runs(place: Path) -> None:
    command = [sys.executable, "-m", "dynamix.cli.main", *arguments(place, "--policies", "static", "--seeds", "40")]
    results = place / "runs.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + 240
        try:
            while not (results.exists() and results.read_bytes().count(b"\n") >= 3):
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            children = [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/children")]
            workers = [int(child) for child in " ".join(children).split()]
        finally:
            process.send_signal(signal.SIGKILL)
    assert len(workers) >= 2

    async def ended() -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*map(exited, workers))

    asyncio.run(ended())
    lines = results.read_bytes().splitlines()
    assert len({json.loads(line)["key"] for line in lines[1:3]}) == 2  # behind the line that says what the file is


# --- dynamix simulate ---

DATA = Path(__file__).parents[2] / ".data" / "fashion-mnist"


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    """Two workers of 4000 and 1000 samples per second, in short windows."""
    write_suite(tmp_path, quick=1000)
    file = tmp_path / "quick-2.toml"
    file.write_text("window_steps = 4\n" + file.read_text())
    return str(file)


def test_a_run_is_told_as_a_table_and_as_json(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--policy", "proportional:smoothing=1,local_batch_size=32", "--data", str(DATA)]
    assert main(["simulate", scenario, *chosen, "--windows", "--json", "-"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)  # nothing else is on standard output
    assert result["time_to_target_s"] is not None
    assert [line["window"] for line in result["windows"]] == list(range(result["num_windows"]))
    assert result["windows"][0]["local_batch_sizes"] == [32, 32]
    assert result["windows"][2]["local_batch_sizes"] == [52, 12]  # 64 by 4 : 1
    assert result["windows"][-1]["time_s"] == pytest.approx(result["virtual_time_s"])
    assert shown.err.count("window ") == result["num_windows"]
