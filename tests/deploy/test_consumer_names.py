"""Who knows a consumer's name can empty or move it; so no other user learns, or can guess, that of a service's key."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from tests.support import examples
from tests.support.brokers import connected, consumer_names
from tests.support.deployed_broker import DeployedBroker, deployed_broker
from tests.support.hostile import refused

from dynamix.runtime.bus import Bus, Consumer
from dynamix.runtime.bus.broker.login import API, OUTSIDE_API
from dynamix.runtime.bus.broker.requests import Answer
from dynamix.runtime.bus.provision import provision
from dynamix.schemas import subjects
from dynamix.schemas.codec import encode
from dynamix.schemas.streams import ACTIONS, FEED

LIMITED = {"collector": ("--node", "node-b"), "reward": ("--instance", "2")}
ROLES = ("collector", "reward", "arbitrator", "learner", "watcher")
COLLECTORS, REWARDS = "collector-node-a", "reward-1"
REPORTS, WINDOWS, STATES = "dynamix.v1.report.*.node-a", "dynamix.v1.window.*.*", "dynamix.v1.state.*.*"
HARMFUL = ("CREATE", "DELETE", "INFO", "MSG.NEXT", "RESET", "PAUSE", "UNPIN")
READS = {"collector": "dynamix.v1.report.*.node-b", "reward": WINDOWS}
"""What a role may read by a consumer of its own; states for the others."""


class _Sequences(msgspec.Struct):
    stream_seq: int = 0


class _Info(Answer):
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    delivered: _Sequences = msgspec.field(default_factory=_Sequences)


@pytest.fixture
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployedBroker]:
    """With a key for each role, and those of the services that shall not be harmed."""
    with deployed_broker(tmp_path_factory.mktemp("broker")) as running:
        for role in ROLES:
            running.key(f"my-{role}", "--role", role, *LIMITED.get(role, ()))
        running.key("victim", "--role", "collector", "--node", "node-a")
        running.key("reward-1", "--role", "reward", "--instance", "1")
        running.reload()
        yield running


@pytest.fixture
async def operator(broker: DeployedBroker) -> AsyncIterator[Bus]:
    async with connected(broker.settings("provision"), "provision-1") as bus:
        await provision(bus)
        yield bus


@contextlib.asynccontextmanager
async def read_by_services(broker: DeployedBroker) -> AsyncIterator[tuple[Bus, Consumer, Consumer]]:
    """A collector and a reward service that read, each by its key."""
    async with (
        connected(broker.with_key("victim"), "collector-1") as collector,
        connected(broker.with_key("reward-1"), "reward-1") as reward,
        collector.consume(FEED.name, [REPORTS], start="new", durable=COLLECTORS) as reports,
        reward.consume(FEED.name, [WINDOWS], start="new", durable=REWARDS) as windows,
    ):
        yield collector, reports, windows


def requests_for(name: str) -> list[str]:
    """All of JetStream's API that names a consumer, and acknowledgements for it."""
    create = [f"CONSUMER.CREATE.FEED.{name}.{one}" for one in (REPORTS, WINDOWS, STATES)]
    operations = [*(f"CONSUMER.{what}.FEED.{name}" for what in HARMFUL), *create]
    return [prefix + operation for operation in operations for prefix in (API, OUTSIDE_API)]


async def states_of(operator: Bus) -> dict[str, _Info]:
    names = await consumer_names(operator, FEED.name)
    found = {name: await operator.requests.ask(f"CONSUMER.INFO.FEED.{name}", None, _Info) for name in names}
    return {name: info for name, info in found.items() if name.startswith((COLLECTORS, REWARDS))}


async def make_consumer(bus: Bus, name: str, wanted: str, **config: object) -> None:
    body = {"stream_name": FEED.name, "config": {"name": name, "filter_subject": wanted, **config}, "action": ""}
    await bus.requests.ask(f"CONSUMER.CREATE.FEED.{name}.{wanted}", body, _Info)


@pytest.mark.parametrize("role", ROLES)
async def test_no_role_is_told_the_names_of_others_consumers(broker: DeployedBroker, operator: Bus, role: str) -> None:
    """Not by lists, not by what the broker says of one's own permissions, and not by denials."""
    assert operator.is_connected
    async with read_by_services(broker) as (collector, _, _), connected(broker.with_key(f"my-{role}"), "1") as bus:
        name = collector._connection.durable_named(COLLECTORS)
        assert len(name) == len(COLLECTORS) + 1 + 16
        lists = [f"{api}CONSUMER.{what}.FEED" for what in ("LIST", "NAMES") for api in (API, OUTSIDE_API)]
        assert await refused(bus, *lists) == [True] * len(lists)
        heard: list[bytes] = []
        inbox = f"{bus._connection.inbox}.me"
        await bus._connection.subscribe(inbox, lambda _subject, _reply, payload, _headers: heard.append(payload))
        await bus._connection.send("$SYS.REQ.USER.INFO", b"", inbox)
        await bus._connection.round_trip(10.0)
        assert not any(name.rpartition("-")[2].encode() in payload for payload in heard)


