"""Requests to JetStream's API: typed, with one inbox for all answers, failing at once on a denied permission.

`BusMessage` and `StreamState` are what readers and tools get.
"""

import asyncio
import datetime as dt
import itertools
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from .connection import API, NO_RESPONDERS, NOT_FOUND, BrokerConnection, parse_status
from .errors import (
    MESSAGE_NOT_FOUND,
    STREAM_NOT_FOUND,
    UNAVAILABLE,
    ApiError,
    BusError,
    ConnectionClosedError,
    PermissionDeniedError,
    StreamMissingError,
)

MESSAGE_ID = "Nats-Msg-Id"
SIGNED = "#"
"""Between the content's identity and what only its sender can know: no identity has it."""

_MESSAGE_ID_LINE = f"\r\n{MESSAGE_ID}:".lower().encode()


class StreamCopy(msgspec.Struct, frozen=True):
    """State of a stream's copy, as its leader reports it."""

    name: str
    """The name of its server."""
    current: bool = False
    offline: bool = False
    active: int = 0
    """Nanoseconds since its last message."""
    lag: int = 0
    """Entries of the log that it does not have."""

    def __str__(self) -> str:
        state = "offline" if self.offline else "current" if self.current else "not current"
        return f"{self.name} is {state}, lags by {self.lag}, was heard {self.active / 1e9:.1f} s ago"


class StreamCopies(msgspec.Struct, frozen=True):
    """Servers of a stream: the leader, and its view of the others."""

    leader: str = ""
    replicas: tuple[StreamCopy, ...] = ()

    @property
    def behind(self) -> list[StreamCopy]:
        """The copies that are useless at the moment; one of a server under load may be for a moment."""
        return [one for one in self.replicas if one.offline or not one.current]

    def are_whole(self, num_replicas: int) -> bool:
        """Whether there are this many copies, the leader's included, and none lags."""
        return bool(self.leader) and len(self.replicas) == num_replicas - 1 and not self.behind

    def __str__(self) -> str:
        head = f"leader {self.leader or 'unknown'}, {len(self.replicas)} other copies"
        return "; ".join([head, *map(str, self.behind)])


class BusMessage(NamedTuple):
    """A message from a stream; from core NATS the numbers are 0."""

    subject: str
    payload: bytes
    sequence: int
    """Its place in the stream."""
    timestamp_ns: int
    """Time at which the broker stored it, since the Unix epoch."""
    num_pending: int
    """Messages for this reader that the stream still held when this one was sent: how far behind the reader is."""
    headers: bytes = b""
    """The headers of a delivery, not parsed: most readers have no use for them."""

    @property
    def message_id(self) -> str:
        """The content's identity in the headers, as `codec.message_id` gives it; empty when there is none."""
        start = self.headers.lower().find(_MESSAGE_ID_LINE)
        if start < 0:
            return ""
        value, _, _ = self.headers[start + len(_MESSAGE_ID_LINE) :].partition(b"\r\n")
        return value.strip().decode(errors="replace").partition(SIGNED)[0]


class StreamState(msgspec.Struct, frozen=True):
    """State of a stream; `first_sequence` is one above `last_sequence` when it is empty."""

    first_sequence: int = msgspec.field(name="first_seq")
    last_sequence: int = msgspec.field(name="last_seq")
    num_messages: int = msgspec.field(name="messages")
    num_bytes: int = msgspec.field(name="bytes", default=0)
    first_ts: str = ""
    last_ts: str = ""
    num_replicas: int = 1
    copies: StreamCopies = StreamCopies()
    """Empty where there is no cluster."""
    created: str = ""
    """Creation time of the stream: one that was deleted and made again has another time, and other messages."""

    @property
    def span_s(self) -> float:
        """Time between the oldest and the newest message."""
        return (nanoseconds(self.last_ts) - nanoseconds(self.first_ts)) / 1e9 if self.num_messages else 0.0


REQUEST_TIMEOUT_S = 2.0
RETRY_WAIT_S = 0.25
LOST_WAIT_S = 0.02
LATE_S = 5.0
"""A request without an answer for so long is shown as such."""
BUDGET_S = 60.0
"""An R3 stream without a leader, and a broker that restarts, answer nothing for up to 10 s."""
NO_STREAM_S = 5.0


