"""Where a reader goes on: a durable consumer behind its acknowledgement, and no reader on a stream that went back."""

import pytest
from tests.support.brokers import STATE, ConfiguredServer, connected, operate, publish_states
from tests.support.reading import OTHER, STATES, numbers, read

from dynamix.runtime.bus import Bus, BusMessage, SequenceRegressError, StreamMissingError
from dynamix.runtime.bus.broker.requests import Requests
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.bus.streams import broker_consumer, failover
from dynamix.runtime.bus.streams.message import StreamState


async def test_a_durable_consumer_goes_on_behind_its_last_acknowledgement(bus: Bus) -> None:
    await publish_states(bus, range(6))
    async with bus.consume("FEED", STATES, start="all", durable="collector-a") as reader:
        found = await read(reader, 6)
        await reader.ack(found[3])
        assert await bus.stream_state("FEED")  # a request behind the acknowledgement: it has arrived
    async with bus.consume("FEED", STATES, start="all", durable="collector-a") as reader:
        assert numbers(await read(reader, 2)) == [4, 5]


async def test_a_durable_consumer_loses_and_repeats_nothing_over_a_killed_broker(
    server: ConfiguredServer, bus: Bus
) -> None:
    async with connected(server.settings, "writer") as writer:
        async with bus.consume("FEED", STATES, start="all", durable="reward") as reader:
            found: list[BusMessage] = []
            for begin in range(0, 300, 100):
                await publish_states(writer, range(begin, begin + 100))
                found += await read(reader, 50)
                await reader.ack(found[-1])
                if begin < 200:
                    await server.kill()
                    await server.start()
            while len(found) < 300:
                found += await read(reader, 1)
        assert [message.sequence for message in found] == list(range(1, 301))


async def test_a_durable_consumer_takes_other_subjects_when_asked_to(bus: Bus) -> None:
    await publish_states(bus, range(2), STATE)
    async with bus.consume("FEED", [STATE], start="all", durable="d") as reader:
        found = await read(reader, 2)
        await reader.ack(found[-1])
        assert await bus.stream_state("FEED")
    await publish_states(bus, range(2, 4), OTHER)
    async with bus.consume("FEED", [STATE, OTHER], start="all", durable="d") as reader:
        assert numbers(await read(reader, 2)) == [2, 3]


async def test_only_a_durable_consumer_acknowledges(bus: Bus) -> None:
    await publish_states(bus, range(1))
    async with bus.consume("FEED", STATES, start="all") as reader:
        (message,) = await read(reader, 1)
        with pytest.raises(ValueError, match="durable=NAME"):
            await reader.ack(message)


async def test_a_stream_that_went_back_is_an_error_not_a_silent_gap(server: ConfiguredServer, bus: Bus) -> None:
    await publish_states(bus, range(10))
    async with bus.consume("FEED", STATES, start="all") as reader:
        assert len(await read(reader, 10)) == 10
        async with connected(server.settings, "operator") as operator:
            await operate(operator, "STREAM.DELETE.FEED")
            await provision(operator)
        with pytest.raises((SequenceRegressError, StreamMissingError)):
            await read(reader, 1)


async def test_a_durable_consumer_sees_that_its_stream_went_back(server: ConfiguredServer, bus: Bus) -> None:
    await publish_states(bus, range(10))
    async with bus.consume("FEED", STATES, start="all", durable="d") as reader:
        batch = await read(reader, 10)
        await reader.ack(batch[-1])
        async with connected(server.settings, "operator") as operator:
            await operate(operator, "STREAM.DELETE.FEED")
            await provision(operator)
        await publish_states(bus, range(3))
        with pytest.raises((SequenceRegressError, StreamMissingError)):
            await read(reader, 1)


@pytest.mark.parametrize("num_replicas", [3, 1])
async def test_of_several_servers_one_that_says_less_than_was_read_is_asked_again(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, num_replicas: int
) -> None:
    """It was cut off, and answers before it has heard of the new leader; a single one has lost what it does not say."""
    real, num_asked = broker_consumer.stream_state, 0

    async def stale(requests: Requests, stream: str) -> StreamState:
        nonlocal num_asked
        num_asked += 1
        state = (await real(requests, stream))._replace(num_replicas=num_replicas)
        return state._replace(last_sequence=4) if num_asked < 3 else state

    await publish_states(bus, range(10))
    async with bus.consume("FEED", STATES, start="all", durable="d") as reader:
        found = await read(reader, 10)
        await reader.ack(found[-1])
        monkeypatch.setattr(failover, "PAUSE_S", 0.05)
        monkeypatch.setattr(broker_consumer, "stream_state", stale)
        if num_replicas > 1:
            await reader._broker_side.open()
            assert num_asked == 3
        else:
            with pytest.raises(SequenceRegressError, match="FEED ends at 4, but 10 was already read"):
                await reader._broker_side.open()
            assert num_asked == 2, "the state, and the number of copies"
