"""Reading a stream: in order, each sequence once, whatever happens to the connection, the broker and the consumer."""

import asyncio
import time
from typing import Any

import pytest
from tests.support.brokers import (
    STATE,
    ConfiguredServer,
    connected,
    operate,
    publish_states,
    publish_unstored,
    until,
)
from tests.support.reading import OTHER, STATES, numbers, read

from dynamix.runtime.bus import Bus, BusMessage, Start
from dynamix.runtime.bus import read as reader_module
from dynamix.runtime.bus.read import DirectReader, DurableReader


async def test_all_messages_come_in_stream_order_with_what_the_broker_says_of_them(bus: Bus) -> None:
    before_ns = time.time_ns()
    await publish_states(bus, range(1500))
    async with bus.consume("FEED", STATES, start="all") as reader:
        found = await read(reader, 1500)
    assert numbers(found) == list(range(1500))
    assert [message.sequence for message in found] == list(range(1, 1501))
    assert [message.num_pending for message in found] == list(range(1499, -1, -1))
    assert all(before_ns <= message.timestamp_ns <= time.time_ns() for message in found)
    assert {message.subject for message in found} == {STATE}


@pytest.mark.parametrize(("start", "expected"), [("all", [0, 1, 2, 3]), (3, [2, 3]), ("last_per_subject", [1, 3])])
async def test_a_consumer_starts_where_it_is_told(bus: Bus, start: Start, expected: list[int]) -> None:
    await publish_states(bus, range(2), STATE)
    await publish_states(bus, range(2, 4), OTHER)
    async with bus.consume("FEED", STATES, start=start) as reader:
        assert numbers(await read(reader, len(expected))) == expected


async def test_new_means_from_the_opening_on_even_if_the_broker_dies_before_the_first_message(
    server: ConfiguredServer, bus: Bus
) -> None:
    await publish_states(bus, range(5))
    async with connected(server.settings, "writer") as writer, bus.consume("FEED", STATES, start="new") as reader:
        await server.kill()
        await until(lambda: not writer.is_connected)
        await server.start()
        await publish_states(writer, range(5, 8))
        assert numbers(await read(reader, 3)) == [5, 6, 7]


@pytest.mark.parametrize("durable", [None, "d"])
async def test_nothing_is_lost_or_repeated_over_two_killed_brokers(
    server: ConfiguredServer, bus: Bus, durable: str | None
) -> None:
    found: list[BusMessage] = []
    async with (
        connected(server.settings, "writer") as writer,
        bus.consume("FEED", STATES, start="all", durable=durable) as reader,
    ):
        for begin in range(0, 600, 200):
            await publish_states(writer, range(begin, begin + 100))
            found += await read(reader, 50)
            if durable is not None:
                await reader.ack(found[-1])
            if begin < 400:
                await server.kill()
                await server.start()
            await publish_states(writer, range(begin + 100, begin + 200))
        while len(found) < 600:
            found += await read(reader, 1)
    assert [message.sequence for message in found] == list(range(1, 601))
    assert sorted(numbers(found)) == list(range(600))
    assert bus.counters["reconnects"] >= 2


@pytest.mark.parametrize("durable", [None, "d"])
async def test_a_lost_message_is_detected_and_read_again(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, durable: str | None
) -> None:
    await publish_states(bus, range(20))
    kind, num_seen = (DirectReader if durable is None else DurableReader), 0
    take = kind._on_message

    def losing_the_fifth(self: Any, subject: bytes, *rest: Any) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen != 5:
            take(self, subject, *rest)

    monkeypatch.setattr(kind, "_on_message", losing_the_fifth)
    async with bus.consume("FEED", STATES, start="all", durable=durable) as reader:
        found = await read(reader, 20)
    assert numbers(found) == list(range(20))
    assert bus.counters["consumer_resets"] >= 1


async def test_a_deleted_durable_consumer_is_made_again(server: ConfiguredServer, bus: Bus) -> None:
    async with bus.consume("FEED", STATES, start="all", durable="d") as reader:
        await publish_states(bus, range(3))
        assert numbers(await read(reader, 3)) == [0, 1, 2]
        async with connected(server.settings, "operator") as operator:
            await operate(operator, "CONSUMER.DELETE.FEED.d")
        await publish_states(bus, range(3, 6))
        assert numbers(await read(reader, 3)) == [3, 4, 5]


@pytest.mark.parametrize("durable", [None, "d"])
async def test_a_silent_broker_is_noticed(
    server: ConfiguredServer, bus: Bus, monkeypatch: pytest.MonkeyPatch, durable: str | None
) -> None:
    monkeypatch.setattr(reader_module, "SILENT_S", 0.1)
    monkeypatch.setattr(reader_module, "EXPIRES_S", 0.1)
    async with bus.consume("FEED", STATES, start="all", durable=durable) as reader:
        server.pause()
        await until(lambda: bus.counters["consumer_resets"])
        server.go_on()
        await publish_states(bus, range(3))
        assert numbers(await read(reader, 3)) == [0, 1, 2]


