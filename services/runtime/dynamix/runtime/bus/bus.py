"""The bus as the services see it: one object per process that publishes, consumes and reads.

`Subscription` listens to what is not stored (`live`), `Following` to what a stream announces when it stores, without a
consumer: the newest message of one subject.
"""

import asyncio
import collections
import contextlib
import logging
import re
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Self, TypeVar

import msgspec

from dynamix.runtime.rate_limit import RateLimit
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import codec, subjects
from dynamix.schemas.messages import Action, JobProfile, Live, Message, PolicyVersion
from dynamix.schemas.subjects import BY_STRUCT, announced, covers

from .connection import BrokerConnection
from .errors import BusError, PermissionDeniedError, StaleWriterError
from .publish import Publisher
from .read import DirectReader, DurableReader, Reader, Start
from .requests import Answer, BusMessage, Requests, StreamState

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


R = TypeVar("R", DirectReader, DurableReader, Subscription, Following)


class _PurgeAnswer(Answer):
    purged: int = 0


class _AccountInfo(Answer):
    api: dict[str, Any] = msgspec.field(default_factory=dict)


class Bus:
    """One connection to the broker; make it with `Bus.connect`. It belongs to the event loop that made it.

    Attributes:
        num_handled: messages that consumers handed out, by kind.
        requests: JetStream's API; only `provision` needs it.
    """

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self.num_handled = connection.num_handled
        self.requests = Requests(connection)
        self._publisher = Publisher(connection)
        connection.is_stalled = lambda: bool(self._publisher.num_late or self.requests.num_late)
        self._intake: weakref.WeakSet[Reader | Subscription | Following] = weakref.WeakSet()
        self._intake_stopped = False

    @classmethod
    async def connect(
        cls,
        settings: BusSettings,
        *,
        name: str,
        on_closed: Callable[[str], None] | None = None,
        wait: bool = True,
        while_waiting: str = "",
    ) -> Self:
        """Connect to the broker, and reconnect for ever afterwards.

        Args:
            settings: where and as whom.
            name: shown by the broker, and part of our inbox (see `BrokerConnection.inbox`): `<service>-<instance>`.
            on_closed: called with the reason when the broker closes the connection for good; the process should end
                with a non-zero code so that its supervisor restarts it.
            wait: try the first connection for ever, too.
            while_waiting: follows the warning that there is no broker yet: what that means and how to fix it.

        Raises:
            ValueError: for a broker beyond loopback without credentials.
            PermissionDeniedError: when user or password are refused, or the user may not listen to its own inbox.
            BusError: without `wait`, when the broker cannot be reached.
        """
        connection = BrokerConnection(settings, name, on_closed, while_waiting=while_waiting)
        await connection.open(wait=wait)
        bus = cls(connection)
        try:
            await bus.requests.open()
            await bus._publisher.open()
            await bus.requests.check_inbox()
        except BaseException:
            await bus.close()
            raise
        return bus

    @property
    def counters(self) -> dict[str, int]:
        """Counts of events so far, by name; and of now: `in_flight`, `unacknowledged`, `unanswered`.

        The first is what is not acknowledged, the others what was not for 5 s; `failed_lately` counts the last minute.
        """
        return {
            **self._connection.counters,
            "in_flight": len(self._publisher.table),
            "unacknowledged": self._publisher.num_late,
            "unanswered": self.requests.num_late,
            "failed_lately": self._publisher.num_failed_lately,
        }

    @property
    def seconds_left(self) -> float | None:
        """Until our credential expires; `None` where it never does."""
        return self._connection.login.seconds_left

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now."""
        return self._connection.connected.is_set()

    def when_denied(self, callback: Callable[[str, PermissionDeniedError], None]) -> Callable[[], None]:
        """Call `callback` with each subject, in small letters, that the broker denies; returns how to end that."""
        return self._connection.when("denied", callback)

    async def publish(self, message: Message) -> int:
        """Publish and wait for the acknowledgement; returns the sequence in the stream.

        Raises:
            PublishError: when it was refused, or not acknowledged in 60 s; StreamMissingError when no stream takes it.
            PermissionDeniedError: when our user may not.
            MalformedMessageError: when the message is too large or has a number that is not finite.
        """
        return await (await self.publish_soon(message))

    async def publish_soon(self, message: Message) -> asyncio.Future[int]:
        """Publish without waiting for the acknowledgement; waits only while 2,000 messages are in flight.

        The future is the sequence, or the error as `publish` raises it; errors are logged and counted even when no
        caller awaits it. A retransmitted message may come after later ones.
        """
        payload = codec.encode(message)
        return await self.publish_bytes_soon(subjects.subject_of(message), payload, codec.message_id(message))

    async def publish_bytes(self, subject: str, payload: bytes, message_id: str) -> int:
        """Publish bytes as `publish` does a message; `message_id` is equal for equal content."""
        return await (await self.publish_bytes_soon(subject, payload, message_id))

    async def publish_bytes_soon(self, subject: str, payload: bytes, message_id: str) -> asyncio.Future[int]:
        """Publish bytes as `publish_soon` does a message."""
        return await self._publisher.publish(subject, payload, message_id)

    async def publish_next(self, message: Action | JobProfile | PolicyVersion, *, expected_last: int) -> int:
        """Publish a message if `expected_last` is still the last sequence on its subject (0: none); compare-and-set.

        An acknowledgement that was lost is no matter: the same message is acknowledged again.

        Raises:
            StaleWriterError: when another message is there.
            BusError: as `publish`.
        """
        subject, payload = subjects.subject_of(message), codec.encode(message)
        try:
            return await (await self._publisher.publish(subject, payload, codec.message_id(message), expected_last))
        except StaleWriterError:
            # a retry that comes when the broker has forgotten the first try's identity
            last = await self.last(BY_STRUCT[type(message)].carrier, subject)
            if last is not None and last.payload == payload:
                return last.sequence
            raise

    async def purge(self, stream: str, subject: str, *, keep: int = 0) -> int:
        """Remove all messages of a subject but the newest ones to keep; how many. Only an operator's user may."""
        which = {"filter": subject, "keep": keep}
        return (await self.requests.ask(f"STREAM.PURGE.{stream}", which, _PurgeAnswer)).purged

    async def publish_live(self, message: Live) -> None:
        """Publish on core NATS, unstored; while disconnected it is dropped and counted."""
        if not await self._connection.send(subjects.subject_of(message), codec.encode(message)):
            self._connection.counters["dropped_live"] += 1

    async def last(self, stream: str, subject: str) -> BusMessage | None:
        """The last stored message of a subject, `None` when there is none. Raises as `stream_state`."""
        return await self.requests.find_message(stream, {"last_by_subj": subject})

    async def newest(self, stream: str, subject: str) -> BusMessage | None:
        """The last stored message of a subject, from any replica, which may lag; the right can be for one subject."""
        return await self.requests.newest_message(stream, subject)

    async def first(self, stream: str, subject: str, *, start: int = 1) -> BusMessage | None:
        """The first stored message of a subject or filter at or after a sequence. Otherwise as `last`."""
        return await self.requests.find_message(stream, {"seq": start, "next_by_subj": subject})

    async def stream_state(self, stream: str) -> StreamState:
        """The state of a stream.

        Raises:
            StreamMissingError: when there is no such stream.
            BusError: when the broker does not answer in 60 s.
        """
        return await self.requests.stream_state(stream)

    async def count_requests(self) -> int:
        """Requests of all users that JetStream's API has had since the broker started. Raises as `stream_state`.

        Requests for messages (MSG.NEXT, DIRECT.GET) are none of the API.
        """
        num_requests: int = (await self.requests.ask("INFO", None, _AccountInfo)).api["total"]
        return num_requests

    def consume(
        self,
        stream: str,
        subjects: Sequence[str],
        *,
        start: Start,
        durable: str | None = None,
        max_batch: int = 512,
    ) -> Reader:
        """Read the messages of some subjects: `async with bus.consume(...) as c: async for batch in c: ...`.

        A batch is a list of at least one message: all that are queued, at most `max_batch`, in stream order, each
        sequence once. Broker restarts and lost connections are bridged without loss; a stream that is made again is
        read from its beginning. Of several subjects those count that are read together: the broker sends all that
        their common filter takes. With `durable` the broker keeps what was acknowledged, by a consumer of this name;
        `start` counts only when it does not know it yet.
        """
        place = self._connection, self.requests, stream, subjects
        if durable is None:
            return self._admit(DirectReader(*place, start=start, max_batch=max_batch))
        return self._admit(DurableReader(*place, durable=durable, start=start, max_batch=max_batch))

    async def stored(
        self, stream: str, subjects: Sequence[str], start: Start = "all"
    ) -> AsyncGenerator[BusMessage, None]:
        """The messages of some subjects that are stored now."""
        if not [subject for subject in subjects if await self.last(stream, subject) is not None]:
            return  # the broker would wait for the first one
        async with self.consume(stream, subjects, start=start) as consumer:
            async for batch in consumer:
                for message in batch:
                    yield message
                if batch[-1].num_pending == 0:
                    break

    def follow(self, stream: str, subject: str) -> Following:
        """Follow the newest message of one subject of a stream that announces; nothing is kept for us at the broker.

        Only the newest counts: what was stored while we were away is not read one by one.
        """
        return self._admit(Following(self._connection, self.requests, stream, subject))

    def subscribe(self, subject: str) -> Subscription:
        """Listen on core NATS, where nothing is stored: for `live`. A slow reader loses the oldest, counted."""
        return self._admit(Subscription(self._connection, subject, MAX_UNREAD))

    def stop_intake(self) -> None:
        """End every loop over a consumer or a subscription, also ones that begin later; publishing still works."""
        self._intake_stopped = True
        for reader in self._intake:
            reader.end()

    async def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything published is acknowledged or failed; False when that takes longer."""
        return await self._publisher.flush(timeout_s)

    async def drain(self, timeout_s: float = 10.0) -> None:
        """Stop intake, wait until what is in flight is acknowledged, close. Works while reconnecting, too."""
        self.stop_intake()
        await self._publisher.flush(timeout_s)
        await self.close()

    async def close(self) -> None:
        """Close at once; publishes still in flight fail with ConnectionClosedError."""
        self.stop_intake()
        self.requests.close()
        await self._publisher.close()
        await self._connection.close()

    def _admit(self, reader: R) -> R:
        self._intake.add(reader)
        if self._intake_stopped:
            reader.end()
        return reader
