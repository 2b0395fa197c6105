"""`dynamix capture` with a watcher's key, who may publish nothing."""

import asyncio
import sys
from pathlib import Path

import pytest
from tests.support import examples
from tests.support.deployed_broker import DeployedBroker

from dynamix.cli.services import bus_environment
from dynamix.recording import capture
from dynamix.runtime.bus import Bus


async def test_a_watcher_may_capture(broker: DeployedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = (("trainer", examples.job()), ("trainer", examples.report()), ("collector", examples.state()))
    for user, message in (*sent, ("arbitrator", examples.action(hash=bytes(32)))):
        bus = await Bus.connect(broker.settings(user), name="test-1")
        await bus.publish(message)
        await bus.close()
    for name, value in bus_environment(broker.settings("watcher")).items():
        monkeypatch.setenv(name, value)
    arguments = ["capture", examples.JOB, "--past", "-o", str(tmp_path / "job.dxc")]
    command = await asyncio.create_subprocess_exec(sys.executable, "-m", "dynamix.cli.main", *arguments)
    assert await command.wait() == 0
    kinds = [one.subject.split(".")[2] for one in capture.records(tmp_path / "job.dxc")]
    assert kinds == ["job", "report", "state", "action"]
