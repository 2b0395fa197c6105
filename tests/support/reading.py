"""Reads messages from a stream, as many as a test waits for."""

from collections.abc import Sequence

from dynamix.runtime.bus import BusMessage, Reader

OTHER = "dynamix.v1.state.job.1.node-b"
STATES = ["dynamix.v1.state.>"]


async def read(reader: Reader, count: int) -> list[BusMessage]:
    """The first messages, at least `count` of them."""
    found: list[BusMessage] = []
    async for batch in reader:
        found += batch
        if len(found) >= count:
            return found
    raise AssertionError("the consumer ended")


def numbers(messages: Sequence[BusMessage]) -> list[int]:
    return [int(message.payload) for message in messages]
