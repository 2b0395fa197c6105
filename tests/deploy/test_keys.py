"""`dynamix keys` on the real broker: let in, rotated and revoked while it runs, and no other connection is touched."""

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import examples
from tests.support.brokers import connected, until
from tests.support.deployed_broker import DeployedBroker, deployed_broker

from dynamix.cli.services import bus_environment
from dynamix.runtime.bus import Bus, PermissionDeniedError
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.key_file import read_key_file
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.streams import JOBS
from dynamix.trainer.wire.client import BusClient


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[DeployedBroker]:
    """One for each test: each changes its users."""
    with deployed_broker(tmp_path) as running:
        yield running


@pytest.fixture(autouse=True)
async def collector(broker: DeployedBroker) -> AsyncIterator[Bus]:
    """A connection of another user, which no change of keys may touch; the streams exist."""
    async with connected(broker.settings("provision")) as provisioner:
        await provision(provisioner)
    async with connected(broker.settings("collector"), "collector-1") as bus:
        yield bus
        await bus._connection.round_trip(5.0)
        assert bus.counters["reconnects"] == 0
        assert bus.counters["permission_denials"] == 0


async def is_refused(settings: BusSettings) -> bool:
    try:
        bus = await Bus.connect(settings, name="test", wait=False)
    except PermissionDeniedError as error:
        return f"the key in {settings.nkey_file} may be revoked" in str(error)
    await bus.close()
    return False


def alice(broker: DeployedBroker) -> BusSettings:
    return broker.key("alice", "--role", "trainer", "--job", examples.JOB)


async def test_a_new_key_lets_in_once_the_broker_has_read_it(broker: DeployedBroker) -> None:
    settings = alice(broker)
    assert await is_refused(settings)
    broker.reload()
    async with connected(settings, "trainer-1") as bus:
        await bus.publish(examples.job())
        assert await bus.newest(JOBS.name, subjects.of("job", examples.JOB)) is not None
        assert bus.counters["permission_denials"] == 0
        assert bus._connection.inbox.startswith("_INBOX.alice.trainer-1.")


async def test_a_revoked_key_is_out_at_once_and_stays_out(broker: DeployedBroker) -> None:
    settings = alice(broker)
    broker.reload()
    ended = asyncio.Event()
    bus = await Bus.connect(settings, name="trainer-1", on_closed=lambda _reason: ended.set())
    broker.keys("revoke", "alice")
    broker.reload()
    async with asyncio.timeout(10):
        await ended.wait()
    await bus.close()
    assert await is_refused(settings)


async def test_after_a_rotation_both_keys_let_in_until_the_old_one_is_revoked(
    broker: DeployedBroker, tmp_path: Path
) -> None:
    old = alice(broker)
    new = BusSettings(url=broker.url, nkey_file=str(tmp_path / "new.nkey"))
    broker.keys("rotate", "alice", "-o", new.nkey_file)
    broker.reload()
    assert [await is_refused(old), await is_refused(new)] == [False, False]
    async with connected(new, "trainer-1") as bus:
        broker.keys("revoke", "alice", "--old")
        broker.reload()
        assert [await is_refused(old), await is_refused(new)] == [True, False]
        await bus.publish(examples.job())
        assert bus.counters["reconnects"] == 0


async def test_a_training_process_goes_on_with_the_key_that_replaces_its_own(broker: DeployedBroker) -> None:
    settings = alice(broker)
    broker.reload()
    client = BusClient(settings, node="node-a", outbox_messages=16, actions_of=examples.JOB)
    client.start()
    client.publish(examples.job())
    await until(lambda: not len(client.outbox))
    broker.keys("rotate", "alice", "-o", settings.nkey_file)
    broker.keys("revoke", "alice", "--old")
    broker.reload()  # its connection is cut, and the next one is made with the new key
    client.publish(examples.report(window=0))
    await until(lambda: not len(client.outbox))
    await asyncio.to_thread(client.close, 1.0)


async def test_a_shared_password_ends_with_its_user(broker: DeployedBroker) -> None:
    alice(broker)
    broker.keys("revoke", "trainer")
    broker.reload()
    with pytest.raises(PermissionDeniedError, match="`dynamix keys revoke` may have ended this user"):
        await Bus.connect(broker.settings("trainer"), name="test", wait=False)
    nothing = BusSettings(url=broker.url, user="trainer")
    with pytest.raises(PermissionDeniedError, match="there is no password: set DYNAMIX_NATS_PASSWORD_FILE"):
        await Bus.connect(nothing, name="test", wait=False)


async def test_every_role_can_have_a_key(broker: DeployedBroker) -> None:
    limits: dict[str, tuple[str, ...]] = {"trainer": ("--job", "*"), "collector": ("--node", "*")}
    roles = ("trainer", "collector", "reward", "arbitrator", "learner", "provision", "watcher")
    keys = {role: broker.key(f"my-{role}", "--role", role, *limits.get(role, ())) for role in roles}
    broker.reload()
    for settings in keys.values():
        async with connected(settings, "test-1"):
            pass
    async with connected(keys["watcher"], "watcher-1") as watcher:
        assert watcher._connection.inbox.startswith("_INBOX.watcher.my-watcher.watcher-1.")


@pytest.mark.parametrize(
    ("service", "key", "fix"),
    [
        ("collector", ("of-reward", "--role", "reward"), "--role collector --node node-b`"),
        ("collector", ("of-node-a", "--role", "collector", "--node", "node-a"), "--role collector --node node-b`"),
        (
            "reward",
            ("of-node-b", "--role", "collector", "--node", "node-b"),
            "--role reward --instance node-b`",
        ),
        ("reward", ("of-1", "--role", "reward", "--instance", "1"), "--role reward --instance node-b`"),
    ],
)
async def test_a_service_with_the_key_of_another_ends_with_one_sentence(
    broker: DeployedBroker, service: str, key: tuple[str, ...], fix: str
) -> None:
    settings = broker.key(*key)
    broker.reload()
    environ = {**os.environ, **bus_environment(settings), "DYNAMIX_NODE": "node-b"}
    command = [sys.executable, "-m", f"dynamix.{service}"]
    process = await asyncio.create_subprocess_exec(*command, env=environ, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(30):
        said = (await process.communicate())[1].decode()
    assert process.returncode == 1
    lines = [line for line in map(json.loads, said.splitlines()) if line["level"] == "error"]
    assert {line["event"] for line in lines} == {"cannot go on"}
    start = f"the broker does not let user '{key[0]}' publish to dynamix.v1.live.{service}.node-b: see its permissions"
    (reason,) = [line["reason"] for line in lines if line["reason"].startswith(start)]  # beside what else is denied
    assert reason.endswith(fix)
    assert "Traceback" not in said


async def test_neither_a_log_nor_an_error_nor_the_broker_shows_a_seed(
    broker: DeployedBroker, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        settings = alice(broker)
        assert await is_refused(settings)
        broker.reload()
        async with connected(settings, "trainer-1"):
            pass
    seed = read_key_file(Path(settings.nkey_file)).seed
    shown = capsys.readouterr()
    places: dict[str, Any] = {
        "log": caplog.text,
        "output": shown.out + shown.err,
        "broker's log": broker.log.read_text(),
        "users": broker.users_file.read_text(),
        "settings": repr(settings),
    }
    assert {place for place, text in places.items() if seed in text} == set()
