"""Waiting for room in a stream that refuses."""

import asyncio

import msgspec
import pytest
import structlog
from tests.support import examples
from tests.support.brokers import until

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.service import Context
from dynamix.schemas.streams import FEED


class NoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing to set."""


@pytest.mark.parametrize("stops", [False, True])
async def test_a_refused_message_waits_until_there_is_room_or_the_service_stops(bus: Bus, stops: bool) -> None:
    context = Context(
        *("collector", "one", "node-a", bus, NoSettings(), asyncio.Event(), structlog.stdlib.get_logger())
    )
    await provision(bus, [msgspec.structs.replace(FEED, max_bytes=100, discard="new")])
    task = asyncio.create_task(context.publish_when_room(examples.state()))
    await until(lambda: context.counters.get("waits_for_room"))
    if stops:
        context.stop.set()
    else:
        await provision(bus, [FEED])
    assert await task is not stops
    assert (await bus.stream_state(FEED.name)).num_messages == (0 if stops else 1)
