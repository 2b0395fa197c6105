"""Publishing: acknowledged once, whatever is lost on the way; and the compare-and-set of actions."""

import asyncio
import itertools
from typing import Any

import pytest
from tests.support import examples
from tests.support.brokers import STATE, ConfiguredServer, connected, until
from tests.support.reading import read

from dynamix.runtime.bus import Bus, ConnectionClosedError, PublishError, StaleWriterError, StreamMissingError, publish
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.bus.publish import Publisher
from dynamix.schemas import chain, codec, subjects
from dynamix.schemas.messages import Live


async def test_an_identity_is_signed_where_one_user_sends_such_messages_and_read_without(
    server: ConfiguredServer, bus: Bus
) -> None:
    """The signature is the same after a restart, and in another process of the same user."""
    state, reward = examples.state(), examples.reward("node-a", (0, 1))
    wanted = [subjects.all_of("state"), subjects.all_of("reward")]
    async with bus.consume("FEED", wanted, start="all") as consumer:
        await bus.publish(state)
        await bus.publish(reward)
        async with connected(server.settings) as again:
            await again.publish(state)
            assert again.counters["duplicates"] == 1
        found = await read(consumer, 2)
    assert [message.message_id for message in found] == [codec.message_id(state), codec.message_id(reward)]
    assert [b"#" in message.headers for message in found] == [True, False]


