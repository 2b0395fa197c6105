"""The bus as the services see it: one object per process that publishes, consumes and reads."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Self, TypeVar

import msgspec

from dynamix.runtime.settings import BusSettings
from dynamix.schemas import codec, subjects
from dynamix.schemas.messages import Action, JobProfile, Live, Message, PolicyVersion
from dynamix.schemas.subjects import BY_STRUCT

from .connection import BrokerConnection
from .errors import PermissionDeniedError, StaleWriterError
from .follow import MAX_UNREAD, Following, Subscription
from .publish import Publisher
from .read import DirectReader, DurableReader, Reader, Start
from .requests import Answer, BusMessage, Requests, StreamState

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
