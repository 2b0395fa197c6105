"""The demo when it is killed; test_release.py runs it to its end."""

import contextlib
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
