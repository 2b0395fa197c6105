"""`dynamix family` on a real broker, as the users of a deployment."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import examples
from tests.support.deployed_broker import DeployedBroker, become, deployed_broker

from dynamix.cli.connection import find
from dynamix.cli.main import main
from dynamix.extras.family import StoredFamily, details
from dynamix.runtime.bus import Bus
from dynamix.schemas.messages import ArmRecord, Message


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeployedBroker]:
    """The deployed broker with its streams; the environment is the watcher's."""
    with deployed_broker(tmp_path) as running:
        become(monkeypatch, running, "provision")
        assert main(["provision"]) == 0
        become(monkeypatch, running, "watcher")
        yield running


def publish(monkeypatch: pytest.MonkeyPatch, broker: DeployedBroker, *messages: Message) -> None:
    """Publish as an arbitrator."""

    async def act() -> None:
        bus = await Bus.connect(find(os.environ), name="arbitrator-test")
        for message in messages:
            await bus.publish(message)
        await bus.close()

    become(monkeypatch, broker, "arbitrator")
    asyncio.run(act())
    become(monkeypatch, broker, "watcher")


def result_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What a command gives to programs."""
    capsys.readouterr()
    assert main(["family", *arguments, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_was_tried_is_shown_over_the_first_run() -> None:
    arms = ArmRecord(1.0, 1, 0, (2.0, 4.0, 8.0)), ArmRecord(1.5, 1, 0, (1.0, 2.0, 4.0))
    family = StoredFamily(family="f", num_bytes=1, stored_at_ns=0, profile=examples.profile(arms=arms))
    assert "8 s to the last of 3 levels\n" in details(family)
    assert "learning rate x 1.5: 1 runs, 4 s to the last of 3 levels, 0.50 of the first" in details(family)


def test_families_are_listed_shown_and_forgotten_by_provision_only(
    broker: DeployedBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["family", "list"]) == 0
    assert capsys.readouterr().out.startswith("no job families: ")
    profile = examples.profile()
    publish(monkeypatch, broker, profile, examples.profile(family="other", run=1))
    listed = result_of(capsys, "list")["families"]
    assert [(one["family"], one["usable"]) for one in listed] == [("mnist-0a1b2c3d", True), ("other", True)]
    assert [one["rate_factor"] for one in listed[0]["arms"]] == [1.0, 1.5]
    assert (listed[0]["run"], listed[0]["memory_bytes"]) == (2, 2)
    assert main(["family", "show", "mnist-0a1b2c3d"]) == 0
    shown = capsys.readouterr().out
    assert "128/128/64/64 = 384 (tracking), exact" in shown
    assert "learning rate x 1.5: 1 runs, 1 stopped, 1.25 s to the last of 1 levels" in shown
    assert main(["family", "forget", "other"]) == 1
    assert "publish to dynamix.v1.profile.other: its key is for another role" in capsys.readouterr().err
    become(monkeypatch, broker, "provision")
    assert result_of(capsys, "forget", "other") == {"family": "other", "versions_forgotten": 1}
    become(monkeypatch, broker, "watcher")
    assert [one["family"] for one in result_of(capsys, "list")["families"]] == ["mnist-0a1b2c3d"]
    become(monkeypatch, broker, "provision")
    for unknown in ("other", "elsewhere"):
        assert main(["family", "forget", unknown]) == 1
        text = f"nothing is stored of a family {unknown!r}: there is mnist-0a1b2c3d"
        assert text in capsys.readouterr().err