class Refusal(msgspec.Struct):
    """The error part of an answer of JetStream."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class Answer(msgspec.Struct):
    """Shared fields of all answers of the API."""

    error: Refusal | None = None


class _StreamInfo(Answer):
    state: StreamState | None = None
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    created: str = ""
    cluster: StreamCopies = StreamCopies()


class _StoredMessage(msgspec.Struct):
    subject: str
    seq: int
    time: str
    data: bytes = b""


class _StoredAnswer(Answer):
    message: _StoredMessage | None = None


A = TypeVar("A", bound=Answer)
T = TypeVar("T")


class Requests:
    """Asks JetStream's API over one connection."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self._prefix = f"{connection.inbox}.r."
        self._tokens = itertools.count()
        self._waiting: dict[bytes, tuple[str, asyncio.Future[tuple[bytes, bytes] | None]]] = {}
        self._inbox_denial: PermissionDeniedError | None = None
        self._asked_at: dict[int, float] = {}
        """Start of each request without a final answer, its repetitions included."""

    @property
    def num_late(self) -> int:
        """Requests without an answer for `LATE_S`."""
        before = time.monotonic() - LATE_S
        return sum(begun <= before for begun in list(self._asked_at.values()))  # also asked in other threads

    async def open(self) -> None:
        """Listen for answers."""
        await self._connection.subscribe(self._prefix + "*", self._on_answer)
        self._connection.when("denied", self._on_denied)
        self._connection.when("closed", self.close)
        # requests or their answers are lost: repeat them without waiting for the time-out
        self._connection.when("reconnected", lambda: self._fail_all(TimeoutError("the connection was lost")))

    async def check_inbox(self) -> None:
        """Wait until the broker has seen our subscriptions. Raises PermissionDeniedError for a denied own inbox."""
        await self._connection.round_trip(REQUEST_TIMEOUT_S)
        if self._inbox_denial is not None:
            raise self._inbox_denial

    def close(self) -> None:
        """Fail all pending requests."""
        self._fail_all(ConnectionClosedError("the connection to the bus is closed"))

    async def ask(self, operation: str, body: Any, answer: type[A], *, budget_s: float = BUDGET_S) -> A:
        """The answer to an operation of the API; asks again for up to `budget_s` while the broker is away or not ready.

        Ask only what may be done twice.

        Raises:
            ApiError: when the API refuses.
            StreamMissingError: when it knows no such stream.
            PermissionDeniedError: when our user may not ask.
            BusError: when no answer comes within the budget.
        """
        payload = b"" if body is None else msgspec.json.encode(body)

        async def once() -> A:
            reply = await self._round_trip(API + operation, payload)
            if reply is None:
                raise ApiError(f"{operation}: JetStream does not answer (is it enabled?)", UNAVAILABLE, 0)
            result = msgspec.json.decode(reply[0], type=answer)
            if (error := result.error) is not None:
                text = f"{operation}: {error.description} (code {error.code}, error {error.err_code})"
                if error.err_code == STREAM_NOT_FOUND:
                    raise StreamMissingError(f"{text}: run `dynamix provision`")
                raise ApiError(text, error.code, error.err_code)
            return result

        return await self._until_answered(operation, once, budget_s)

    async def ask_server(self, subject: str, payload: bytes) -> bytes:
        """The answer to a request that is not JetStream's, sent once. Raises BusError when there is none."""
        try:
            reply = await self._round_trip(subject, payload)
        except TimeoutError:
            reply = None
        if reply is None:
            raise BusError(f"no answer to {subject} within {REQUEST_TIMEOUT_S:g} s")
        return reply[0]

    async def stream_state(self, stream: str) -> StreamState:
        """The state of a stream. Raises StreamMissingError when there is none of this name."""
        info = await self.ask(f"STREAM.INFO.{stream}", None, _StreamInfo)
        assert info.state is not None, "the API answers with an error or a state"
        num_replicas = info.config.get("num_replicas", 1)
        return replace(info.state, num_replicas=num_replicas, copies=info.cluster, created=info.created)

    async def stream_config(self, stream: str) -> dict[str, Any]:
        """The stream's configuration. Raises StreamMissingError when there is none of this name."""
        return (await self.ask(f"STREAM.INFO.{stream}", None, _StreamInfo)).config

    async def write_stream(self, action: Literal["CREATE", "UPDATE"], config: dict[str, Any]) -> None:
        """Create or update a stream. Raises ApiError when JetStream refuses."""
        await self.ask(f"STREAM.{action}.{config['name']}", config, _StreamInfo)

    async def find_message(self, stream: str, which: dict[str, Any], budget_s: float = BUDGET_S) -> BusMessage | None:
        """The message that STREAM.MSG.GET finds, `None` when there is none; the stream's leader is asked.

        A follower may lag, and a writer that restarts from an old message would only learn so when its compare-and-set
        fails.
        """
        try:
            answer = await self.ask(f"STREAM.MSG.GET.{stream}", which, _StoredAnswer, budget_s=budget_s)
        except ApiError as error:
            if error.err_code == MESSAGE_NOT_FOUND:
                return None
            raise
        stored = answer.message
        assert stored is not None, "the API answers with an error or a message"
        return BusMessage(stored.subject, stored.data, stored.seq, nanoseconds(stored.time), 0)

    async def newest_message(self, stream: str, subject: str) -> BusMessage | None:
        """The last message of a subject, from any replica, which may lag behind the leader; `None` when there is none.

        The subject stands in the request's own subject, so that permissions can limit it to one job. A stream that does
        not exist answers as one that is not ready: nothing; it is asked for `NO_STREAM_S`. Otherwise as `ask`.
        """
        operation = f"DIRECT.GET.{stream}.{subject}"

        async def once() -> BusMessage | None:
            reply = await self._round_trip(API + operation, b"")
            if reply is None:
                raise ApiError(f"{operation}: no such stream answers (run `dynamix provision`)", UNAVAILABLE, 0)
            payload, headers = reply
            status = parse_status(headers)
            if status.code == NOT_FOUND:
                return None
            if status.code:
                raise ApiError(f"{operation}: {status.text} (code {status.code})", status.code, 0)
            _, _, place = headers.rpartition(b"\r\nNats-Sequence:")  # the sender may have written one before
            return BusMessage(subject, payload, int(place.partition(b"\r\n")[0]), 0, 0, headers)

        return await self._until_answered(operation, once, NO_STREAM_S)

    async def _until_answered(self, operation: str, once: Callable[[], Awaitable[T]], budget_s: float) -> T:
        begun, number = time.monotonic(), next(self._tokens)
        self._asked_at[number] = begun
        try:
            while True:
                try:
                    return await once()
                except (TimeoutError, ApiError) as error:
                    if isinstance(error, ApiError) and error.code != UNAVAILABLE:
                        raise
                    if time.monotonic() > begun + budget_s:
                        raise BusError(f"no answer to {operation} within {budget_s:g} s: {error}") from error
                await asyncio.sleep(RETRY_WAIT_S)
        finally:
            del self._asked_at[number]

    async def _round_trip(self, subject: str, payload: bytes) -> tuple[bytes, bytes] | None:
        """Payload and raw headers of the answer, `None` when no server listens."""
        if self._inbox_denial is not None:
            raise self._inbox_denial
        token = b"%d" % next(self._tokens)
        future: asyncio.Future[tuple[bytes, bytes] | None] = asyncio.get_running_loop().create_future()
        self._waiting[token] = (subject.lower(), future)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                while not await self._connection.send(subject, payload, self._prefix + token.decode()):
                    await asyncio.sleep(LOST_WAIT_S)  # nats-py may know of a loss before it tells us
                    await self._connection.connected.wait()
                return await future
        finally:
            del self._waiting[token]

    def _on_answer(self, subject: bytes, _reply: bytes, payload: bytes, headers: bytes | None) -> None:
        _, future = self._waiting.get(subject[len(self._prefix) :], ("", None))
        if future is not None and not future.done():
            missing = headers is not None and parse_status(headers).code == NO_RESPONDERS
            future.set_result(None if missing else (payload, headers or b""))

    def _on_denied(self, subject: str, denial: PermissionDeniedError) -> None:
        if subject == (self._prefix + "*").lower():
            self._inbox_denial = denial
            self._fail_all(denial)
        for asked, future in self._waiting.values():
            if asked == subject and not future.done():
                future.set_exception(denial)

    def _fail_all(self, error: BusError | TimeoutError) -> None:
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # who asked may have ended


