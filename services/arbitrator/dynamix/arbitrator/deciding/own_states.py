"""The states of one job that FEED holds."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

from dynamix.runtime.bus import BusMessage, ServiceBus
from dynamix.schemas import subjects
from dynamix.schemas.streams import FEED

from .action_store import ActionStore


class StateStore(ServiceBus, ActionStore, Protocol):
    """The part of the bus that it uses."""


async def own_states(bus: StateStore, job: str, after: int, until: int) -> AsyncGenerator[BusMessage, None]:
    """The states of a job behind a sequence up to another; those of one that ended long ago cost nothing.

    Of several servers one that was cut off may answer, which does not know the last of them.
    """
    wanted = subjects.of("state", job, subjects.ANY)
    newest = await bus.last(FEED.name, wanted)
    if newest is None or newest.sequence <= after:
        return
    async with bus.consume(FEED.name, [wanted], start=after + 1) as consumer:
        async for batch in consumer:
            for message in batch:
                if message.sequence > until:
                    return
                yield message
                await asyncio.sleep(0)  # a long way to catch up must not delay the states of others
            if batch[-1].sequence >= min(until, newest.sequence):
                return
