"""Children are kept running: real processes that end, are killed, or cannot start."""

import asyncio
import os
import signal
import subprocess

import pytest

from dynamix.cli.commands.up import Child, keep
from dynamix.cli.services import beside


class Sleeper:
    """A child that sleeps, or fails to start when it is told to."""

    def __init__(self, seconds: float = 600.0) -> None:
        self.seconds = seconds
        self.num_starts = 0
        self.started = asyncio.Event()
        self.fails = False
        self._process: subprocess.Popen[bytes] | None = None

    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        await self.stop()
        if self.fails:
            self.fails = False
            raise OSError("no memory")
        self._process = subprocess.Popen(["sleep", str(self.seconds)])  # noqa: ASYNC220 - returns at once
        self.num_starts += 1
        self.started.set()

    async def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None


async def test_a_killed_child_is_started_again_until_that_works_and_stopped_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dynamix.cli.commands.up.MIN_WAIT_S", 0.01)
    child = Sleeper()
    await child.start()
    async with beside(keep(Child("sleeper", child.pid, child.start, child.stop))):
        for expected in (2, 3):
            child.fails = expected == 3
            child.started.clear()
            os.kill(child.pid(), signal.SIGKILL)
            await asyncio.wait_for(child.started.wait(), 60)
            assert child.num_starts == expected
        assert child.is_running()
    assert not child.is_running()
    assert "sleeper    does not start: no memory" in capsys.readouterr().err
