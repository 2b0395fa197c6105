"""Users with keys are in other accounts than the streams: what they say is heard as with passwords, and once."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
from tests.support import examples
from tests.support.brokers import connected, until
from tests.support.deployed_broker import DeployedBroker, deployed_broker

from dynamix.cli.commands.family.stored import families
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.key_file import read_key_file
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.codec import encode
from dynamix.schemas.kinds import SERVICES
from dynamix.schemas.messages import Live
from dynamix.schemas.streams import FEED, PROFILES

INSTANCES = {"collector": "node-a", "reward": "1"}
ALSO_GIVEN = {
    "trainer": ("--job", examples.JOB),
    "collector": ("--node", INSTANCES["collector"]),
    "reward": ("--instance", INSTANCES["reward"]),
}
LOGINS = ("key", "password")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployedBroker]:
    with deployed_broker(tmp_path_factory.mktemp("broker")) as running:
        for role in (*SERVICES, "watcher"):
            running.key(f"my-{role}", "--role", role, *ALSO_GIVEN.get(role, ()))
        running.key("all-jobs", "--role", "trainer", "--job", "*")
        running.reload()
        yield running


def login(broker: DeployedBroker, role: str, by: str) -> BusSettings:
    if by == "password":
        return broker.settings(role)
    return broker.with_key(f"my-{role}")


@pytest.fixture(autouse=True)
async def streams(broker: DeployedBroker) -> None:
    async with connected(broker.settings("provision"), "provision-1") as bus:
        await provision(bus)


@contextlib.asynccontextmanager
async def heard(bus: Bus, subject: str) -> AsyncIterator[asyncio.Queue[str]]:
    """The subjects of what a user hears."""
    found: asyncio.Queue[str] = asyncio.Queue()

    async def take() -> None:
        async for message in messages:
            found.put_nowait(message.subject)

    async with bus.subscribe(subject) as messages:
        await bus._connection.round_trip(10.0)
        taking = asyncio.create_task(take())
        yield found
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


async def once(found: asyncio.Queue[str], *others: Bus) -> str:
    """The next one, after which there is none."""
    async with asyncio.timeout(10):
        subject = await found.get()
    for bus in others:
        await bus._connection.round_trip(10.0)
    await asyncio.sleep(0.1)
    assert found.empty()
    return subject


@pytest.mark.parametrize("by", LOGINS)
@pytest.mark.parametrize("watched_by", LOGINS)
@pytest.mark.parametrize("role", SERVICES)
async def test_a_heartbeat_is_heard_once_by_the_watcher_and_by_its_own_service(
    broker: DeployedBroker, role: str, by: str, watched_by: str
) -> None:
    instance = INSTANCES.get(role, "1")
    own = subjects.of("live", role, instance)
    async with (
        connected(login(broker, "watcher", watched_by), "watcher-1") as watcher,
        connected(login(broker, role, by), f"{role}-1") as bus,
        heard(watcher, subjects.of("live", "*", "*")) as by_watcher,
        heard(bus, own) as by_itself,
    ):
        await bus.publish_live(Live(service=role, instance=instance, uptime_s=1.0))
        assert await once(by_watcher, bus, watcher) == own
        assert await once(by_itself, bus) == own


@pytest.mark.parametrize("by", LOGINS)
@pytest.mark.parametrize("trainer", ["my-trainer", "all-jobs", "password"])
@pytest.mark.parametrize("kind", ["trace", "reward"])
async def test_traces_and_rewards_are_heard_once_by_the_trainer(
    broker: DeployedBroker, kind: str, trainer: str, by: str
) -> None:
    role = "collector" if kind == "trace" else "reward"
    subject = subjects.of(kind, examples.JOB, "node-a")
    key = broker.with_key(trainer)
    async with (
        connected(broker.settings("trainer") if trainer == "password" else key, "trainer-1") as listener,
        connected(login(broker, role, by), f"{role}-1") as bus,
        heard(listener, subjects.of(kind, examples.JOB, "*")) as found,
    ):
        await bus.publish_bytes(subject, b"x", f"{kind}-{trainer}-{by}")
        assert await once(found, bus, listener) == subject


async def test_the_key_of_a_service_of_an_earlier_version_stays_good_until_it_is_made_again(
    broker: DeployedBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not say what JetStream's API is called in another account; `refresh` says what to do."""
    settings = broker.key("earlier", "--role", "learner")
    key, text = broker.directory / "earlier.nkey", broker.users_file.read_text()
    assert read_key_file(key).api == "dynamix.api."
    key.write_text("".join(line for line in key.read_text().splitlines(keepends=True) if "# api:" not in line))
    users = [line for line in text.splitlines() if line.startswith("#: ")]
    earlier = next(line for line in users if '"earlier"' in line)
    user = msgspec.json.decode(earlier.removeprefix("#: "))
    broker.users_file.write_text(
        text.replace(earlier, "#: " + json.dumps({name: user[name] for name in ("name", "role", "keys")}))
    )
    capsys.readouterr()
    broker.keys("refresh")
    said = capsys.readouterr().err
    assert (
        "earlier's key is of an earlier version, and as strong as an operator's: once this version's services" in said
    )
    assert "`create` another one, give it to them, and `revoke earlier`" in said
    broker.reload()
    async with connected(settings, "learner-1") as bus:
        assert await bus.stream_state("FEED")
    broker.keys("revoke", "earlier")
    key.unlink()
    broker.key("earlier", "--role", "learner")
    broker.keys("refresh")
    assert "earlier version" not in capsys.readouterr().err
    broker.reload()
    async with connected(settings, "learner-1") as bus:
        assert await bus.stream_state("FEED")


@pytest.mark.parametrize("by", LOGINS)
async def test_a_reader_that_opens_again_and_again_misses_nothing_and_waits_for_no_old_request(
    broker: DeployedBroker, by: str
) -> None:
    """Across accounts the broker keeps what an earlier opening asked for, though there is no listener, up to 30 s."""
    wanted = subjects.of("report", "*", "node-a")
    durable = "collector-node-a" if by == "key" else "collector-x"
    async with (
        connected(broker.settings("trainer"), "trainer-1") as trainer,
        connected(login(broker, "collector", by), "collector-1") as bus,
        bus.consume(FEED.name, [wanted], start="new", durable=durable) as reader,
    ):
        for window in range(5):
            reader.break_off("a test")
            await until(lambda count=window + 1: bus.counters["consumer_resets"] == count)
            report = examples.report(node="node-a", window=window, job=f"{by}-1")
            await trainer.publish(report)
            async with asyncio.timeout(10):
                batch = await anext(reader)
            assert [message.payload for message in batch] == [encode(report)]
            await reader.ack(batch[-1])


@pytest.mark.parametrize("by", LOGINS)
async def test_an_arbitrator_keeps_what_runs_of_a_family_taught(broker: DeployedBroker, by: str) -> None:
    async with (
        connected(login(broker, "arbitrator", by), "arbitrator-1") as arbitrator,
        connected(login(broker, "watcher", by), "watcher-1") as watcher,
    ):
        profile = examples.profile(family=f"by-{by}")
        assert await arbitrator.last(PROFILES.name, subjects.of("profile", profile.family)) is None
        await arbitrator.publish_profile(profile, expected_last=0)
        stored = await arbitrator.last(PROFILES.name, subjects.of("profile", profile.family))
        assert stored is not None
        assert stored.payload == encode(profile)
        assert [one.family for one in await families(watcher) if one.family == profile.family] == [profile.family]
        assert arbitrator.counters["permission_denials"] == watcher.counters["permission_denials"] == 0
