"""Children are kept running: real processes that end, are killed, or cannot start."""

import asyncio
import subprocess

import pytest

from dynamix.cli.commands.up import Child, keep
from dynamix.cli.services import beside


async def test_a_killed_child_is_started_again_until_that_works_and_stopped_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dynamix.cli.commands.up.MIN_WAIT_S", 0.01)
    begun: list[subprocess.Popen[bytes]] = []
    refusals, started = [OSError("no memory")], asyncio.Event()

    async def start() -> None:
        if len(begun) == 2 and refusals:
            raise refusals.pop()
        begun.append(subprocess.Popen(["sleep", "600"]))  # noqa: ASYNC220 - returns at once
        started.set()

    async def stop() -> None:
        begun[-1].terminate()

    await start()
    async with beside(keep(Child("sleeper", lambda: begun[-1].pid, start, stop))):
        for expected in (2, 3):
            started.clear()
            begun[-1].kill()
            await asyncio.wait_for(started.wait(), 60)
            assert len(begun) == expected
        assert begun[-1].poll() is None
    assert [one.wait(60) for one in begun] == [-9, -9, -15]
    assert "sleeper    does not start: no memory" in capsys.readouterr().err
