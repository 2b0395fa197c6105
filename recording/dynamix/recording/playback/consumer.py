"""Parts of the bus of a replayed service: consumers that deliver recorded messages, and acknowledgements."""

import asyncio
from types import TracebackType
from typing import Protocol, Self

from dynamix.recording.capture import Record
from dynamix.runtime.bus import BusMessage


class BatchSource(Protocol):
    """Origin of a consumer's messages."""

    async def next_batch(self) -> list[BusMessage]:
        """Return at least one message, or none when there are no more."""


class StoredBatch:
    """A batch source whose messages are all known."""

    def __init__(self, batch: list[BusMessage]) -> None:
        self._batch = batch

    async def next_batch(self) -> list[BusMessage]:
        """Return all messages, then none."""
        batch, self._batch = self._batch, []
        return batch


class ReplayedConsumer:
    """`async with bus.consume(...) as consumer: async for batch in consumer: ...`, as the services use it."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[BusMessage]:
        batch = await self._source.next_batch()
        if not batch:
            raise StopAsyncIteration
        return batch

    async def ack(self, message: BusMessage) -> None:
        """Do nothing: no message is delivered twice."""


def acknowledgement(sequence: int) -> asyncio.Future[int]:
    """A publish acknowledgement that has already come."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_result(sequence)
    return future


def bus_message_of(record: Record) -> BusMessage:
    """A record as a consumer delivers it."""
    return BusMessage(record.subject, record.payload, record.sequence, record.timestamp_ns, 0)
