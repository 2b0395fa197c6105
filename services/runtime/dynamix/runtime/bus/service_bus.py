"""What a service uses of the bus: the part that a replay of captured messages provides, too."""

import asyncio
from collections.abc import Sequence
from typing import Protocol, Self

from dynamix.schemas.messages import Message

from .streams.message import BusMessage
from .streams.reader import Start
from .streams.statistics import StatisticsByKind


class BatchConsumer(Protocol):
    """`async with bus.consume(...) as consumer: async for batch in consumer: ...`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> list[BusMessage]: ...

    async def ack(self, message: BusMessage) -> None:
        """Acknowledge this and every earlier message."""


class ServiceBus(Protocol):
    """What every service needs: consume messages, publish messages, set aside what it cannot use."""

    statistics: StatisticsByKind

    def consume(
        self,
        stream: str,
        subjects: Sequence[str],
        *,
        start: Start,
        durable: str | None = None,
        max_batch: int = 512,
    ) -> BatchConsumer:
        """Read the messages of some subjects in batches, in stream order."""

    async def publish(self, message: Message) -> int:
        """Publish and wait for the acknowledgement; returns the sequence in the stream."""

    async def publish_bytes_soon(self, subject: str, payload: bytes, message_id: str) -> asyncio.Future[int]:
        """Publish without waiting for the acknowledgement."""
