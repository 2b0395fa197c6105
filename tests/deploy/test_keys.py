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
from dynamix.runtime.bus.authority import DAY_S, Authority
from dynamix.runtime.credentials import Credential, read_credential
from dynamix.runtime.health import Watchdog, heartbeat
from dynamix.runtime.settings import BusSettings

REPORT = "dynamix.v1.report.{}.r1.node-a"


def replace_by(settings: BusSettings, credential: Credential) -> None:
    Path(settings.creds_file).write_text(credential.text())


def lasting(broker: DeployedBroker, name: str, seconds: int) -> Credential:
    """A trainer's key for that name's jobs that works for so long."""
    return Authority.read(broker.authority)._sign(name, "trainer", (f"job:{name}",), int(time.time()) + seconds)


async def test_a_new_key_works_at_once_and_the_broker_reads_nothing_for_it(broker: DeployedBroker) -> None:
    before = broker.varz()["config_load_time"], (broker.directory / "accounts.conf").stat().st_size
    begun = time.monotonic()
    settings = broker.key("fresh", "--role", "trainer", "--job", "fresh")
    async with raw_client(settings) as client:
        await client.ask(REPORT.format("fresh"), b"x")
    assert time.monotonic() - begun < 1.0
    assert before == (broker.varz()["config_load_time"], (broker.directory / "accounts.conf").stat().st_size)


async def test_a_revoked_key_is_out_within_a_second_and_stays_out_over_a_restart(tmp_path: Path) -> None:
    with deployed_broker(tmp_path) as broker:
        settings, other = (broker.key(name, "--role", "trainer", "--job", "x") for name in ("mallory", "alice"))
        closed: list[str] = []
        bus = await Bus.connect(settings, name="test-1", on_closed=closed.append)
        async with raw_client(settings) as client, raw_client(other) as bystander:
            begun = time.monotonic()
            assert await asyncio.to_thread(broker.keys, "revoke", "mallory") == 0
            await until(lambda: client.client.is_closed)
            assert time.monotonic() - begun < 1.5, "the command itself takes some of it"
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


async def test_an_expired_key_is_out_within_a_second_and_a_replaced_file_is_used(broker: DeployedBroker) -> None:
    settings = broker.key("shortly", "--role", "trainer", "--job", "shortly")
    replace_by(settings, lasting(broker, "shortly", 3))
    expires_s = read_credential(Path(settings.creds_file)).expires_s or 0
    closed: list[str] = []
    replaced, ended = broker.settings("replaced"), settings
    replace_by(replaced, lasting(broker, "replaced", 3))
    goes_on = await Bus.connect(replaced, name="test-1", on_closed=closed.append)
    bus = await Bus.connect(ended, name="test-1", on_closed=closed.append)
    replace_by(replaced, lasting(broker, "replaced", 600))
    async with raw_client(settings) as client:
        await until(lambda: client.client.is_closed)
        assert -0.5 < time.time() - expires_s < 1.0
    await until(lambda: closed)
    await until(lambda: goes_on.counters["reconnects"] == 1)
    assert goes_on.is_connected
    (reason,) = closed
    assert re.search(r"shortly\.creds expired on \d{4}-\d\d-\d\d \d\d:\d\d UTC; replace it by a new one", reason)
    for each in (bus, goes_on):
        await each.close()


