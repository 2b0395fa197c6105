"""Three real servers of which one lacks what a stream stores: an unnamed consumer there is replaced by another."""

import asyncio
import contextlib

import msgspec
import pytest
from tests.support.brokers import connected, publish_states
from tests.support.lagging_copy import LaggingCopy
from tests.support.reading import STATES, numbers, read

from dynamix.runtime.bus import Bus, BusMessage, Consumer
from dynamix.runtime.bus.broker.requests import Answer
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.bus.streams import broker_consumer, consumer, pull
from dynamix.schemas.streams import FEED

MAX_READERS = 60
"""A cluster chooses among the servers at random: none of so many on one of three, once in 4e10."""


class _Leader(msgspec.Struct):
    leader: str = ""


class _Places(Answer):
    cluster: _Leader = msgspec.field(default_factory=_Leader)


async def place_of(bus: Bus, reader: Consumer) -> str:
    """The server that keeps a reader's consumer."""
    assert reader._pull is not None
    return (await bus.requests.ask(f"CONSUMER.INFO.FEED.{reader._pull.consumer}", None, _Places)).cluster.leader


async def reader_at(bus: Bus, server: str, stack: contextlib.AsyncExitStack) -> Consumer:
    """A reader whose consumer is on this server, and that has read what there is: until then it may be placed again."""
    for _ in range(MAX_READERS):
        reader = await stack.enter_async_context(bus.consume(FEED.name, STATES, start="all"))
        assert numbers(await read(reader, 1)) == [0]
        if await place_of(bus, reader) == server:
            return reader
        await reader.close()
    raise AssertionError(f"no consumer was placed on {server}")


async def read_for(reader: Consumer, timeout_s: float) -> list[BusMessage]:
    """What comes within a time."""
    found: list[BusMessage] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            async for batch in reader:
                found += batch
    return found


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(consumer, "HEARTBEAT_S", 0.2)


@pytest.mark.usefixtures("_fast")
async def test_a_reader_on_a_copy_that_lags_is_placed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LaggingCopy() as servers, contextlib.AsyncExitStack() as stack:
        writer, bus, other = [await stack.enter_async_context(connected(servers.settings)) for _ in range(3)]
        await provision(writer, [FEED], num_replicas=3)
        await servers.until_current(writer, [FEED])
        leader = (await servers.leader_of(writer, FEED.name)).name
        behind = next(name for name in servers.servers if name != leader)
        await publish_states(writer, [0])
        at_leader, there = await reader_at(other, leader, stack), await reader_at(bus, behind, stack)
        await servers.keep_behind(writer, FEED.name, behind)
        monkeypatch.setattr(consumer, "QUIET_BEATS", 1_000_000)
        num_resets, num_others = bus.counters["consumer_resets"], other.counters["consumer_resets"]
        await publish_states(writer, range(1, 6))
        assert numbers(await read(at_leader, 5)) == [1, 2, 3, 4, 5]
        assert await read_for(there, 3.0) == [], "its consumer is alive, and has nothing to deliver"
        assert (await place_of(bus, there), bus.counters["consumer_resets"]) == (behind, num_resets)

        monkeypatch.setattr(consumer, "QUIET_BEATS", 3)
        assert numbers(await read(there, 5)) == [1, 2, 3, 4, 5]
        assert await place_of(bus, there) != behind
        assert bus.counters["consumer_resets"] > num_resets
        assert other.counters["consumer_resets"] == num_others, "the copy of this one does not lag"
        servers.let_catch_up()
        await servers.until_current(writer, [FEED])


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize("num_replicas", [3, 1])
async def test_a_quiet_reader_asks_a_cluster_and_stays_when_there_is_nothing_for_it(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, num_replicas: int
) -> None:
    found, find = list[int](), broker_consumer.BrokerConsumer.find_owed

    async def noted(self: broker_consumer.BrokerConsumer) -> int:
        found.append(await find(self))
        return found[-1]

    monkeypatch.setattr(broker_consumer.BrokerConsumer, "find_owed", noted)
    await publish_states(bus, range(3))
    async with bus.consume(FEED.name, [*STATES, "dynamix.v1.window.>"], start="all") as reader:
        reader._broker_side.num_replicas = num_replicas
        assert numbers(await read(reader, 3)) == [0, 1, 2]
        await publish_states(bus, range(3), "dynamix.v1.report.job.1.node-a")
        assert await read_for(reader, 2.0) == []
        await publish_states(bus, range(3, 5))
        assert numbers(await read(reader, 2)) == [3, 4]
    assert set(found) == ({0} if num_replicas > 1 else set())
    assert bus.counters["consumer_resets"] == 0


async def test_what_a_reader_is_owed_is_the_next_message_of_any_of_its_subjects(bus: Bus) -> None:
    async with bus.consume(FEED.name, ["dynamix.v1.window.>", *STATES], start="new") as reader:
        assert await reader._broker_side.find_owed() == 0
        await publish_states(bus, range(2), "dynamix.v1.report.job.1.node-a")
        assert await reader._broker_side.find_owed() == 0
        await publish_states(bus, range(2))
        assert len(await read(reader, 2)) == 2
        assert await reader._broker_side.find_owed() == 0
        reader._broker_side.position.last = 3
        assert await reader._broker_side.find_owed() == 4
