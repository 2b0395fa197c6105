"""JetStream answers wherever a request says, with rights of its own: no key can have that used against others."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.support import examples
from tests.support.brokers import connected, consumer_names
from tests.support.deployed_broker import DeployedBroker, deployed_broker
from tests.support.hostile import answered_to

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.key_file import read_key_file
from dynamix.schemas import subjects
from dynamix.schemas.streams import ACTIONS, FEED, JOBS

OTHERS = "other-1"
ROLES = ("trainer", "collector", "reward", "arbitrator", "learner", "watcher")
ALSO_GIVEN = {"trainer": ("--job", "*"), "collector": ("--node", "node-a"), "reward": ("--instance", "1")}
VICTIM = "collector-node-b"
READS = {
    "trainer": "",
    "collector": "collector-node-a.dynamix.v1.report.*.node-a",
    "reward": "reward-1.dynamix.v1.window.*.*",
    "arbitrator": "mine.dynamix.v1.state.*.*",
    "learner": "mine.dynamix.v1.state.*.*",
    "watcher": "mine.dynamix.v1.state.*.*",
}
"""A consumer of FEED that it may make, and the filter."""
SENDS = {
    "trainer": "dynamix.v1.report.mine.node-a",
    "collector": "dynamix.v1.window.mine.node-a",
    "reward": "dynamix.v1.reward.mine.node-a",
    "arbitrator": "dynamix.v1.dead.state.mine",
    "learner": "dynamix.v1.dead.state.mine",
    "watcher": "",
}
"""What it may publish, and is acknowledged."""
STORED = [
    *(subjects.of(kind, OTHERS) for kind in ("job", "action", "applied")),
    *(subjects.of(kind, OTHERS, "node-b") for kind in ("report", "window", "state", "reward", "trace")),
]
CARRIED_OUT = [
    f"CONSUMER.DELETE.{FEED.name}.{VICTIM}",
    f"STREAM.PURGE.{FEED.name}",
    f"STREAM.DELETE.{ACTIONS.name}",
    f"CONSUMER.CREATE.{FEED.name}.forged.dynamix.v1.report.>",
]
TARGETS = [*STORED, *(prefix + one for prefix in ("$JS.API.", "dynamix.api.") for one in CARRIED_OUT)]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployedBroker]:
    with deployed_broker(tmp_path_factory.mktemp("broker")) as running:
        for role in ROLES:
            running.key(f"my-{role}", "--role", role, *ALSO_GIVEN.get(role, ()))
        running.key("node-b", "--role", "collector", "--node", "node-b")
        running.reload()
        yield running


@pytest.fixture
async def operator(broker: DeployedBroker) -> AsyncIterator[Bus]:
    """Streams, with something in them; a collector's consumer; and one by which the roles read."""
    async with connected(broker.settings("provision"), "provision-1") as bus:
        await provision(bus)
        for stream in (JOBS, FEED):
            await bus.purge(stream.name, ">")
        async with (
            connected(broker.settings("trainer"), "trainer-1") as trainer,
            connected(broker.settings("collector"), "collector-2") as collector,
            connected(broker.with_key("node-b"), "collector-1") as victim,
            victim.consume(FEED.name, ["dynamix.v1.report.*.node-b"], start="new", durable=VICTIM),
        ):
            await trainer.publish(examples.job())
            await trainer.publish(examples.report(node="node-a"))
            await collector.publish(examples.window(node="node-a"))
            await collector.publish_bytes(subjects.of("state", examples.JOB, "node-a"), b"a state", "1")
        yield bus


def victims_consumer(broker: DeployedBroker) -> str:
    """In truth no other user knows it."""
    return f"{VICTIM}-{read_key_file(broker.directory / 'node-b.nkey').consumer}"


async def seen(operator: Bus, broker: DeployedBroker) -> dict[str, object]:
    """What others would notice: messages of another job, consumers, and how much the streams hold."""
    found: dict[str, object] = {subject: await operator.last(_stream_of(subject), subject) for subject in STORED}
    found["consumers"] = sorted(set(await consumer_names(operator, FEED.name)) & {victims_consumer(broker), "forged"})
    found["first"] = [(await operator.stream_state(one.name)).first_sequence for one in (JOBS, FEED, ACTIONS)]
    return found


def _stream_of(subject: str) -> str:
    return {"job": JOBS, "action": ACTIONS}.get(subject.split(".")[2], FEED).name


def requests_of(bus: Bus, role: str) -> list[tuple[str, bytes]]:
    """What the role may ask for, and has answers: by what it publishes, and by what it reads."""
    api, found = bus._connection.api, []
    if role == "trainer":
        found.append((f"{api}DIRECT.GET.{JOBS.name}.{subjects.of('job', examples.JOB)}", b""))
    else:
        name, _, wanted = READS[role].partition(".")
        name = name if name == "mine" else bus._connection.durable_named(name)
        config = {"name": name, "ack_policy": "none", "filter_subject": wanted, "deliver_policy": "all"}
        body = {"stream_name": FEED.name, "config": config | ({} if name == "mine" else {"durable_name": name})}
        found += [
            (f"{api}STREAM.INFO.{FEED.name}", b""),
            (f"{api}CONSUMER.CREATE.{FEED.name}.{name}.{wanted}", json.dumps(body).encode()),
            (f"{api}CONSUMER.MSG.NEXT.{FEED.name}.{name}", b'{"batch": 3, "expires": 200000000}'),
        ]
    if SENDS[role]:
        found.append((SENDS[role], b"junk"))
    return found


@pytest.mark.parametrize("role", ROLES)
async def test_what_a_key_has_answered_elsewhere_is_neither_stored_nor_carried_out(
    broker: DeployedBroker, operator: Bus, role: str
) -> None:
    before = await seen(operator, broker)
    assert before["consumers"] == [victims_consumer(broker)]
    async with connected(broker.with_key(f"my-{role}"), f"{role}-1") as bus:
        requests = requests_of(bus, role)
        for target in TARGETS:
            await answered_to(bus, target.replace(VICTIM, victims_consumer(broker)), *requests)
        assert bus.counters["permission_denials"] == 0, "the attempts are within its rights"
    await asyncio.sleep(0.5)  # what there was to deliver has come
    assert await seen(operator, broker) == before


@pytest.mark.parametrize("role", ROLES)
async def test_within_the_account_of_the_streams_such_answers_are_stored(
    broker: DeployedBroker, operator: Bus, role: str
) -> None:
    """As those of users with a password are: the attempts above would be noticed."""
    async with connected(broker.settings(role), f"{role}-1") as bus:
        forged = subjects.of("action", f"by-{role}")
        await answered_to(bus, forged, *requests_of(bus, role))
    async with asyncio.timeout(30):
        while await operator.last(ACTIONS.name, forged) is None:  # noqa: ASYNC110 - what an operator would do
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("role", ["collector", "reward"])
async def test_an_answer_is_no_message_of_another_user_of_the_same_account(
    broker: DeployedBroker, operator: Bus, role: str
) -> None:
    """All collectors are in one account: it may publish for every node, and its messages are heard by trainers."""
    kind = {"collector": "trace", "reward": "reward"}[role]
    assert operator.is_connected
    forged = subjects.of(kind, OTHERS, "node-b")
    async with (
        connected(broker.with_key("my-trainer"), "trainer-1") as trainer,
        connected(broker.with_key(f"my-{role}"), f"{role}-1") as bus,
        trainer.subscribe(forged) as heard,
    ):
        await trainer._connection.round_trip(10.0)
        await answered_to(bus, forged, *requests_of(bus, role))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await anext(heard)
    assert await operator.last(FEED.name, forged) is None
