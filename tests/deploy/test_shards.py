"""Two accounts on the deployed broker: what `dynamix keys shard` writes and says, and that neither sees the other."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import examples
from tests.support.brokers import connected
from tests.support.deployed_broker import DeployedBroker, deployed_broker
from tests.support.services_here import services_here

from dynamix.cli.main import main
from dynamix.runtime.bus import Bus, PermissionDeniedError
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.streams import ACTIONS, FEED, JOBS

MORE_ROOM = ("max_file_store: 2GB", "max_file_store: 4GB")


def add_shard(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], None]:
    """Follow what the command says, as its words are."""

    def prepare(directory: Path) -> None:
        users = directory / "users" / "users.conf"
        key = str(directory / "b-provision.nkey")
        assert main(["keys", "shard", "b", "--users", str(users), "-o", key]) == 0
        said = capsys.readouterr().err
        lines = re.findall(r"^  (SHARD_.*|include .*)$", said, re.MULTILINE)
        shard = 'SHARD_B { jetstream: enabled, include "users/shard-b.conf" }'
        assert lines == [shard, 'include "users/shard-b-accounts.conf"']
        accounts = "\n  ".join(lines)
        assert "2 GB more in `max_file_store`, such as 4GB instead of 2GB" in said
        config = directory / "nats.conf"
        text = config.read_text()
        assert MORE_ROOM[0] in text
        config.write_text(text.replace(*MORE_ROOM).replace("  SYS {}", f"  {accounts}\n  SYS {{}}"))

    return prepare


@pytest.fixture
def broker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[DeployedBroker]:
    with deployed_broker(tmp_path, prepare=add_shard(capsys)) as running:
        yield running


def keys_of(broker: DeployedBroker, name: str, *words: str, shard: str = "") -> BusSettings:
    """A user with a key, in the first account or in a shard."""
    file = broker.directory / f"{name}{shard}.nkey"
    chosen = ["--shard", shard] if shard else []
    broker.keys("create", name, *words, *chosen, "-o", str(file))
    return BusSettings(url=broker.url, nkey_file=str(file))


async def provision_both(broker: DeployedBroker) -> None:
    key = str(broker.directory / "b-provision.nkey")
    for settings in (broker.settings("provision"), BusSettings(url=broker.url, nkey_file=key)):
        async with connected(settings, "provision-1") as bus:
            assert all(line.endswith(": created") for line in await provision(bus))


async def test_users_of_one_name_in_two_accounts_see_nothing_of_each_other(broker: DeployedBroker) -> None:
    trainer = ("--role", "trainer", "--job", examples.JOB)
    alice = [keys_of(broker, "alice", *trainer, shard=shard) for shard in ("", "b")]
    looks = [keys_of(broker, "looks", "--role", "watcher", shard=shard) for shard in ("", "b")]
    broker.reload()
    await provision_both(broker)
    async with connected(alice[0]) as one, connected(alice[1]) as other:
        await one.publish(examples.job())
        for window in range(2):
            await other.publish(examples.report(window=window))
        assert await one.newest(JOBS.name, subjects.of("job", examples.JOB)) is not None
        assert await other.newest(JOBS.name, subjects.of("job", examples.JOB)) is None
        for bus in (one, other):
            with pytest.raises(PermissionDeniedError):
                await bus.publish(examples.report(job="another-0a1b2c3d"))
    stored = []
    for settings in looks:
        async with connected(settings, "looks-1") as bus:
            stored.append([(await bus.stream_state(stream.name)).num_messages for stream in (JOBS, FEED)])
    assert stored == [[1, 0], [0, 2]]


async def test_the_services_of_a_shard_decide_its_jobs_by_its_keys_and_no_others(broker: DeployedBroker) -> None:
    arbitrator = keys_of(broker, "arbitrator", "--role", "arbitrator", shard="b")
    collector = keys_of(broker, "node-a", "--role", "collector", "--node", "node-a", shard="b")
    trainer = keys_of(broker, "carol", "--role", "trainer", "--job", examples.JOB, shard="b")
    broker.reload()
    await provision_both(broker)

    async def decided(bus: Bus) -> Any:
        return await bus.newest(ACTIONS.name, subjects.of("action", examples.JOB))

    async with (
        connected(arbitrator, "arbitrator-1") as deciding,
        connected(collector, "collector-1") as measuring,
        connected(trainer, "trainer-1") as training,
        connected(broker.settings("trainer"), "trainer-1") as outside,
        services_here(deciding, "arbitrator"),
        training.follow(ACTIONS.name, subjects.of("action", examples.JOB)) as actions,
    ):
        await outside.publish(examples.job({"node-a": (0, 1)}))
        await training.publish(examples.job({"node-a": (0, 1)}))
        await measuring.publish(examples.state())
        assert (await anext(actions)).subject == subjects.of("action", examples.JOB)
        assert await decided(training) is not None
        assert await decided(outside) is None


def test_a_shard_is_made_once_and_named_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    users = tmp_path / "users.conf"
    assert main(["keys", "list", "--shard", "b", "--users", str(users)]) == 1
    assert "make the shard with `dynamix keys shard NAME`" in capsys.readouterr().err
    assert main(["keys", "shard", "B", "--users", str(users)]) == 2
    assert main(["keys", "shard", "b", "--users", str(users)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "b-provision.nkey",
        "shard-b-accounts.conf",
        "shard-b.conf",
    ]
    assert (tmp_path / "b-provision.nkey").stat().st_mode & 0o777 == 0o600
    capsys.readouterr()
    assert main(["keys", "shard", "b", "--users", str(users)]) == 1
    assert "shard-b.conf is there already" in capsys.readouterr().err
    assert main(["keys", "create", "eve", "--role", "watcher", "--shard", "b", "--users", str(users)]) == 0
    assert main(["keys", "list", "--shard", "b", "--users", str(users)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["user", "provision", "eve"]
    assert not users.exists()
