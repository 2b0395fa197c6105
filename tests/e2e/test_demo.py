"""The demo as a user runs it, with fewer windows: broker, services, three torchrun jobs, JSON and picture."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo that was just started and keeps its temporary files in `tmp_path`."""
    data = str(Path(".data/fashion-mnist").resolve())
    started = subprocess.Popen(
        [sys.executable, "-m", "dynamix.cli.main", "demo", "--data", data],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    with started:
        yield started
        started.kill()  # where a test failed; after the end it does nothing


def test_the_demo_steers_a_real_job_and_writes_results(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "dynamix.cli.main", "demo", "--json", "out.json", "--png", "out.png"),
            *("--data", str(Path(".data/fashion-mnist").resolve())),
            *("--windows", "5", "--target", "0.4", "--pace", "0.0004"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "PACED" in result.stderr
    assert 'local_batch_size=128, global_batch="adaptive")' in result.stderr
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [run["policy"] for run in runs] == ["static", "split", "rule"]
    for run in runs:
        assert run["final_accuracy"] >= 0.4
        assert run["num_actions_applied"] >= 3
    static, split, rule = runs
    for run in (static, split):
        assert (run["num_windows"], run["num_steps"], run["target_accuracy"]) == (5, 50, 0.4)
        assert {sum(sizes) for sizes in run["local_batch_sizes"]} == {512}
    assert {tuple(sizes) for sizes in static["local_batch_sizes"]} == {(128, 128, 128, 128)}
    assert split["local_batch_sizes"][-1][3] < 80
    assert sum(rule["local_batch_sizes"][-1]) != 512
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_failing_job_is_reported_with_its_own_message(tmp_path: Path) -> None:
    """A misspelt setting: the ranks refuse it, and the demo says what they said."""
    result = subprocess.run(
        [sys.executable, "-m", "dynamix.cli.main", "demo", "--data", str(Path(".data/fashion-mnist").resolve())],
        cwd=tmp_path,
        env={**os.environ, "DYNAMIX_TRAINER_POLICE": "static"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "did you mean DYNAMIX_TRAINER_POLICY" in result.stderr
    assert "ExceptionGroup" not in result.stderr


def processes_that_name(text: str) -> list[int]:
    """Processes with a text in their arguments."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if text.encode() in place.read_bytes():
                found.append(int(place.parent.name))
    return found


def test_the_demo_that_is_killed_leaves_no_rank_behind(tmp_path: Path, demo: subprocess.Popen[str]) -> None:
    named = str(tmp_path / "dynamix-demo-")  # the log that the arguments of torchrun and of the ranks name
    while len(processes_that_name(named)) < 1 + 4:
        assert demo.poll() is None
        time.sleep(0.2)
    demo.kill()
    assert demo.wait() == -signal.SIGKILL
    while processes_that_name(named):  # the time-out of the test ends this where one stays
        time.sleep(0.2)
