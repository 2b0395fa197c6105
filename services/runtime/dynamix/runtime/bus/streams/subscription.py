"""A core NATS subscription: bounded; a slow reader loses the oldest messages, counted."""

import asyncio
import collections
import logging
from typing import Self

from nats.aio.subscription import Subscription as NatsSubscription

from dynamix.runtime.bus.broker.connection import BrokerConnection
from dynamix.runtime.bus.broker.errors import PermissionDeniedError
from dynamix.runtime.rate_limit import RateLimit
from dynamix.schemas.subjects import covers

from .message import BusMessage

logger = logging.getLogger(__name__)

CAPACITY = 1024


def warn_of_stranger(limit: RateLimit, subject: bytes, heard_on: str) -> None:
    """Say that a message came which is not what is sent here: some client had the broker send it."""
    if limit.allow("stranger"):
        what = "left out: some client lets the broker deliver there"
        logger.warning("a message of %s came on %s, %s", subject.decode(errors="replace"), heard_on, what)


class Subscription:
    """`async with bus.subscribe(subject) as messages: async for message in messages: ...`.

    Attributes:
        num_dropped: messages lost because the reader was slow; nats-py itself would drop the newest.
    """

    def __init__(self, connection: BrokerConnection, counters: dict[str, int], subject: str) -> None:
        self._connection = connection
        self._counters = counters
        self._subject = subject
        self._messages: collections.deque[BusMessage] = collections.deque(maxlen=CAPACITY)
        self._arrived = asyncio.Event()
        self._limit = RateLimit(per_s=1.0)
        self._ended = False
        self._denial: PermissionDeniedError | None = None
        self._subscription: NatsSubscription | None = None
        self.num_dropped = 0

    async def __aenter__(self) -> Self:
        self._forget_denied = self._connection.when_denied(self._on_denied)
        self._forget_closed = self._connection.when_closed(self.end)
        self._subscription = await self._connection.subscribe(self._subject, self._on_message)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()
        self._forget_denied()
        self._forget_closed()
        if self._subscription is not None:
            await self._connection.unsubscribe(self._subscription)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BusMessage:
        while not self._messages:
            if self._denial is not None:
                raise self._denial
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._messages.popleft()

    def end(self) -> None:
        """Let the reader's loop end once it has read what is queued."""
        self._ended = True
        self._arrived.set()

    def _on_message(self, subject: bytes, _reply: bytes, payload: bytes, headers: bytes | None) -> None:
        is_stored = b"\r\nnats-stream:" in (headers or b"").lower()
        if is_stored or not covers(self._subject, subject.decode(errors="replace")):
            warn_of_stranger(self._limit, subject, self._subject)
            return
        if len(self._messages) == CAPACITY:
            self.num_dropped += 1
            self._counters["dropped_received"] += 1
            if self._limit.allow("slow"):
                logger.warning("too slow for %s: %d messages dropped so far", self._subject, self.num_dropped)
        self._messages.append(BusMessage(subject.decode(), payload, 0, 0, 0))
        self._arrived.set()

    def _on_denied(self, subject: str, denial: PermissionDeniedError) -> None:
        if subject == self._subject.lower():
            self._denial = denial
            self._arrived.set()
