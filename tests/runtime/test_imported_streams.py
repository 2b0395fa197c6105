"""Reading from an account without streams, as services with keys do: by imports of requests, and of what was stored."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.brokers import STATE, ConfiguredServer, connected, operate, publish_states, until
from tests.support.reading import STATES, numbers, read

from dynamix.runtime.bus import Bus, BusMessage, PermissionDeniedError
from dynamix.runtime.bus.broker.login import OUTSIDE_API
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.bus.streams.durable import make_durable

SINGLE = (
    *("$JS.API.STREAM.INFO.FEED", "$JS.API.CONSUMER.INFO.FEED.d", "$JS.API.CONSUMER.RESET.FEED.d"),
    *("$JS.ACK.FEED.d.>", "$JS.ACK._.*.FEED.d.>"),
)
STREAMED = ("$JS.API.DIRECT.GET.FEED", "$JS.API.CONSUMER.MSG.NEXT.FEED.d")
STORED = "dynamix.v1.stored.>"


def local(subject: str) -> str:
    """In the account without streams, where the server answers requests to `$JS.API` itself: it has none."""
    return subject.replace("$JS.API.", OUTSIDE_API)


class TwoAccounts(ConfiguredServer):
    """One account has the streams; the other one reaches them by what it imports, and may publish nothing else."""

    def _config(self, store: Path) -> str:
        exports = [f'{{ service: "{subject}" }}' for subject in SINGLE]
        exports += [f'{{ service: "{subject}", response_type: stream }}' for subject in STREAMED]
        exports.append(f'{{ stream: "{STORED}" }}')
        imports = [
            f'{{ service: {{ account: STREAMS, subject: "{one}" }}, to: "{local(one)}" }}'
            for one in (*SINGLE, *STREAMED)
        ]
        imports.append(f'{{ stream: {{ account: STREAMS, subject: "{STORED}" }} }}')
        allowed = ", ".join(f'"{local(subject)}"' for subject in (*SINGLE, *STREAMED))
        edge = f'{{ user: edge, password: e, permissions: {{ publish: {{ allow: [{allowed}] }}, subscribe: ">" }} }}'
        head, _, _ = super()._config(store).partition("authorization {")
        return (
            f"{head}accounts {{\n"
            f"STREAMS {{ jetstream: enabled, users: [{{ user: streams, password: s }}], "
            f"exports: [{', '.join(exports)}] }}\n"
            f"EDGE {{ users: [{edge}], imports: [{', '.join(imports)}] }}\n}}\n"
        )


@pytest.fixture
async def owner() -> AsyncIterator[tuple[TwoAccounts, Bus]]:
    async with TwoAccounts() as server, connected(server.user("streams", "s")) as bus:
        await provision(bus)
        yield server, bus


@contextlib.asynccontextmanager
async def at_edge(server: TwoAccounts) -> AsyncIterator[Bus]:
    async with connected(server.user("edge", "e")) as bus:
        bus._connection.api = OUTSIDE_API
        yield bus


async def publish_empty(bus: Bus, count: int) -> None:
    """Messages of 0 bytes without headers, as any client can send them."""
    before = (await bus.stream_state("FEED")).last_sequence
    for _ in range(count):
        await bus._connection.send(STATE, b"")
    while (await bus.stream_state("FEED")).last_sequence < before + count:
        pass


@pytest.mark.parametrize("durable", [None, "d"])
async def test_empty_messages_end_no_reading(owner: tuple[TwoAccounts, Bus], durable: str | None) -> None:
    """One ends the answers to a request where it passes between accounts without a header."""
    server, streams = owner
    await make_durable(streams.requests, "d", STATES[0], start="all")
    async with at_edge(server) as bus:
        async with bus.consume("FEED", STATES, start="all", durable=durable) as reader:
            found: list[BusMessage] = []
            for begin in (0, 3):
                await publish_empty(streams, 100)
                await publish_states(streams, range(begin, begin + 3))
                found += await read(reader, 103)
            assert len(found) == 206
            assert numbers([message for message in found if message.payload]) == [0, 1, 2, 3, 4, 5]
            if durable is not None:
                await reader.ack(found[-1])
        assert bus.counters["consumer_resets"] == 0


async def test_what_is_stored_is_heard_of_in_another_account(
    owner: tuple[TwoAccounts, Bus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamix.runtime.bus.streams.reader.LOOK_EVERY_S", 60.0)
    server, streams = owner
    async with at_edge(server) as bus, bus.consume("FEED", STATES, start="new") as reader:
        for number in range(3):
            await publish_states(streams, range(number, number + 1))
            assert numbers(await read(reader, 1)) == [number]


async def test_who_may_not_make_its_consumer_says_who_can(owner: tuple[TwoAccounts, Bus]) -> None:
    server, streams = owner
    async with at_edge(server) as bus:
        with pytest.raises(PermissionDeniedError, match="`dynamix provision` makes it"):
            async with bus.consume("FEED", STATES, start="all", durable="d"):
                pass
        await make_durable(streams.requests, "d", STATES[0], start="all")
        await publish_states(streams, range(1))
        async with bus.consume("FEED", STATES, start="all", durable="d") as reader:
            assert numbers(await read(reader, 1)) == [0]


async def test_a_reader_waits_for_its_consumer_where_all_streams_are_made_again(
    owner: tuple[TwoAccounts, Bus], caplog: pytest.LogCaptureFixture
) -> None:
    server, streams = owner
    await make_durable(streams.requests, "d", STATES[0], start="all")
    async with at_edge(server) as bus, bus.consume("FEED", STATES, start="all", durable="d") as reader:
        await publish_states(streams, range(3))
        assert len(await read(reader, 3)) == 3
        await operate(streams, "STREAM.DELETE.FEED")
        await provision(streams)
        await until(lambda: "has no consumer d" in caplog.text)
        await make_durable(streams.requests, "d", STATES[0], start="all")
        await publish_states(streams, range(5, 7))
        assert numbers(await read(reader, 2)) == [5, 6]
