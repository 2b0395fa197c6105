"""Waiting for room in a stream that refuses."""

import asyncio

import msgspec
import structlog
from tests.support import examples
from tests.support.brokers import until

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.service import Context
from dynamix.schemas.streams import FEED


class NoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing to set."""


def context_on(bus: Bus) -> Context[NoSettings]:
    return Context(
        service="collector",
        instance="one",
        node="node-a",
        bus=bus,
        settings=NoSettings(),
        stop=asyncio.Event(),
        log=structlog.stdlib.get_logger(),
    )


async def waiting(context: Context[NoSettings]) -> asyncio.Task[bool]:
    """A publisher that has been refused for want of room."""
    full = msgspec.structs.replace(FEED, max_bytes=100, discard="new")
    await provision(context.bus, [full])
    task = asyncio.create_task(context.publish_when_room(examples.state()))
    await until(lambda: context.counters.get("waits_for_room"))
    return task


async def test_waiting_messages_are_stored_once_there_is_room(bus: Bus) -> None:
    context = context_on(bus)
    task = await waiting(context)
    await provision(bus, [FEED])
    assert await task is True
    assert (await bus.stream_state(FEED.name)).num_messages == 1


async def test_a_service_that_is_to_stop_waits_no_longer(bus: Bus) -> None:
    context = context_on(bus)
    task = await waiting(context)
    context.stop.set()
    assert await task is False
    assert (await bus.stream_state(FEED.name)).num_messages == 0
