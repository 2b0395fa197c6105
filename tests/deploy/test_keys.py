"""`dynamix keys` with the real broker: what works at once, what ends at once, and what is said where it cannot be."""

import asyncio
import json
import re
import shutil
import stat
import time
from pathlib import Path

import pytest
from tests.support.brokers import until
from tests.support.deployed_broker import USERS, DeployedBroker, deployed_broker
from tests.support.raw_client import raw_client

from dynamix.cli.main import main
from dynamix.runtime.bus import Bus, PermissionDeniedError, authority, connection
from dynamix.runtime.bus.authority import Authority
from dynamix.runtime.credentials import Credential, read_credential
from dynamix.runtime.settings import BusSettings

REPORT = "dynamix.v1.report.{}.r1.node-a"


def replace_by(settings: BusSettings, credential: Credential) -> None:
    Path(settings.creds_file).write_text(credential.text())


def lasting(broker: DeployedBroker, name: str, seconds: int) -> Credential:
    """A trainer's key for that name's jobs that works for so long."""
    return Authority.read(broker.authority)._sign(name, "trainer", (f"job:{name}",), int(time.time()) + seconds)


async def test_a_new_key_works_at_once_and_the_broker_reads_nothing_for_it(broker: DeployedBroker) -> None:
    before = broker.varz()["config_load_time"], (broker.directory / "accounts.conf").stat().st_size
    settings = broker.key("fresh", "--role", "trainer", "--job", "fresh", "--days", "29")
    async with raw_client(settings) as client:
        await client.ask(REPORT.format("fresh"), b"x")
    bus = await Bus.connect(settings, name="test-1")
    assert bus.seconds_left == pytest.approx(29 * 86400, abs=3600)
    await bus.close()
    assert before == (broker.varz()["config_load_time"], (broker.directory / "accounts.conf").stat().st_size)


async def test_a_revoked_key_is_out_at_once_and_after_a_restart(tmp_path: Path) -> None:
    with deployed_broker(tmp_path) as broker:
        settings, other = (broker.key(name, "--role", "trainer", "--job", "x") for name in ("mallory", "alice"))
        closed: list[str] = []
        bus = await Bus.connect(settings, name="test-1", on_closed=closed.append)
        async with raw_client(settings) as client, raw_client(other) as bystander:
            assert await asyncio.to_thread(broker.keys, "revoke", "mallory") == 0
            await until(lambda: client.client.is_closed)
            assert not bystander.client.is_closed
        await until(lambda: closed)
        assert "mallory.creds was revoked, or is of another broker's authority; replace it" in closed[0]
        await bus.close()
    other_place = tmp_path / "again"
    other_place.mkdir()
    with deployed_broker(other_place, prepare=lambda to: shutil.copy(tmp_path / "accounts.conf", to)) as again:
        with pytest.raises(PermissionDeniedError, match="revoked"):
            await Bus.connect(BusSettings(url=again.url, creds_file=settings.creds_file), name="test-1")
        async with raw_client(BusSettings(url=again.url, creds_file=other.creds_file)):
            pass


async def test_an_expired_key_is_out_and_a_replaced_file_is_used(broker: DeployedBroker) -> None:
    settings = broker.key("shortly", "--role", "trainer", "--job", "shortly")
    replace_by(settings, lasting(broker, "shortly", 6))
    expires_s = read_credential(Path(settings.creds_file)).expires_s or 0
    closed: list[str] = []
    replaced, ended = broker.settings("replaced"), settings
    replace_by(replaced, lasting(broker, "replaced", 6))
    goes_on = await Bus.connect(replaced, name="test-1", on_closed=closed.append)
    bus = await Bus.connect(ended, name="test-1", on_closed=closed.append)
    replace_by(replaced, lasting(broker, "replaced", 600))
    async with raw_client(settings) as client:
        await until(lambda: client.client.is_closed)
        assert time.time() > expires_s - 0.5
    await until(lambda: closed)
    await until(lambda: goes_on.counters["reconnects"] == 1)
    assert goes_on.is_connected
    (reason,) = closed
    assert re.search(r"shortly\.creds expired on \d{4}-\d\d-\d\d \d\d:\d\d UTC; replace it by a new one", reason)
    for each in (bus, goes_on):
        await each.close()


async def test_the_keys_of_a_name_work_side_by_side_until_the_old_ones_are_revoked(broker: DeployedBroker) -> None:
    old = broker.key("carol", "--role", "trainer", "--job", "carol")
    new = BusSettings(url=broker.url, creds_file=f"{old.creds_file}.new")
    broker.keys("create", "carol", "--role", "trainer", "--job", "carol", "-o", new.creds_file)
    async with raw_client(old) as one, raw_client(new) as other:
        await asyncio.to_thread(broker.keys, "revoke", "carol", "--old")
        await until(lambda: one.client.is_closed)
        await other.ask(REPORT.format("carol"), b"x")