def nanoseconds(time: str) -> int:
    """Since the Unix epoch, of the broker's RFC 3339 time with up to nine digits; `datetime` holds six."""
    seconds, _, fraction = time.removesuffix("Z").partition(".")
    return _whole_seconds(seconds) * 10**9 + int(fraction.ljust(9, "0"))


@lru_cache(maxsize=64)  # messages that are read together were stored together
def _whole_seconds(time: str) -> int:
    return int(dt.datetime.fromisoformat(time).replace(tzinfo=dt.UTC).timestamp())


OLD_ANSWERS_S, PAUSE_S = 10.0, 0.5
"""One of several servers that was cut off may lead a stream, as it believes, and say what that held before, until it
hears of its successor; it gives up by itself after 10 s. A single server is believed at once: within seconds new
messages would hide what it lost."""


class FailoverWait:
    """Pauses between the tries of one question: `while is_old(answer) and await wait.pause(): answer = await ask()`.

    It costs nothing until an answer is too old, and one request then.
    """

    def __init__(self, stream_state: Callable[[str], Awaitable[StreamState]], stream: str) -> None:
        """`stream`: a stream whose state this user may ask for; all streams have as many copies (`provision`)."""
        self._stream_state = stream_state
        self._stream = stream
        self._until_s: float | None = None

    async def pause(self) -> bool:
        """Wait a moment before asking again. False, at once, with one copy, or 10 s after the first call."""
        if self._until_s is None:
            num_replicas = (await self._stream_state(self._stream)).num_replicas
            self._until_s = time.monotonic() + (OLD_ANSWERS_S if num_replicas > 1 else 0.0)
        if time.monotonic() >= self._until_s:
            return False
        await asyncio.sleep(PAUSE_S)
        return True
