"""Where a reader goes on: a durable consumer behind its acknowledgement, streams made again, and one that went back."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.brokers import ConfiguredServer, connected, operate, publish_states
from tests.support.reading import STATES, numbers, read

from dynamix.runtime.bus import Bus, SequenceRegressError, requests
from dynamix.runtime.bus import read as reader_module
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.bus.read import LostError
from dynamix.runtime.bus.requests import Answer, Requests, StreamState


async def test_a_durable_consumer_goes_on_behind_its_last_acknowledgement(bus: Bus) -> None:
    await publish_states(bus, range(6))
    async with bus.consume("FEED", STATES, start="all", durable="collector-a") as reader:
        found = await read(reader, 6)
        await reader.ack(found[3])
        await acknowledged_up_to(4, bus, "collector-a")
    async with bus.consume("FEED", STATES, start="all", durable="collector-a") as reader:
        assert numbers(await read(reader, 2)) == [4, 5]


async def test_what_was_handled_and_comes_again_is_acknowledged(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """An acknowledgement that is lost, and the consumer that delivers the same again and nothing after it."""

    async def unsent(*_arguments: object) -> bool:
        return True

    await publish_states(bus, range(3))
    async with bus.consume("FEED", STATES, start="all", durable="d") as reader:
        found = await read(reader, 3)
        with monkeypatch.context() as lost:
            lost.setattr(bus._connection, "send", unsent)
            await reader.ack(found[-1])
        reader._interrupt(LostError("a test"))
        await acknowledged_up_to(3, bus, "d")
    assert bus.counters["received_twice"] == 3


class _Floor(msgspec.Struct):
    stream_seq: int = 0


class _Info(Answer):
    ack_floor: _Floor = msgspec.field(default_factory=_Floor)


async def acknowledged_up_to(sequence: int, bus: Bus, durable: str) -> None:
    """Wait until the broker has taken the acknowledgement; no event tells."""
    while (await bus.requests.ask(f"CONSUMER.INFO.FEED.{durable}", None, _Info)).ack_floor.stream_seq < sequence:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def test_a_second_process_of_a_name_goes_on_where_the_first_one_ends(server: ConfiguredServer, bus: Bus) -> None:
    await publish_states(bus, range(4))
    async with connected(server.settings, "first") as other:
        async with other.consume("FEED", STATES, start="all", durable="d") as first:
            found = await read(first, 4)
            await first.ack(found[1])
            await acknowledged_up_to(2, bus, "d")
            async with bus.consume("FEED", STATES, start="all", durable="d"):
                pass  # it waits, and disturbs nothing
        async with bus.consume("FEED", STATES, start="all", durable="d") as second:
            assert numbers(await read(second, 2)) == [2, 3]


async def delete_stream(server: ConfiguredServer) -> None:
    async with connected(server.settings) as operator:
        await operate(operator, "STREAM.DELETE.FEED")


async def empty_store(server: ConfiguredServer) -> None:
    await server.kill()
    shutil.rmtree(server._directory / "store")
    await server.start()


@pytest.mark.parametrize("lose", [delete_stream, empty_store])
@pytest.mark.parametrize("durable", [None, "d"])
async def test_a_stream_that_is_made_again_is_read_from_its_beginning(
    server: ConfiguredServer,
    bus: Bus,
    monkeypatch: pytest.MonkeyPatch,
    lose: Callable[[ConfiguredServer], Awaitable[None]],
    durable: str | None,
) -> None:
    monkeypatch.setattr(reader_module, "CHECK_EVERY_S", 0.2)
    monkeypatch.setattr(reader_module, "LOOK_EVERY_S", 0.1)
    await publish_states(bus, range(10))
    async with bus.consume("FEED", STATES, start="all", durable=durable) as reader:
        assert len(await read(reader, 10)) == 10
        await lose(server)
        async with connected(server.settings) as operator:
            await provision(operator)
            await publish_states(operator, range(20, 23))
        assert numbers(await read(reader, 3)) == [20, 21, 22]


@pytest.mark.parametrize("num_replicas", [3, 1])
@pytest.mark.parametrize("durable", [None, "d"])
async def test_of_several_servers_one_that_says_less_than_was_read_is_asked_again(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, num_replicas: int, durable: str | None
) -> None:
    """It was cut off, and answers before it has heard of the new leader; a single one has lost what it does not say."""
    real, num_asked = Requests.stream_state, 0

    async def stale(requests: Requests, stream: str) -> StreamState:
        nonlocal num_asked
        num_asked += 1
        state = replace(await real(requests, stream), num_replicas=num_replicas)
        return replace(state, last_sequence=4) if num_asked < 3 else state

    await publish_states(bus, range(10))
    async with bus.consume("FEED", STATES, start="all", durable=durable) as reader:
        assert len(await read(reader, 10)) == 10
        monkeypatch.setattr(requests, "PAUSE_S", 0.05)
        monkeypatch.setattr(Requests, "stream_state", stale)
        if num_replicas > 1:
            await reader._check_stream()
            assert num_asked == 3
        else:
            with pytest.raises(SequenceRegressError, match="FEED ends at 4, but had reached 10"):
                await reader._check_stream()
            assert num_asked == 2, "the state, and the number of copies"


async def test_a_reader_that_has_read_nothing_yet_sees_that_its_stream_was_restored_from_an_older_copy(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored next would have sequences that it takes for old ones."""
    real = Requests.stream_state

    async def restored(requests: Requests, stream: str) -> StreamState:
        return replace(await real(requests, stream), last_sequence=4)

    monkeypatch.setattr(reader_module, "CHECK_EVERY_S", 0.1)
    monkeypatch.setattr(reader_module, "LOOK_EVERY_S", 0.05)
    await publish_states(bus, range(10))
    async with bus.consume("FEED", STATES, start="new") as reader:
        monkeypatch.setattr(Requests, "stream_state", restored)
        with pytest.raises(SequenceRegressError, match="FEED ends at 4, but had reached 10"):
            await anext(reader)