async def test_a_collectors_consumer_is_made_and_removed_with_its_key(broker: DeployedBroker) -> None:
    async with raw_client(broker.settings("provision")) as provision:

        async def found() -> dict[str, object]:
            answer = await provision.ask("$JS.API.CONSUMER.INFO.REPORTS.collector-node-z")
            return json.loads(answer.data).get("config", {})

        await asyncio.to_thread(broker.key, "node-z", "--role", "collector", "--node", "node-z")
        assert (await found())["filter_subject"] == "dynamix.v1.report.*.*.node-z"
        assert "inactive_threshold" not in await found(), "it stays until its key is revoked"
        await asyncio.to_thread(broker.keys, "revoke", "node-z")
        assert await found() == {}


async def test_trainers_without_end_leave_room_for_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority, "MAX_TRAINER_CONNECTIONS", 3)
    with deployed_broker(tmp_path) as broker:
        settings = broker.settings("trainer")
        async with raw_client(settings), raw_client(settings), raw_client(settings):
            with pytest.raises(Exception, match="maximum account active connections exceeded"):
                async with raw_client(settings):
                    pass
            async with raw_client(broker.settings("arbitrator")):
                pass


async def test_no_other_operator_can_sign_for_the_broker(broker: DeployedBroker) -> None:
    stranger, ours = Authority.new(), Authority.read(broker.authority)
    forged = Authority(operator=stranger.operator, accounts=ours.accounts, signing_keys=stranger.signing_keys)
    settings = broker.settings("stranger")
    replace_by(settings, forged.issue("stranger", "trainer", ["alice"], days=1))
    with pytest.raises(PermissionDeniedError, match="of another broker's authority"):
        await Bus.connect(settings, name="test-1")


def test_secrets_are_closed_to_others_and_the_brokers_file_has_none(broker: DeployedBroker) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert mode(broker.authority.parent) == 0o700
    assert mode(broker.authority) == 0o600
    assert {mode(broker.credential(user)) for user in USERS} == {0o600}
    accounts = broker.directory / "accounts.conf"
    assert mode(accounts) == 0o644
    assert not re.search(r"\bS[OAU][A-Z2-7]{50}", accounts.read_text())
    assert "S" not in repr(read_credential(broker.credential("trainer"))).partition("seed=")[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["create", "x", "--role", "trainer"], "add --job NAME"),
        (["create", "x", "--role", "trainer", "--node", "n"], "--node is not for a trainer's key"),
        (["create", "x", "--role", "collector", "--node", "a", "--node", "b"], "is for one node"),
        (["create", "x", "--role", "trainer", "--job", "*"], "use 1 to 63 of the characters"),
        (["create", "reward", "--role", "watcher"], "choose another name"),
        (["revoke", "eve"], "eve has no key"),
    ],
)
def test_a_wrong_command_is_refused_and_nothing_is_written(
    broker: DeployedBroker, words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = broker.authority.read_bytes()
    output = ["-o", str(tmp_path / "x.creds")] if words[0] == "create" else []
    assert broker.keys(*words, *output) == 2
    assert said in capsys.readouterr().err
    assert broker.authority.read_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_without_a_broker_keys_are_written_and_the_rest_is_left_to_refresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYNAMIX_NATS_URL", "nats://127.0.0.1:1")
    where = ["--authority", str(tmp_path / "a" / "authority.json")]
    assert main(["keys", "refresh", *where]) == 1
    assert "make one with `dynamix keys init`" in capsys.readouterr().err
    init = ["keys", "init", "--credentials", str(tmp_path), *where]
    assert main(init) == 0
    before = (tmp_path / "a" / "authority.json").read_bytes()
    assert main(init) == 1
    assert (tmp_path / "a" / "authority.json").read_bytes() == before, "an authority is never replaced"
    file = tmp_path / "n.creds"
    assert main(["keys", "create", "n", "--role", "collector", "--node", "n", "-o", str(file), *where]) == 0
    assert file.exists()
    assert "run `dynamix keys refresh`" in capsys.readouterr().err
    assert main(["keys", "revoke", "n", *where]) == 1
    assert "run `dynamix keys refresh`" in capsys.readouterr().err
    assert Authority.read(tmp_path / "a" / "authority.json").keys[-1].revoked


def test_a_file_that_is_no_credential_is_refused_by_its_setting(tmp_path: Path) -> None:
    file, whole = tmp_path / "x.creds", Authority.new().issue("x", "watcher", [], days=1)
    other = Authority.new().issue("x", "watcher", [], days=1)
    damaged = {
        "p0123": "it has no NATS USER JWT",
        whole.text().replace(whole.jwt, "a.b.c"): "its JWT is damaged",
        whole.text().replace(whole.seed, whole.seed[:-1] + "9"): "not an nkey|check sum",
        whole.text().replace(whole.seed, other.seed): "of another key than its seed",
    }
    for text, said in damaged.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=f"DYNAMIX_NATS_CREDS_FILE='.*' cannot be used: .*({said})") as refused:
            connection.check_bus(BusSettings(creds_file=str(file)))
        assert whole.seed not in str(refused.value)
    file.write_text(whole.text())
    with pytest.raises(ValueError, match="unset one of them"):
        connection.check_bus(BusSettings(creds_file=str(file), password="secret"))
    connection.check_bus(BusSettings(url="tls://broker.example:4222", creds_file=str(file)))