@pytest.mark.parametrize("role", ROLES)
async def test_the_names_that_can_be_guessed_are_of_no_consumer(
    broker: DeployedBroker, operator: Bus, role: str
) -> None:
    async with (
        read_by_services(broker) as (collector, reports, windows),
        connected(broker.with_key(f"my-{role}")) as bus,
    ):
        before = await states_of(operator)
        assert collector._connection.durable_named(COLLECTORS) in before
        assert (len(before), set(before) & {COLLECTORS, REWARDS}) == (2, set())
        for name in (COLLECTORS, REWARDS):
            await refused(bus, *requests_for(name))
            await refused(bus, f"$JS.ACK.FEED.{name}.1.1.1.1.1", f"$JS.ACK.FEED.{name}.FEED.x.1.1.1", payload=b"+NXT")
        assert await states_of(operator) == before
        report, window = examples.report(node="node-a"), examples.window(node="node-a")
        async with connected(broker.settings("trainer"), "trainer-1") as trainer:
            await trainer.publish(report)
        await collector.publish(window)
        assert [message.subject for message in await anext(reports)] == [subjects.of("report", report.job, "node-a")]
        assert [message.subject for message in await anext(windows)] == [subjects.of("window", window.job, "node-a")]


@pytest.mark.parametrize("knows_name", [False, True])
@pytest.mark.parametrize("operation", ["MSG.NEXT", "RESET"])
@pytest.mark.parametrize("role", ROLES)
async def test_a_consumer_that_delivers_to_the_api_moves_no_other_without_its_name(
    broker: DeployedBroker, operator: Bus, role: str, operation: str, *, knows_name: bool
) -> None:
    """The broker carries out what a consumer delivers to the API; with the name, the attempt is seen to work."""
    wanted = READS.get(role, STATES)
    async with connected(broker.with_key("victim"), "collector-1") as collector:
        secret = collector._connection.durable_named(COLLECTORS)
        await make_consumer(collector, secret, REPORTS, durable_name=secret, ack_policy="all")  # which reads nothing
    before = await states_of(operator)
    async with (
        connected(broker.with_key(f"my-{role}"), "1") as bus,
        connected(broker.settings("trainer"), "trainer-1") as trainer,
        connected(broker.settings("collector"), "collector-2") as publisher,
    ):
        for window in range(5):
            await trainer.publish(examples.report(node="node-a", window=window))
        own = {"collector": "collector-node-b", "reward": "reward-2"}.get(role)
        name = "mine" if own is None else bus._connection.durable_named(own)
        target = f"{API}CONSUMER.{operation}.FEED.{secret if knows_name else COLLECTORS}"
        kind = {"ack_policy": "explicit", "deliver_policy": "new", "deliver_subject": target}
        durable = {} if own is None else {"durable_name": name}
        await make_consumer(bus, name, wanted, headers_only=operation == "MSG.NEXT", **kind, **durable)
        subject = wanted.replace("*", examples.JOB, 1).replace("*", "node-b")
        sender = trainer if role == "collector" else publisher
        for number in range(3):
            await sender.publish_bytes(subject, b'{"seq": 1000000}', f"x-{number}")
        await asyncio.sleep(0.3)
    after = (await states_of(operator))[secret].delivered.stream_seq
    assert (after != before[secret].delivered.stream_seq) == knows_name


@pytest.mark.parametrize("role", ROLES)
async def test_what_is_delivered_to_a_trainer_by_a_consumer_is_no_action(
    broker: DeployedBroker, operator: Bus, role: str
) -> None:
    """It says its own subject, whatever it holds."""
    assert operator.is_connected
    action = examples.action(3, job="bob-1")
    wanted = READS.get(role, STATES)
    async with (
        connected(broker.settings("trainer"), "trainer-1") as victim,
        connected(broker.settings("trainer"), "trainer-2") as other,
        connected(broker.settings("collector"), "collector-2") as publisher,
        connected(broker.settings("arbitrator"), "arbitrator-1") as arbitrator,
        connected(broker.with_key(f"my-{role}"), "1") as bus,
        victim.follow(ACTIONS.name, subjects.of("action", "bob-1")) as actions,
    ):
        await victim._connection.round_trip(10.0)
        own = {"collector": "collector-node-b", "reward": "reward-2"}.get(role)
        name = "mine" if own is None else bus._connection.durable_named(own)
        durable = {} if own is None else {"durable_name": name}
        target = "dynamix.v1.stored.action.bob-1"
        await make_consumer(bus, name, wanted, ack_policy="none", deliver_subject=target, **durable)
        subject = wanted.replace("*", examples.JOB, 1).replace("*", "node-b")
        await (other if role == "collector" else publisher).publish_bytes(subject, encode(action), "forged")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await anext(actions)
        await arbitrator.publish_action(action, expected_last=0)
        async with asyncio.timeout(20):
            assert (await anext(actions)).payload == encode(action)


async def test_a_reload_with_a_new_node_keeps_connections(broker: DeployedBroker, operator: Bus) -> None:
    async with read_by_services(broker) as (collector, reports, _):
        broker.key("node-c", "--role", "collector", "--node", "node-c")
        broker.reload()
        async with connected(broker.settings("trainer"), "trainer-1") as trainer:
            await trainer.publish(examples.report(node="node-a"))
        assert await anext(reports)
        assert collector.counters["reconnects"] == 0
        assert await operator.stream_state(FEED.name)
