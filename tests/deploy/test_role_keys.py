"""Every other role's key, tried with every operation of the table: what it may is listed here and in SECURITY.md."""

from collections.abc import AsyncIterator, Iterator

import pytest
from tests.support import examples
from tests.support.brokers import connected, consumer_names
from tests.support.deployed_broker import DeployedBroker, deployed_broker
from tests.support.hostile import api_operations, refused, subjects_of_kind

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.broker.login import API, OUTSIDE_API
from dynamix.runtime.bus.provision import provision
from dynamix.schemas.kinds import BY_NAME, KINDS
from dynamix.schemas.streams import FEED

ALSO_GIVEN = {"reward": ("--instance", "1")}
ROLES = ("reward", "arbitrator", "learner", "watcher", "provision")
HARMLESS = {"$SYS.REQ.USER.INFO"}
"""The server answers it to every user, about itself."""
PREFIXES = {role: API if role == "provision" else OUTSIDE_API for role in ROLES}
"""What requests to JetStream begin with, in the account that the key is for."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployedBroker]:
    with deployed_broker(tmp_path_factory.mktemp("broker")) as running:
        for role in ROLES:
            running.key(f"my-{role}", "--role", role, *ALSO_GIVEN.get(role, ()))
        running.key("my-collector", "--role", "collector", "--node", "node-a")
        running.reload()
        yield running


@pytest.fixture
async def operator(broker: DeployedBroker) -> AsyncIterator[Bus]:
    async with connected(broker.with_key("my-provision"), "provision-1") as bus:
        await provision(bus)
        yield bus


def reads(stream: str, *kinds: str) -> set[str]:
    """What it takes to read these kinds of a stream by consumers of any name."""
    wanted = [subject for kind in kinds for subject in subjects_of_kind(BY_NAME[kind], {})]
    return {
        f"$JS.API.STREAM.INFO.{stream}",
        *(f"$JS.API.CONSUMER.{what}.{stream}.any" for what in ("MSG.NEXT", "DELETE")),
        *(f"$JS.API.CONSUMER.CREATE.{stream}.any.{subject}" for subject in wanted),
    }


def looks_up(*streams: str) -> set[str]:
    return {f"$JS.API.STREAM.{what}.{stream}" for what in ("MSG.GET", "INFO") for stream in streams}


STREAM_NAMES = ("JOBS", "FEED", "ACTIONS", "DEAD", "PROFILES", "OBJ_policies")
MAY = {
    "reward": {"$JS.API.STREAM.INFO.FEED", "_INBOX.watcher.x"},
    "arbitrator": {
        *reads("JOBS", "job"),
        *reads("FEED", "state", "applied"),
        *reads("PROFILES", "profile"),
        *reads("OBJ_policies"),
        *looks_up("JOBS", "FEED", "ACTIONS", "PROFILES", "OBJ_policies"),
        *("$JS.API.INFO", "$JS.API.STREAM.INFO.DEAD", "_INBOX.watcher.x"),
    },
    "learner": {
        *reads("JOBS", "job"),
        *reads("FEED", *BY_NAME),
        *reads("ACTIONS", "action"),
        *reads("OBJ_policies"),
        *looks_up("JOBS", "FEED", "ACTIONS", "OBJ_policies"),
        *("$JS.API.CONSUMER.CREATE.FEED.any", "$JS.API.STREAM.PURGE.OBJ_policies"),
        *("$O.policies.C.x", "$O.policies.M.x", "_INBOX.watcher.x"),
    },
    "watcher": {
        *(one for stream in STREAM_NAMES for one in reads(stream, *BY_NAME)),
        *(f"$JS.API.CONSUMER.CREATE.{stream}.any" for stream in STREAM_NAMES),
        *looks_up(*STREAM_NAMES),
        *("$JS.API.INFO", "$SRV.PING", "$SRV.STATS"),
    },
    "provision": {operation for operation in api_operations() if operation.startswith("$JS.API.")},
}


@pytest.mark.parametrize("role", ROLES)
async def test_a_key_is_refused_every_operation_but_those_of_its_role(
    broker: DeployedBroker, operator: Bus, role: str
) -> None:
    """Without a payload that JetStream would act on. Its API has another prefix for all but an operator."""
    assert operator.is_connected
    tried = dict.fromkeys([*api_operations(), *api_operations(OUTSIDE_API)])
    operations = [operation for operation in tried if operation not in HARMLESS]
    async with connected(broker.with_key(f"my-{role}"), f"{role}-1") as bus:
        found = await refused(bus, *operations, payload=b"no JSON")
    assert {one for one, no in zip(operations, found, strict=True) if not no} == {
        operation.replace(API, PREFIXES[role]) for operation in MAY[role]
    }


@pytest.mark.parametrize("role", ROLES)
async def test_a_key_publishes_the_kinds_of_its_role_only(broker: DeployedBroker, operator: Bus, role: str) -> None:
    assert operator.is_connected
    async with connected(broker.with_key(f"my-{role}"), f"{role}-1") as bus:
        for kind in KINDS:
            place = {"service": (role,), "instance": ("1",)}
            for subject in subjects_of_kind(kind, place):
                may = role in kind.senders or (role, kind.name) == ("provision", "profile")
                assert await refused(bus, subject, payload=b"junk") == [not may], subject


async def test_a_reward_key_of_one_instance_cannot_touch_the_consumer_of_a_collector(
    broker: DeployedBroker, operator: Bus
) -> None:
    """It could give that another filter, and stop every job of the node."""
    create, others = "dynamix.api.CONSUMER.CREATE.FEED", "collector-node-a"  # without its ending
    windows, reports = "dynamix.v1.window.*.*", "dynamix.v1.report.*.node-a"
    wrong = [
        f"{create}.{others}.{windows}",
        f"{create}.reward-2.{windows}",
        *(f"dynamix.api.CONSUMER.{what}.FEED.{others}" for what in ("MSG.NEXT", "INFO", "RESET", "DELETE")),
        f"$JS.ACK.FEED.{others}.1.1.1.1.1",
        "dynamix.v1.live.reward.2",
    ]
    async with (
        connected(broker.with_key("my-collector"), "collector-1") as collector,
        connected(broker.with_key("my-reward"), "reward-1") as reward,
        collector.consume(FEED.name, [reports], start="new", durable=others),
    ):
        assert await refused(reward, *wrong) == [True] * len(wrong)
        before = reward.counters["permission_denials"]
        async with reward.consume(FEED.name, [windows], start="new", durable="reward-1") as consumer:
            await collector.publish(examples.window(node="node-a"))
            await consumer.ack((await anext(consumer))[-1])
        assert reward.counters["permission_denials"] == before
        mine = [collector._connection.durable_named(others), reward._connection.durable_named("reward-1")]
        assert set(await consumer_names(operator, FEED.name)) == set(mine)
