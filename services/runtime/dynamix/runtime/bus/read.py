"""Reading a stream: batches in stream order, each sequence once, whatever happens to connection and broker.

A `Reader` asks for messages, one request at a time, while there is room for them. `DirectReader` asks any copy of the
stream for what follows a sequence (direct gets): the broker keeps nothing for it. It hears of new messages by what the
stream sends again when it stores (`Stream.announces`, `Stream.hints`), and looks by itself every second.
`DurableReader` continues behind what it acknowledged, which a durable consumer keeps. That is of the kind that serves
one pinned client at a time. So each delivery has a header, `Nats-Pin-Id`: an empty message without headers would end
the answers to a request where it passes from one account to another. A second process of the same name waits until the
first one has asked for nothing for `PINNED_S`.
"""

import asyncio
import collections
import itertools
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Literal, Self

import msgspec

from dynamix.runtime.rate_limit import RateLimit
from dynamix.schemas.subjects import ANY, ROOT, announced, covers

from .connection import API, NOT_FOUND, REQUEST_EXPIRED, BrokerConnection, parse_status
from .errors import (
    CONSUMER_NOT_FOUND,
    ApiError,
    BusError,
    ConnectionClosedError,
    PermissionDeniedError,
    SequenceRegressError,
)
from .requests import Answer, BusMessage, FailoverWait, Requests, StreamState, nanoseconds

logger = logging.getLogger(__name__)

MIN_CAPACITY = 4096
MAX_BUFFERED_BYTES = 8 << 20
MAX_BYTES = 4 << 20
"""Limit of one request: bounds what is in flight. The broker cuts a connection with 64 MB of pending data."""
SILENT_S = 2.0
"""A request is lost when nothing came for so long after it should have ended."""
REOPEN_WAIT_S = 0.25
MAX_REOPEN_WAIT_S = 2.0
LOOK_EVERY_S = 1.0
CHECK_EVERY_S = 5.0
"""Interval at which a reader without messages checks that its stream is still the same."""
BETWEEN_S = 0.005
"""Pause between two direct gets while there is nothing left to read: together, messages cost less."""
LAG_WAIT_S = 0.01
"""First wait for a message that was announced and that the copy lacks."""
LAG_S = 2.0
"""With a copy that lacks it for longer, the stream's leader is asked: after a partition a copy may lag for minutes."""
ENDED, TOO_MANY = 204, 413

Start = Literal["new", "all", "last_per_subject"] | int
"""Start of reading: from now on, from the beginning, with each subject's last message, or from a sequence."""

_PLACE = re.compile(
    rb"\r\nNats-Stream: ?[^\r]*\r\nNats-Subject: ?([^\r]*)\r\nNats-Sequence: ?(\d+)\r\nNats-Time-Stamp: ?([^\r]*)"
    rb"\r\nNats-Num-Pending: ?(\d+)\r\nNats-Last-Sequence: ?(\d+)\r\n"
)
"""Text that the broker writes behind the headers of a message; its sender may have forged it."""
_UP_TO = re.compile(rb"\r\nNats-UpTo-Sequence: ?(\d+)")
_STORED = re.compile(rb"\r\nNats-Sequence: ?(\d+)\r\nNats-Time-Stamp: ?([^\r]*)")
"""The same for a message that the broker sends again."""

_inboxes = itertools.count(1)


class LostError(BusError):
    """An answer was lost or incomplete: the request is repeated."""