@pytest.mark.parametrize("durable", [None, "d"])
async def test_a_quiet_stream_is_not_taken_for_a_silent_broker(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, durable: str | None
) -> None:
    monkeypatch.setattr(reader_module, "SILENT_S", 0.3)
    monkeypatch.setattr(reader_module, "EXPIRES_S", 0.2)
    async with bus.consume("FEED", STATES, start="all", durable=durable) as reader:
        await asyncio.sleep(1.0)  # several requests that expire
        await publish_states(bus, range(2))
        assert numbers(await read(reader, 2)) == [0, 1]
    assert bus.counters["consumer_resets"] == 0


async def test_what_is_stored_is_heard_of_at_once_and_otherwise_looked_for(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, look_every_s in enumerate((3600.0, 0.1)):
        monkeypatch.setattr(reader_module, "LOOK_EVERY_S", look_every_s)
        async with bus.consume("FEED", STATES, start="new") as reader:
            await asyncio.sleep(0.3)  # now the reader waits
            await publish_states(bus, range(number, number + 1))
            assert numbers(await anext(reader)) == [number]
        monkeypatch.setattr(DirectReader, "_on_hint", lambda *_: None)


async def test_a_reader_at_a_server_whose_copy_lags_asks_the_streams_leader(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a partition a copy may lag for minutes: it finds nothing that follows, though more is announced."""

    async def finds_nothing(*_: object) -> bytes:
        return b"NATS/1.0 404 No Results\r\n\r\n"

    monkeypatch.setattr(reader_module, "LAG_S", 0.05)
    async with bus.consume("FEED", STATES, start="all") as reader:
        await publish_states(bus, range(1))
        assert numbers(await read(reader, 1)) == [0]
        with monkeypatch.context() as lagging:
            lagging.setattr(reader, "_exchange", finds_nothing)
            await publish_states(bus, range(1, 6))
            assert numbers(await read(reader, 5)) == [1, 2, 3, 4, 5]
        await publish_states(bus, range(6, 9))
        assert numbers(await read(reader, 3)) == [6, 7, 8]
    assert bus.counters["consumer_resets"] == 0


async def test_what_a_sender_writes_in_headers_of_the_brokers_is_not_believed(bus: Bus) -> None:
    forged = {"Nats-Sequence": "77", "Nats-Subject": "dynamix.v1.state.victim.a", "Nats-Stream": "FEED"}
    await bus._connection.send(STATE, b"0", headers=forged)
    async with bus.consume("FEED", STATES, start="all") as reader:
        (message,) = await read(reader, 1)
    assert (message.subject, message.sequence) == (STATE, 1)


@pytest.mark.parametrize("durable", [None, "d"])
async def test_a_slow_reader_is_sent_no_more_than_it_has_room_for(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, durable: str | None
) -> None:
    monkeypatch.setattr(reader_module, "MIN_CAPACITY", 1024)
    await publish_states(bus, range(4000))  # FEED keeps 4,096 of a subject
    async with bus.consume("FEED", STATES, start="all", max_batch=16, durable=durable) as reader:
        await until(lambda: len(reader._buffer) == 1024)
        await asyncio.sleep(0.1)
        assert len(reader._buffer) == 1024
        assert numbers(await read(reader, 4000)) == list(range(4000))


async def test_stopping_the_intake_ends_the_loops_over_consumers_and_subscriptions(bus: Bus) -> None:
    async def listen() -> str:
        async with bus.subscribe("dynamix.v1.live.>") as messages:
            async for _ in messages:
                pass
        return "subscription ended"

    async def consume() -> str:
        async with bus.consume("FEED", STATES, start="all") as reader:
            async for _ in reader:
                pass
        return "consumer ended"

    loops = [asyncio.create_task(listen()), asyncio.create_task(consume())]
    await asyncio.sleep(0.05)
    bus.stop_intake()
    assert await asyncio.gather(*loops) == ["subscription ended", "consumer ended"]


async def test_a_slow_core_reader_loses_the_oldest_messages_counted(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    subject = "dynamix.v1.live.test.a"
    async with bus.subscribe(subject) as messages:
        for number in range(3000):
            await publish_unstored(bus, subject, b"%d" % number)
        await until(lambda: bus.counters["dropped_received"] == 3000 - 1024)
        assert numbers([await anext(messages) for _ in range(1024)]) == list(range(1976, 3000))
    assert sum("too slow" in record.message for record in caplog.records) == 1
