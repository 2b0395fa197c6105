"""Following the newest message of a subject: heard once it is stored, and found again after what was lost."""

from typing import Any

import msgspec
import pytest
from tests.support import examples
from tests.support.brokers import ConfiguredServer, connected, until

from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import encode
from dynamix.schemas.messages import Action
from dynamix.schemas.streams import ACTIONS

SUBJECT = subjects.of("action", examples.JOB)


def action(window: int) -> Action:
    return examples.action(window, hash=bytes([window]) * 32)


async def test_the_newest_comes_first_and_each_further_one_as_it_is_stored(bus: Bus) -> None:
    await bus.publish(action(0))
    await bus.publish(action(1))
    async with bus.follow(ACTIONS.name, SUBJECT) as messages:
        assert (await anext(messages)).payload == encode(action(1))
        for window in (2, 3, 4):
            await bus.publish(action(window))
            found = await anext(messages)
            assert (found.subject, found.payload) == (SUBJECT, encode(action(window)))


async def test_an_answer_of_the_broker_that_a_client_has_sent_there_is_left_out(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """A stored message of the client's own job, on a subject where another job hears actions or rewards."""
    other = msgspec.structs.replace(action(9), job="other-1")
    await bus.publish(other)
    get, rewards = f"$JS.API.DIRECT.GET.ACTIONS.{subjects.subject_of(other)}", "dynamix.v1.live.a.b"
    async with bus.follow(ACTIONS.name, SUBJECT) as messages, bus.subscribe(rewards) as heard:
        await bus._connection.send(get, b"", subjects.announced(SUBJECT))
        await bus._connection.send(get, b"", rewards)
        await until(lambda: caplog.text.count("left out: some client lets the broker deliver there") == 2)
        await bus.publish(action(1))
        await bus._connection.send(rewards, b"live")
        assert (await anext(messages)).payload == encode(action(1))
        assert (await anext(heard)).payload == b"live"


async def test_what_was_stored_while_the_broker_was_away_is_found_after_it(server: ConfiguredServer, bus: Bus) -> None:
    async with connected(server.settings, "other") as other, bus.follow(ACTIONS.name, SUBJECT) as messages:
        await server.kill()
        await server.start()
        await other.publish(action(7))
        assert (await anext(messages)).payload == encode(action(7))


async def test_what_is_not_announced_is_found_by_looking(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamix.runtime.bus.bus.LOOK_EVERY_S", 0.05)
    config: dict[str, Any] = await bus.requests.stream_config(ACTIONS.name)
    await bus.requests.write_stream("UPDATE", {**config, "republish": None})
    async with bus.follow(ACTIONS.name, SUBJECT) as messages:
        for number in range(2):
            await bus.publish(action(number))
            assert (await anext(messages)).payload == encode(action(number))