class Reader(ABC):
    """`async with bus.consume(...) as reader: async for batch in reader: ...`; made by `Bus.consume`."""

    def __init__(
        self,
        connection: BrokerConnection,
        requests: Requests,
        stream: str,
        subjects: Sequence[str],
        *,
        operation: str,
        start: Start,
        max_batch: int,
    ) -> None:
        if max_batch < 1 or not subjects:
            raise ValueError(f"a reader needs at least one subject and max_batch >= 1, not {subjects}, {max_batch}")
        self._connection = connection
        self._requests = requests
        self._stream = stream
        self._operation = operation
        """The request for messages, below `API`."""
        self._subjects = tuple(subjects)
        self._start = start
        self._last = 0
        """The last sequence handed out or queued."""
        self._seen = 0
        """A sequence that the stream has held."""
        self._created = ""
        """When the stream was made: another one begins at 1 again."""
        self._max_batch = max_batch
        self._capacity = max(MIN_CAPACITY, 2 * max_batch)
        self._inbox = f"{connection.inbox}.p.{next(_inboxes)}"
        self._tokens = itertools.count(1)
        self._answered_on = b""
        self._answer: asyncio.Future[bytes] | None = None
        """The headers of the status that ends the present request."""
        self._num_answers = 0
        self._buffer: collections.deque[BusMessage] = collections.deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._is_open = False
        self._error: BusError | None = None
        self._ended = False
        self._keeper: asyncio.Task[None] | None = None
        self._counters = connection.counters
        kinds = {subject.removeprefix(ROOT + ".").partition(".")[0] for subject in subjects}
        self._kind = kinds.pop() if len(kinds) == 1 else "other"
        self._stack = AsyncExitStack()
        self._limit = RateLimit(per_s=0.1)

    async def __aenter__(self) -> Self:
        lost = LostError("the connection was lost")
        for forget in (
            self._connection.when("reconnected", lambda: self._interrupt(lost)),
            self._connection.when("closed", lambda: self._fail(ConnectionClosedError("the connection is closed"))),
            self._connection.when("denied", self._on_denied),
        ):
            self._stack.callback(forget)
        try:
            await self._listen(self._inbox + ".*", self._on_message)
            await self._open()
        except BaseException:
            await self.close()
            raise
        self._is_open = True
        self._keeper = asyncio.create_task(self._keep_reading(), name=f"reader of {self._stream}")
        self._keeper.add_done_callback(self._on_keeper_done)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[BusMessage]:
        """All messages now queued, at least one, at most `max_batch`.

        Raises:
            BusError: when the stream cannot be read any more; the message has the reason.
        """
        while not self._ended and self._error is None and not self._buffer:
            self._arrived.clear()
            await self._arrived.wait()
        if self._ended:
            raise StopAsyncIteration
        if self._error is not None:
            raise self._error
        buffer = self._buffer
        batch = [buffer.popleft() for _ in range(min(len(buffer), self._max_batch))]
        self._bytes -= sum(len(message.payload) for message in batch)
        self._taken.set()
        self._counters["received"] += len(batch)
        self._connection.num_handled[self._kind] += len(batch)
        return batch

    async def ack(self, message: BusMessage) -> None:  # noqa: ARG002 - see DurableReader
        """Acknowledge this and every earlier message; a restart continues after it. Only with `durable`."""
        raise ValueError("ack() needs a durable consumer: pass durable=NAME to consume()")

    def end(self) -> None:
        """End the reader's loop at once; queued messages are read again after a restart."""
        self._ended = True
        self._arrived.set()

    async def close(self) -> None:
        """Close the reader and its subscription."""
        self.end()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._stack.aclose()

    @abstractmethod
    async def _open(self) -> None:
        """See where to continue. Raises as `_check_stream`."""

    @abstractmethod
    async def _read_once(self, num_messages: int) -> None:
        """Make one request, wait for its end, and until another one makes sense. Raises LostError."""

    @abstractmethod
    def _on_message(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        """Receive the requested messages."""

    async def _listen(self, subject: str, handler: Callable[[bytes, bytes, bytes, bytes | None], None]) -> None:
        subscription = await self._connection.subscribe(subject, handler)
        self._stack.push_async_callback(self._connection.unsubscribe, subscription)

    async def _keep_reading(self) -> None:
        """Make requests while there is room, and open again whatever broke, until that cannot work."""
        wait_s = 0.0
        while self._error is None:
            try:
                if not self._is_open:
                    await self._connection.connected.wait()
                    self._is_open = True
                    await self._open()
                self._taken.clear()
                room = self._capacity - len(self._buffer)
                if 2 * room < self._capacity or self._bytes >= MAX_BUFFERED_BYTES:
                    await self._taken.wait()
                else:
                    await self._read_once(room)
                    wait_s = 0.0
            except (PermissionDeniedError, SequenceRegressError, ConnectionClosedError) as error:
                self._fail(error)
            except BusError as error:  # a stream that is missing may be provisioned again
                if isinstance(error, LostError):
                    logger.info("reading %s begins again: %s", self._stream, error)
                    self._counters["consumer_resets"] += 1
                elif self._limit.allow("unreadable"):
                    logger.warning("cannot read %s yet: %s", self._stream, error)
                self._is_open = False
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s or REOPEN_WAIT_S, MAX_REOPEN_WAIT_S)

    async def _check_stream(self) -> StreamState:
        """Check that the stream reaches to the last read sequence; one that was made again is read from its start.

        Raises:
            StreamMissingError: when there is no such stream.
            SequenceRegressError: when it is the same stream and ends before our position.
            BusError: as `Requests.ask`.
        """
        ask = self._requests.stream_state
        state, wait = await ask(self._stream), FailoverWait(ask, self._stream)
        reached = max(self._last, self._seen)
        while self._created in ("", state.created) and reached > state.last_sequence and await wait.pause():
            state = await ask(self._stream)
        if self._created not in ("", state.created):
            logger.warning("%s was made again: it is read from its beginning", self._stream)
            self._last = self._seen = reached = 0
            self._begin_again(nanoseconds(state.created))
        self._created = state.created
        if reached > state.last_sequence:
            raise SequenceRegressError(
                f"{self._stream} ends at {state.last_sequence}, but had reached {reached} when it was read before: the "
                "broker lost data; restart this service to begin again"
            )
        if self._last and self._last + 1 < state.first_sequence:
            gap = self._last, state.first_sequence
            logger.warning("%s no longer holds what follows %d; on from %d", self._stream, *gap)
        return state

    @abstractmethod
    def _begin_again(self, created_ns: int) -> None:
        """Forget the sequences of the stream that was there before."""

    async def _exchange(self, request: dict[str, Any], expires_s: float = 0.0) -> bytes:
        """Send a request and let `_on_message` take what comes, up to the status that ends it; its headers.

        Raises:
            LostError: when it did not end.
        """
        if not self._is_open:
            raise LostError("the connection was lost")
        to = f"{self._inbox}.{next(self._tokens)}"
        self._answered_on = to.encode()
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answer = answer
        await self._connection.send(API + self._operation, msgspec.json.encode(request), to)
        while True:
            before = self._num_answers
            await asyncio.wait([answer], timeout=expires_s + SILENT_S)
            if answer.done():
                return answer.result()
            if before == self._num_answers:
                raise LostError("the broker fell silent")

    def _end_exchange(self, headers: bytes) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(headers)

    def _queue(self, message: BusMessage) -> None:
        self._last = message.sequence
        self._bytes += len(message.payload)
        self._buffer.append(message)
        if not self._arrived.is_set():
            self._arrived.set()

    def _interrupt(self, error: BusError) -> None:
        """Give up the present request."""
        self._is_open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
            self._answer.exception()  # the keeper may have ended

    def _fail(self, error: BusError) -> None:
        """End the reader's loop with an error."""
        self._error = self._error or error
        self._interrupt(error)
        self._arrived.set()
        self._taken.set()

    def _on_keeper_done(self, keeper: asyncio.Task[None]) -> None:
        """Make readers raise instead of waiting forever for a task that a bug has ended."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            logger.error("reading %s has ended", self._stream, exc_info=error)
            self._fail(BusError(f"reading {self._stream} has ended: {error!r}"))

    def _on_denied(self, subject: str, denial: PermissionDeniedError) -> None:
        if subject in (f"{self._inbox}.*".lower(), f"{API}{self._operation}".lower()):  # nothing can be read without
            self._fail(denial)


class DirectReader(Reader):
    """Reads what follows a sequence, from any copy of the stream: one that lags answers later, never with a gap."""

    def __init__(
        self, connection: BrokerConnection, requests: Requests, stream: str, subjects: Sequence[str], **options: Any
    ) -> None:
        super().__init__(connection, requests, stream, subjects, operation=f"DIRECT.GET.{stream}", **options)
        self._filter = common_filter(self._subjects)
        self._next = 0
        """The first sequence that may come; 0: not known yet."""
        self._wants_newest = False
        """Whether each subject's last message is still to come."""
        self._before = 0
        """The last sequence of the present request."""
        self._held: BusMessage | None = None
        """With several subjects: the newest message for us, until it is known whether another one follows."""
        self._promised = 0
        """The newest announced sequence."""
        self._heard = asyncio.Event()
        self._lag_wait_s = LAG_WAIT_S
        self._behind_since: float | None = None
        """Time since which an announced message is missing."""
        self._read_ns = 0
        """When the last message was stored that came."""
        self._is_other = False
        """Whether a later message was announced with an earlier sequence: it is of another stream."""
        self._alive_at = time.monotonic()
        """When a message came, or the stream was seen to be the same."""

    async def _open(self) -> None:
        is_first = not self._created
        state = await self._check_stream()
        if not is_first:
            return
        for subject in self._subjects:
            if subject.startswith(ROOT):
                await self._listen(announced(subject), self._on_hint)
        self._wants_newest = self._start == "last_per_subject"
        if isinstance(self._start, int):
            self._next = max(1, self._start)
        else:
            self._next = state.last_sequence + 1 if self._start == "new" else 1
            self._seen = self._next - 1

    def _begin_again(self, created_ns: int) -> None:  # noqa: ARG002 - see DurableReader
        self._next, self._promised, self._held, self._read_ns = 1, 0, None, 0

    async def _read_once(self, num_messages: int) -> None:
        begun, self._before = time.monotonic(), 0
        if self._is_other or begun > self._alive_at + CHECK_EVERY_S:
            await self._check_stream()
        self._heard.clear()
        request: dict[str, Any] = {"batch": num_messages, "max_bytes": MAX_BYTES}
        if self._wants_newest:
            request |= {"multi_last": self._subjects, "seq": self._last + 1}
        else:
            request |= {"next_by_subj": self._filter, "seq": self._next}
        headers = await self._exchange(request)
        status = parse_status(headers)
        if status.code == TOO_MANY:  # each subject's last message then comes behind its earlier ones
            self._wants_newest = False
            return
        if status.code not in (ENDED, NOT_FOUND):
            raise LostError(f"{status.code} {status.text}".strip())
        if status.num_pending:
            return
        if self._held is not None:
            held, self._held = self._held, None
            self._queue(held._replace(num_pending=0))
        if self._wants_newest:  # up to where the copy that answered has the stream
            self._wants_newest, up_to = False, _UP_TO.search(headers)
            self._next = 1 + max(self._last, int(up_to[1]) if up_to else 0)
            return
        await self._wait_for_more(begun)

    async def _wait_for_more(self, begun: float) -> None:
        is_behind = self._next <= self._promised  # the copy that answered lags
        self._lag_wait_s = min(2 * self._lag_wait_s, LOOK_EVERY_S) if is_behind else LAG_WAIT_S
        await asyncio.sleep(max(0.0, begun + BETWEEN_S - time.monotonic()))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._lag_wait_s if is_behind else LOOK_EVERY_S):
                await self._heard.wait()
        if not is_behind:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = begun
        elif begun > self._behind_since + LAG_S:
            which = {"seq": self._next, "next_by_subj": self._filter}
            with suppress(BusError):  # our user may not ask the leader, or it is gone
                found = await self._requests.find_message(self._stream, which, SILENT_S)
                if found is None:
                    self._promised = 0  # it is gone
                else:
                    self._accept(found)

    async def _check_stream(self) -> StreamState:
        state = await super()._check_stream()
        self._is_other, self._alive_at = False, time.monotonic()
        return state

    def _on_hint(self, _subject: bytes, _reply: bytes, _payload: bytes, headers: bytes | None) -> None:
        """A message was stored. What any client could have sent here makes us look, and no more."""
        if (found := _STORED.search(headers or b"")) is not None:
            sequence = int(found[1])
            self._promised = max(self._promised, sequence)
            if sequence < self._next and nanoseconds(found[2].decode()) > self._read_ns > 0:
                self._is_other = True
        self._heard.set()

    def _on_message(self, subject: bytes, _reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if subject != self._answered_on:
            return  # of a request that was given up
        self._num_answers += 1
        place = None if headers is None else _PLACE.match(headers, headers.rfind(b"\r\nNats-Stream:"))
        if headers is None or place is None:
            self._end_exchange(headers or b"")
            return
        sequence, num_pending, before = int(place[2]), int(place[4]), int(place[5])
        if before != self._before:
            self._interrupt(LostError(f"message {before} was lost"))
            return
        self._before = sequence
        name, stored_ns = place[1].decode(errors="replace"), nanoseconds(place[3].decode())
        self._accept(BusMessage(name, payload, sequence, stored_ns, num_pending, headers))

    def _accept(self, message: BusMessage) -> None:
        self._alive_at, self._read_ns = time.monotonic(), message.timestamp_ns
        self._seen = max(self._seen, message.sequence)
        if not self._wants_newest:
            self._next = max(self._next, message.sequence + 1)
        if len(self._subjects) == 1 or self._wants_newest:
            self._queue(message)
        elif any(covers(wanted, message.subject) for wanted in self._subjects):
            if self._held is not None:
                self._queue(self._held)
            self._held = message

    def _interrupt(self, error: BusError) -> None:
        super()._interrupt(error)
        self._heard.set()


def common_filter(subjects: Sequence[str]) -> str:
    """The narrowest filter that covers several: the broker takes one."""
    merged: list[str] = []
    for column in itertools.zip_longest(*(subject.split(".") for subject in subjects)):
        if None in column or ">" in column:
            return ".".join([*(merged[:-1] if None in column else merged), ">"])
        merged.append(column[0] if len(set(column)) == 1 else ANY)
    return ".".join(merged)


MAX_ACK_PENDING = 65_536
ACK_WAIT_S = 24 * 3600.0
"""Redelivery by time is not wanted: the reset at each opening delivers again, in order, what was not acknowledged."""
EXPIRES_S = 1.5
"""A request ends after so long: shorter than `PINNED_S`, so that an idle reader stays pinned."""
PINNED_S = 2.0
GROUP = "r"
WRONG_PIN = 423
REQUEST_ENDED = {"Batch Completed", "Message Size Exceeds MaxBytes"}
"""Descriptions of status 409 that end one request; all others end the consumer or its leader's reign."""

_PIN = re.compile(rb"\r\nNats-Pin-Id: ?([^\r]*)")


class _ConsumerInfo(Answer):
    config: dict[str, Any] = msgspec.field(default_factory=dict)


async def make_durable(
    requests: Requests,
    stream: str,
    name: str,
    filter: str,  # noqa: A002 - the broker's word
    *,
    start: Literal["new", "all"] | int = "new",
) -> None:
    """Make a durable consumer of a stream, or give a present one our settings and the filter.

    `start` counts for a new one. Where the stream was just made, `"all"` loses nothing that comes before this call.

    Raises:
        StreamMissingError: when there is no such stream.
        PermissionDeniedError: when our user may not.
        BusError: as `Requests.ask`.
    """
    try:
        present = (await requests.ask(f"CONSUMER.INFO.{stream}.{name}", None, _ConsumerInfo)).config
    except ApiError as error:
        if error.err_code != CONSUMER_NOT_FOUND:
            raise
        present = {"name": name, "durable_name": name, "deliver_policy": start}
        if isinstance(start, int):
            present |= {"deliver_policy": "by_start_sequence", "opt_start_seq": max(start, 1)}
    wanted = {
        "ack_policy": "all",
        "ack_wait": int(ACK_WAIT_S * 1e9),
        "max_ack_pending": MAX_ACK_PENDING,
        "filter_subject": filter,
        "priority_groups": [GROUP],
        "priority_policy": "pinned_client",
        "priority_timeout": int(PINNED_S * 1e9),
    }
    if any(present.get(key) != value for key, value in wanted.items()):
        # the filter stands in the subject, too, so that permissions can limit it
        operation = f"CONSUMER.CREATE.{stream}.{name}.{filter}"
        await requests.ask(operation, {"stream_name": stream, "config": present | wanted}, _ConsumerInfo)


async def remove_durable(requests: Requests, stream: str, name: str) -> None:
    """Remove a durable consumer of a stream, where there is one."""
    try:
        await requests.ask(f"CONSUMER.DELETE.{stream}.{name}", None, Answer)
    except ApiError as error:
        if error.err_code != CONSUMER_NOT_FOUND:
            raise


def parse_delivery(
    subject: bytes, payload: bytes, reply: bytes, headers: bytes | None = None
) -> tuple[int, BusMessage]:
    """The message, and the consumer's count of its deliveries from 1: a jump means that one was lost on the way.

    The reply subject is `$JS.ACK.<stream>.<consumer>.<deliveries>.<sequence>.<consumer sequence>.<time>.<pending>`.
    The second form puts domain and account in front of the stream and may add a token at the end.

    A subject may hold any bytes but white space: what is not UTF-8 is replaced, and later refused as none of ours.

    Raises:
        ValueError: when it is neither.
    """
    tokens = reply.split(b".")
    if len(tokens) >= 11:
        del tokens[2:4]
    elif len(tokens) != 9:
        raise ValueError(f"{reply!r} is no acknowledgement subject of JetStream")
    return int(tokens[6]), BusMessage(
        subject.decode(errors="replace"), payload, int(tokens[5]), int(tokens[7]), int(tokens[8]), headers or b""
    )


class DurableReader(Reader):
    """Reads by a durable consumer of one filter; makes it where it is missing and our user may."""

    def __init__(
        self,
        connection: BrokerConnection,
        requests: Requests,
        stream: str,
        subjects: Sequence[str],
        *,
        durable: str,
        **options: Any,
    ) -> None:
        operation = f"CONSUMER.MSG.NEXT.{stream}.{durable}"
        super().__init__(connection, requests, stream, subjects, operation=operation, **options)
        if len(self._subjects) != 1 or self._start == "last_per_subject":
            raise ValueError(f"a durable consumer reads one filter, from 'new', 'all' or a sequence, not {subjects}")
        self._name = durable
        self._pin = ""
        self._next_delivery = 1
        """The consumer's count of its next delivery, which begins at 1 after each reset. A delivery 1 is always taken:
        before the reset's answer it may come by a request that was made earlier."""
        self._lost = ""
        """Deliveries that are missing since the last reset."""
        self._num_asked = 0
        """Messages of the present request that are still to come."""
        self._handled = 0
        """The last sequence that was acknowledged."""
        self._since_ns = 0
        """When the stream was made, where we have read another one before."""
        self._unacknowledged: collections.deque[tuple[int, bytes]] = collections.deque()

    async def ack(self, message: BusMessage) -> None:
        """Acknowledge this and every earlier message; a restart continues after it.

        An acknowledgement lost with the connection is made good when its message comes again.
        """
        if message.timestamp_ns < self._since_ns:
            return  # its sequence is another message's now
        self._handled = max(self._handled, message.sequence)
        await self._acknowledge()

    async def _acknowledge(self) -> None:
        reply = b""
        while self._unacknowledged and self._unacknowledged[0][0] <= self._handled:
            reply = self._unacknowledged.popleft()[1]
        if reply:
            await self._connection.send(reply.decode(), b"+ACK")

    async def _open(self) -> None:
        self._pin = ""
        is_first = not self._created
        state = await self._check_stream()
        if self._start == "new":
            self._start = state.last_sequence + 1
        self._unacknowledged.clear()
        start = self._last + 1 if self._last else self._start
        assert start != "last_per_subject", "refused above"
        try:
            await make_durable(self._requests, self._stream, self._name, self._subjects[0], start=start)
        except PermissionDeniedError as error:
            missing = f"{self._stream} has no consumer {self._name} with our settings, and our user may not make it"
            text = f"{missing}: `dynamix keys create` or `dynamix provision` makes it ({error})"
            raise (PermissionDeniedError(text) if is_first else BusError(text)) from error
        self._next_delivery = 1
        await self._requests.ask(f"CONSUMER.RESET.{self._stream}.{self._name}", None, _ConsumerInfo)
        self._lost = ""

    def _begin_again(self, created_ns: int) -> None:
        self._start, self._handled, self._since_ns = "all", 0, created_ns

    async def _read_once(self, num_messages: int) -> None:
        if self._lost:
            raise LostError(self._lost)
        self._num_asked = num_messages
        request = {
            "batch": num_messages,
            "max_bytes": MAX_BYTES,
            "expires": int(EXPIRES_S * 1e9),
            "group": GROUP,
            **({"id": self._pin} if self._pin else {}),
        }
        status = parse_status(await self._exchange(request, EXPIRES_S))
        if status.code == WRONG_PIN:
            self._pin = ""
        elif status.code and status.code not in (NOT_FOUND, REQUEST_EXPIRED) and status.text not in REQUEST_ENDED:
            raise LostError(f"{status.code} {status.text}".strip())
        await self._acknowledge()  # what came again

    def _on_message(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        self._num_answers += 1
        if not reply:
            if subject == self._answered_on:
                self._end_exchange(headers or b"")
            return
        count, message = parse_delivery(subject, payload, reply, headers)
        if count not in (1, self._next_delivery):
            self._lost = f"delivery {self._next_delivery} was lost"
            if self._answer is not None and not self._answer.done():
                self._interrupt(LostError(self._lost))
            return
        self._next_delivery = count + 1
        if headers is not None and (pin := _PIN.search(headers, headers.rfind(b"\r\nNats-Pin-Id:"))) is not None:
            self._pin = pin[1].decode()
        self._unacknowledged.append((message.sequence, reply))
        if message.sequence > self._last:
            self._queue(message)
        else:
            self._counters["received_twice"] += 1
        self._num_asked -= 1
        if not self._num_asked:
            self._end_exchange(b"")
