"""A user whose consumers have any name cannot touch those of collectors and reward services that have keys."""

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
from dynamix.runtime.bus.broker.requests import Answer
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.streams import FEED

ANY_NAME = ("arbitrator", "learner", "watcher")
COLLECTORS, REWARDS = "collector-node-a", "reward-1"
REPORTS, WINDOWS, STATES = "dynamix.v1.report.*.node-a", "dynamix.v1.window.*.*", "dynamix.v1.state.*.*"
HARMFUL = ("CREATE", "DELETE", "INFO", "MSG.NEXT", "RESET", "PAUSE", "UNPIN")


class _Info(Answer):
    config: dict[str, Any] = msgspec.field(default_factory=dict)


@pytest.fixture
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployedBroker]:
    with deployed_broker(tmp_path_factory.mktemp("broker")) as running:
        for role in ANY_NAME:
            running.key(f"my-{role}", "--role", role)
        running.reload()
        yield running


@pytest.fixture
async def operator(broker: DeployedBroker) -> AsyncIterator[Bus]:
    async with connected(broker.settings("provision"), "provision-1") as bus:
        await provision(bus)
        yield bus


def key(broker: DeployedBroker, name: str) -> BusSettings:
    return BusSettings(url=broker.url, nkey_file=str(broker.directory / f"{name}.nkey"))


def give_keys(broker: DeployedBroker) -> None:
    broker.key("my-collector", "--role", "collector", "--node", "node-a")
    broker.key("my-reward", "--role", "reward", "--instance", "1")
    broker.reload()


@contextlib.asynccontextmanager
async def read_by_services(broker: DeployedBroker) -> AsyncIterator[tuple[Bus, Consumer, Consumer]]:
    """A collector and a reward service that read, each by its key."""
    async with (
        connected(key(broker, "my-collector"), "collector-1") as collector,
        connected(key(broker, "my-reward"), "reward-1") as reward,
        collector.consume(FEED.name, [REPORTS], start="new", durable=COLLECTORS) as reports,
        reward.consume(FEED.name, [WINDOWS], start="new", durable=REWARDS) as windows,
    ):
        yield collector, reports, windows


def requests_for(name: str) -> list[str]:
    """All of JetStream's API that names a consumer."""
    create = [f"$JS.API.CONSUMER.CREATE.FEED.{name}.{one}" for one in (REPORTS, WINDOWS, STATES)]
    return [*(f"$JS.API.CONSUMER.{what}.FEED.{name}" for what in HARMFUL), *create]


async def configs(operator: Bus) -> dict[str, dict[str, Any]]:
    names = await consumer_names(operator, FEED.name)
    return {name: (await operator.requests.ask(f"CONSUMER.INFO.FEED.{name}", None, _Info)).config for name in names}


async def ask_for(bus: Bus, operation: str, config: dict[str, Any]) -> bytes:
    """Ask for a consumer; the broker's answer."""
    body = msgspec.json.encode({"stream_name": FEED.name, "config": config, "action": ""})
    inbox = f"{bus._connection.inbox}.tried"
    async with asyncio.timeout(10), bus.subscribe(inbox) as answers:
        await bus._connection.send(f"$JS.API.CONSUMER.{operation}", body, inbox)
        return (await anext(answers)).payload


@pytest.mark.parametrize("role", ANY_NAME)
async def test_the_consumers_of_services_with_keys_are_refused_to_others(
    broker: DeployedBroker, operator: Bus, role: str
) -> None:
    give_keys(broker)
    async with read_by_services(broker) as (collector, reports, windows), connected(key(broker, f"my-{role}")) as bus:
        before = await configs(operator)
        assert set(before) == {COLLECTORS, REWARDS}
        for name in (COLLECTORS, REWARDS):
            wrong = requests_for(name)
            assert await refused(bus, *wrong) == [True] * len(wrong)
        assert await configs(operator) == before
        report, window = examples.report(node="node-a"), examples.window(node="node-a")
        async with connected(broker.settings("trainer"), "trainer-1") as trainer:
            await trainer.publish(report)
        await collector.publish(window)
        assert [message.subject for message in await anext(reports)] == [subjects.of("report", report.job, "node-a")]
        assert [message.subject for message in await anext(windows)] == [subjects.of("window", window.job, "node-a")]
        async with bus.consume(FEED.name, [STATES], start="all") as own:
            assert own._pull is not None
            assert set(await consumer_names(operator, FEED.name)) == {COLLECTORS, REWARDS, own._pull.consumer}


@pytest.mark.parametrize("role", ANY_NAME)
async def test_another_name_in_the_subject_than_in_the_request_changes_no_consumer(
    broker: DeployedBroker, operator: Bus, role: str
) -> None:
    """The broker goes by the subject, or refuses."""
    give_keys(broker)
    async with read_by_services(broker), connected(key(broker, f"my-{role}")) as bus:
        before = await configs(operator)
        config = {"ack_policy": "all", "filter_subject": STATES}
        names = COLLECTORS, "any"
        for called in [{"name": name} for name in names] + [{"durable_name": name} for name in names]:
            for other in ({}, {"name": COLLECTORS}, {"durable_name": COLLECTORS}):
                assert await ask_for(bus, f"CREATE.FEED.any.{STATES}", config | called | other)
        after = await configs(operator)
        assert {name: after[name] for name in before} == before
        assert set(after) <= {*before, "any"}


async def test_a_reload_with_a_new_node_keeps_connections_and_shuts_them_out_of_its_consumer(
    broker: DeployedBroker, operator: Bus
) -> None:
    """Before, any name is good: that of a collector without a key of its own can be changed."""
    async with connected(key(broker, "my-watcher")) as watcher:
        place = f"$JS.API.CONSUMER.INFO.FEED.{COLLECTORS}", f"$JS.API.CONSUMER.DELETE.FEED.{COLLECTORS}"
        assert await refused(watcher, *place) == [True, False]
        give_keys(broker)
        assert await refused(watcher, *place) == [True, True]
        assert watcher.counters["reconnects"] == 0
        assert await operator.stream_state(FEED.name)


async def test_a_shared_password_of_the_same_role_goes_on_while_keys_are_given(
    broker: DeployedBroker, operator: Bus
) -> None:
    assert operator.is_connected
    give_keys(broker)
    async with connected(broker.settings("collector"), "collector-1") as shared:
        async with shared.consume(FEED.name, [REPORTS], start="new", durable=COLLECTORS):
            pass
        wrong = requests_for(REWARDS)
        assert await refused(shared, *wrong) == [True] * len(wrong)
        assert shared.counters["permission_denials"] == len(wrong)