async def test_a_key_that_expires_within_30_days_is_warned_of(
    broker: DeployedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(heartbeat.logger, "warning", lambda text, *values: found.append(text % values))
    for days in (29, 31):
        settings = broker.key(f"in-{days}", "--role", "trainer", "--job", "x", "--days", str(days))
        bus = await Bus.connect(settings, name="test-1")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await heartbeat.send_heartbeats(
                    bus, Watchdog(0), dict, service="trainer", instance="t", node="n", started_s=0
                )
        assert bus.seconds_left is not None
        assert days - 1 < bus.seconds_left / DAY_S <= days
        await bus.close()
    (warning,) = found
    assert warning.startswith("the credential of this trainer expires in 29.0 days: replace its file")


async def test_a_file_that_is_another_users_now_is_not_used(broker: DeployedBroker) -> None:
    settings = broker.key("first", "--role", "trainer", "--job", "first")
    bus = await Bus.connect(settings, name="test-1")
    replace_by(settings, lasting(broker, "second", 600))
    with pytest.raises(Exception, match="is now second's, not first's: restart this process"):
        bus._connection._login.challenge()
    await bus.close()


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
            answer = await provision.ask("$JS.API.CONSUMER.INFO.FEED.collector-node-z")
            config: dict[str, object] = json.loads(answer.data).get("config", {})
            return config

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


def test_init_replaces_no_authority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a" / "authority.json"
    words = ["keys", "init", "--authority", str(file), "--credentials", str(tmp_path / "c")]
    assert main(words) == 0
    before = file.read_bytes()
    assert main(words) == 1
    assert file.read_bytes() == before
    assert "nothing replaces it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["create", "x", "--role", "trainer"], "a trainer's key is for what is named: add --job NAME"),
        (["create", "x", "--role", "trainer", "--node", "n"], "--node is not for a trainer's key"),
        (["create", "x", "--role", "collector", "--node", "a", "--node", "b"], "is for one node"),
        (["create", "x", "--role", "trainer", "--job", "*"], "use 1 to 63 of the characters"),
        (["create", "x.y", "--role", "watcher"], "use 1 to 63 of the characters"),
        (["create", "reward", "--role", "watcher"], "choose another name"),
        (["create", "collector-node-a", "--role", "watcher"], "are a collector's: choose another name"),
        (["revoke", "eve"], "eve has no key that the broker lets in"),
        (["revoke", "watcher", "--old"], "watcher has no older key"),
    ],
)
def test_what_no_key_can_be_is_refused_and_nothing_is_written(
    broker: DeployedBroker, words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = broker.authority.read_bytes()
    output = ["-o", str(tmp_path / "x.creds")] if words[0] == "create" else []
    assert broker.keys(*words, *output) == 2
    assert said in capsys.readouterr().err
    assert broker.authority.read_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_a_missing_authority_is_never_made_by_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--authority", str(tmp_path / "authority.json")]
    for words in (["create", "x", "--role", "watcher"], ["revoke", "x"], ["refresh"], ["list"]):
        assert main(["keys", *words, *where]) == 1
        assert "make one with `dynamix keys init`" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_a_broker_it_is_said_what_is_done_and_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYNAMIX_NATS_URL", "nats://127.0.0.1:1")
    where = ["--authority", str(tmp_path / "a" / "authority.json")]
    assert main(["keys", "init", "--credentials", str(tmp_path), *where]) == 0
    file = tmp_path / "n.creds"
    assert main(["keys", "create", "n", "--role", "collector", "--node", "n", "-o", str(file), *where]) == 0
    assert file.exists()
    assert "the consumer that it reads by is missing: run `dynamix keys refresh`" in capsys.readouterr().err
    assert main(["keys", "revoke", "n", *where]) == 1
    said = capsys.readouterr().err
    assert "it is written, but the broker does not know it yet: restart it, or run `dynamix keys refresh`" in said
    assert Authority.read(tmp_path / "a" / "authority.json").keys[-1].revoked


def test_the_list_shows_every_key_and_no_secret(
    broker: DeployedBroker, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert broker.keys("list", "--json", str(tmp_path / "keys.json")) == 0
    keys = {key["name"]: key for key in json.loads((tmp_path / "keys.json").read_text())["keys"]}
    assert {"arbitrator", "learner", "provision", "reward", "watcher", "collector-node-a", "trainer"} <= set(keys)
    assert keys["trainer"]["tags"] == ["job:alice", "job:job", "job:mnist"]
    assert re.search(r"trainer +trainer +job:alice, job:job, job:mnist +\d{4}-\d\d-\d\d +U\w+", capsys.readouterr().out)


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
