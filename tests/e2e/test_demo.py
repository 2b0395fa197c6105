"""The demo when it is killed; test_release.py runs it to its end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def processes_that_name(text: str) -> list[int]:
    """Processes with a text in their arguments."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if text.encode() in place.read_bytes():
                found.append(int(place.parent.name))
    return found


def test_the_demo_that_is_killed_leaves_no_rank_behind(tmp_path: Path) -> None:
    data = str(Path(".data/fashion-mnist").resolve())
    command = [sys.executable, "-m", "dynamix.cli.main", "demo", "--data", data]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    named = str(tmp_path / "dynamix-demo-")  # the log that the arguments of torchrun and of the ranks name
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL) as demo:
        try:
            while len(processes_that_name(named)) < 1 + 4:
                assert demo.poll() is None
                time.sleep(0.2)
        finally:
            demo.kill()
    assert demo.returncode == -signal.SIGKILL
    while processes_that_name(named):  # the time-out of the test ends this where one stays
        time.sleep(0.2)