async def test_messages_whose_acknowledgements_are_lost_are_retransmitted_and_stored_once(
    server: ConfiguredServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are sent again when the connection is made again; the broker knows by its store which of them it has."""
    monkeypatch.setattr(publish, "ACK_TIMEOUT_S", 60.0)  # no retry for want of an answer
    take, num_lost, is_losing = Publisher._on_ack, 0, False

    def lose(self: Publisher, *answer: Any) -> None:
        nonlocal num_lost
        if is_losing:
            num_lost += 1
        else:
            take(self, *answer)

    monkeypatch.setattr(Publisher, "_on_ack", lose)
    async with connected(server.settings) as bus:
        await provision(bus)
        is_losing = True
        futures = [await bus.publish_bytes_soon(STATE, b"%d" % number, f"m{number}") for number in range(500)]
        await until(lambda: num_lost > 10)
        await server.kill()
        is_losing = False
        await server.start()
        async with asyncio.timeout(20):
            assert await asyncio.gather(*futures) == list(range(1, 501))
        assert (await bus.stream_state("FEED")).num_messages == 500
        assert bus.counters["duplicates"] >= 1
        assert bus.counters["in_flight"] == 0


async def test_an_acknowledgement_that_never_comes_is_an_error_and_gives_its_slot_back(
    server: ConfiguredServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "BUDGET_S", 0.3)
    await server.kill()
    with pytest.raises(PublishError, match=r"no acknowledgement in 0\.3 s"):
        await bus.publish(examples.state())
    assert bus.counters["in_flight"] == 0
    assert bus.counters["publish_errors"] == 1


async def test_a_full_table_makes_publishers_wait_and_a_restarted_broker_empties_it(
    server: ConfiguredServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "MAX_IN_FLIGHT", 10)
    monkeypatch.setattr(publish, "RESUME_AT", 7)
    await server.kill()
    for number in range(10):
        await bus.publish_bytes_soon(STATE, b"", f"m{number}")
    eleventh = asyncio.create_task(bus.publish_bytes(STATE, b"", "m10"))
    await asyncio.sleep(0)
    assert bus.counters["in_flight"] == 10
    await server.start()
    assert await eleventh == 11
    assert await bus.flush()


async def test_a_message_that_fits_only_without_its_headers_is_refused_and_the_connection_lives(bus: Bus) -> None:
    with pytest.raises(ValueError, match="over the broker's limit of 1048576"):
        await bus.publish_bytes(STATE, bytes(1_048_576 - 10), "large")
    assert await bus.publish(examples.state()) == 1
    assert bus.counters["reconnects"] == 0


@pytest.mark.parametrize("subject", ["", "a b", "a..b", "a.*", "a.>", "a\r\nPUB b 0\r\n", ".a", "a."])
async def test_a_subject_that_is_none_is_refused(bus: Bus, subject: str) -> None:
    with pytest.raises(ValueError, match="no subject to publish on"):
        await bus.publish_bytes(subject, b"", "m")
    assert bus.counters["in_flight"] == 0


async def test_a_subject_that_no_stream_takes_is_named(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "BUDGET_S", 0.3)
    with pytest.raises(StreamMissingError, match="no stream takes elsewhere: run `dynamix provision`"):
        await bus.publish_bytes("elsewhere", b"", "m")


def _refuse(bus: Bus, error: str) -> bytes:
    """Let the one message under way be refused; returns its token."""
    (token,) = bus._publisher.table
    bus._publisher._on_ack(bus._publisher._prefix.encode() + token, b"", f'{{"error": {error}}}'.encode(), None)
    return token


async def test_a_broker_that_cannot_store_now_is_asked_again(server: ConfiguredServer, bus: Bus) -> None:
    """A flood of another client refuses requests for a moment; a busy cluster refuses the copy of a message."""
    server.pause()
    future = await bus.publish_soon(examples.state())
    token = _refuse(bus, '{"code": 429, "err_code": 10167, "description": "too many requests"}')
    assert not future.done()
    assert bus._publisher.table[token].due == 0.0, "as soon as a place may be free, not after the doubled waits"
    assert bus.counters["too_many_requests"] == 1
    _refuse(bus, '{"code": 409, "err_code": 10158, "description": "duplicate message id is in process"}')
    assert not future.done()
    server.go_on()
    assert await future == 1


async def test_drain_works_while_reconnecting_and_fails_what_was_not_acknowledged(
    server: ConfiguredServer, bus: Bus
) -> None:
    await server.kill()
    await until(lambda: not bus.is_connected)
    future = await bus.publish_soon(examples.state())
    await bus.drain(timeout_s=0.1)
    with pytest.raises(ConnectionClosedError):
        await future
    with pytest.raises(ConnectionClosedError):
        await bus.publish(examples.state())


async def test_core_messages_are_dropped_and_counted_while_there_is_no_broker(
    server: ConfiguredServer, bus: Bus
) -> None:
    await server.kill()
    await until(lambda: not bus.is_connected)
    for _ in range(3):
        await bus.publish_live(Live(service="test", instance="a", uptime_s=1.0))
    assert bus.counters["dropped_live"] == 3


async def test_the_same_action_again_is_a_success_not_a_stale_writer(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    action = chain.seal(examples.action(0), b"")
    sequence = await bus.publish_next(action, expected_last=0)
    assert await bus.publish_next(action, expected_last=0) == sequence
    monkeypatch.setattr(codec, "message_id", lambda _: "forgotten")  # as if the window of duplicates had passed
    assert await bus.publish_next(action, expected_last=0) == sequence
    assert (await bus.stream_state("ACTIONS")).num_messages == 1


async def test_of_racing_writers_exactly_one_writes_each_action(server: ConfiguredServer, bus: Bus) -> None:
    async def write(writer: int, other: Bus) -> list[int]:
        won, last = [], 0
        while len(won) < 5:
            action = chain.seal(examples.action(last, policy=f"writer-{writer}"), b"")
            try:
                last = await other.publish_next(action, expected_last=last)
                won.append(last)
            except StaleWriterError:
                newest = await other.last("ACTIONS", subjects.subject_of(action))
                last = 0 if newest is None else newest.sequence
        return won

    async with connected(server.settings, "one") as one, connected(server.settings, "two") as two:
        won = await asyncio.gather(write(0, bus), write(1, one), write(2, two))
    assert sorted(itertools.chain(*won)) == list(range(1, 16))
