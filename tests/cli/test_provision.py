"""`dynamix provision` on a real broker."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.deployed_broker import DeployedBroker, become, deployed_broker
from tests.support.raw_client import raw_client

from dynamix.cli.main import main
from dynamix.schemas.streams import STREAMS


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeployedBroker]:
    """The deployed broker; the environment is that of dynamix-provision.service."""
    with deployed_broker(tmp_path) as running:
        become(monkeypatch, running, "provision")
        yield running


@pytest.mark.usefixtures("broker")
def test_the_streams_are_made_once_and_then_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["provision"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{stream.name}: created" for stream in STREAMS]
    assert main(["provision", "--json", "-"]) == 0
    expected = {"streams": [{"stream": stream.name, "result": "unchanged"} for stream in STREAMS]}
    assert json.loads(capsys.readouterr().out) == expected


def test_what_was_stored_on_a_subject_is_removed_and_decisions_never_are(
    broker: DeployedBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def store() -> None:
        async with raw_client(broker.settings("trainer")) as client:
            for run in ("r1", "r2"):
                await client.ask(f"dynamix.v1.report.alice.{run}.node-a", b"x")
            await client.ask("dynamix.v1.report.job.r1.node-a", b"x")

    assert main(["provision"]) == 0
    asyncio.run(store())
    capsys.readouterr()
    assert main(["provision", "--purge", "dynamix.v1.report.alice.*.*"]) == 0
    assert capsys.readouterr().out == "REPORTS: 2 messages removed\n"
    assert main(["provision", "--purge", "dynamix.v1.action.alice.*"]) == 1
    assert main(["provision", "--purge", "dynamix.v1.live.>"]) == 2
    become(monkeypatch, broker, "watcher")
    assert main(["provision", "--purge", "dynamix.v1.report.>"]) == 1
