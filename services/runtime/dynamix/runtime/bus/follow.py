"""Listening: core NATS subjects, and what streams announce when they store, without a consumer.

`Subscription` is for what is not stored (`live`), `Following` for the newest message of one subject.
"""

import asyncio
import collections
import contextlib
import logging
import re
from typing import Self

from dynamix.runtime.rate_limit import RateLimit
from dynamix.schemas.subjects import announced, covers

from .connection import BrokerConnection
from .errors import BusError, PermissionDeniedError
from .requests import BusMessage, Requests

logger = logging.getLogger(__name__)

_STREAM = re.compile(rb"\r\nNats-Stream: ?([^\r]*)", re.IGNORECASE)
_SUBJECT = re.compile(rb"\r\nNats-Subject: ?([^\r]*)", re.IGNORECASE)

MAX_UNREAD = 1024
MAX_UNREAD_FOLLOWED = 64
LOOK_EVERY_S = 10.0
"""Interval of requests for the newest message: published messages can be lost on the way."""


class _Listener:
    """Messages of one subject, in a bounded queue: a slow reader loses the oldest."""

    def __init__(self, connection: BrokerConnection, heard_on: str, max_unread: int) -> None:
        self._connection = connection
        self._heard_on = heard_on
        self._messages: collections.deque[BusMessage] = collections.deque(maxlen=max_unread)
        self._arrived = asyncio.Event()
        self._limit = RateLimit(per_s=1.0)
        self._ended = False
        self._error: BusError | None = None
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._stack.callback(self._connection.when("denied", self._on_denied))
        self._stack.callback(self._connection.when("closed", self.end))
        subscription = await self._connection.subscribe(self._heard_on, self._on_message)
        self._stack.push_async_callback(self._connection.unsubscribe, subscription)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()
        await self._stack.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BusMessage:
        """The next message. Raises BusError when our user may not listen, or a look-up fails."""
        while self._error is None and not self._messages:
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        if self._error is not None:  # before what is queued: following again finds the newest
            raise self._error
        return self._messages.popleft()

    def end(self) -> None:
        """End the reader's loop once it has read what is queued."""
        self._ended = True
        self._arrived.set()

    def _on_message(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        raise NotImplementedError

    def _queue(self, message: BusMessage) -> None:
        self._messages.append(message)
        self._arrived.set()

    def _warn_of_stranger(self, subject: bytes) -> None:
        """Say that a message came which is not what is sent here: some client had the broker send it."""
        if self._limit.allow("stranger"):
            what = "left out: some client lets the broker deliver there"
            logger.warning("a message of %s came on %s, %s", subject.decode(errors="replace"), self._heard_on, what)

    def _on_denied(self, subject: str, denial: PermissionDeniedError) -> None:
        if subject == self._heard_on.lower():
            self._fail(denial)

    def _fail(self, error: BusError) -> None:
        self._error = error
        self._arrived.set()


class Subscription(_Listener):
    """`async with bus.subscribe(subject) as messages: async for message in messages: ...`, for core NATS."""

    def _on_message(self, subject: bytes, _reply: bytes, payload: bytes, headers: bytes | None) -> None:
        is_stored = b"\r\nnats-stream:" in (headers or b"").lower()
        if is_stored or not covers(self._heard_on, subject.decode(errors="replace")):
            self._warn_of_stranger(subject)
            return
        if len(self._messages) == self._messages.maxlen:  # nats-py itself would drop the newest
            self._connection.counters["dropped_received"] += 1
            if self._limit.allow("slow"):
                logger.warning("too slow for %s: the oldest messages are dropped", self._heard_on)
        self._queue(BusMessage(subject.decode(), payload, 0, 0, 0))


class Following(_Listener):
    """`async with bus.follow(stream, subject) as messages: async for message in messages: ...`.

    The stream announces what it stores (`Stream.announces`); after each reconnection, and every `LOOK_EVERY_S`, the
    newest message is looked up. Each comes once, but for an old one that a replica which lags brings again.
    """

    def __init__(self, connection: BrokerConnection, requests: Requests, stream: str, subject: str) -> None:
        super().__init__(connection, announced(subject), MAX_UNREAD_FOLLOWED)
        self._requests = requests
        self._stream = stream
        self._subject = subject
        self._newest = b""
        self._look_now = asyncio.Event()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._stack.callback(self._connection.when("reconnected", self._look_now.set))
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        await super().__aexit__()

    def _on_message(self, subject: bytes, _reply: bytes, payload: bytes, headers: bytes | None) -> None:
        """Accept only messages of the stream: a client can have an answer of the broker sent here."""
        stream, stored = _STREAM.findall(headers or b""), _SUBJECT.findall(headers or b"")
        if (subject, stream, stored) != (self._heard_on.encode(), [self._stream.encode()], [self._subject.encode()]):
            self._warn_of_stranger(b", ".join(stored) or subject)
            return
        self._take(payload)

    def _take(self, payload: bytes) -> None:
        if payload != self._newest:
            self._newest = payload
            self._queue(BusMessage(self._subject, payload, 0, 0, 0))

    async def _look(self) -> None:
        """Look at once, after each reconnection, and every `LOOK_EVERY_S`."""
        while True:
            self._look_now.clear()
            try:
                found = await self._requests.newest_message(self._stream, self._subject)
            except BusError as error:
                self._fail(error)
                return
            if found is not None:
                self._take(found.payload)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._look_now.wait()
