"""Requests to JetStream's API: typed, with one inbox for all answers, failing at once on a denied permission."""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

from .client import NO_RESPONDERS, NOT_FOUND, parse_status
from .connection import BrokerConnection
from .errors import (
    STREAM_NOT_FOUND,
    UNAVAILABLE,
    ApiError,
    BusError,
    ConnectionClosedError,
    NoAnswerError,
    PermissionDeniedError,
    StreamMissingError,
)

logger = logging.getLogger(__name__)

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
    """What all answers of the API share."""

    error: Refusal | None = None


class _Reply(NamedTuple):
    """What came back: payload and raw headers."""

    payload: bytes
    headers: bytes


A = TypeVar("A", bound=Answer)
T = TypeVar("T")


class Requests:
    """Asks JetStream's API over one connection."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self._prefix = f"{connection.inbox}.r."
        self._tokens = itertools.count()
        self._waiting: dict[bytes, tuple[str, asyncio.Future[_Reply | None]]] = {}
        self._inbox_denial: PermissionDeniedError | None = None
        self._asked_at: dict[int, float] = {}
        """When each request began that has no final answer yet, its repetitions included."""

    @property
    def num_late(self) -> int:
        """Requests without an answer for `LATE_S`."""
        before = time.monotonic() - LATE_S
        return sum(begun <= before for begun in list(self._asked_at.values()))  # also asked in other threads

    async def open(self) -> None:
        """Listen for answers."""
        await self._connection.subscribe(self._prefix + "*", self._on_answer)
        self._connection.when_denied(self._on_denied)
        self._connection.when_closed(self.close)
        self._connection.when_reconnected(self._on_reconnected)

    async def check_inbox(self) -> None:
        """Wait until the broker has seen our subscriptions. Raises PermissionDeniedError for a denied own inbox."""
        await self._connection.round_trip(REQUEST_TIMEOUT_S)
        if self._inbox_denial is not None:
            raise self._inbox_denial

    def close(self) -> None:
        """Fail what is still waited for."""
        self._fail_all(ConnectionClosedError("the connection to the bus is closed"))

    async def ask(self, operation: str, body: Any, answer: type[A], *, budget_s: float = BUDGET_S) -> A:
        """The answer to an operation of the API; asks again for up to `budget_s` while the broker is away or not ready.

        Ask only what may be done twice.

        Raises:
            ApiError: when the API refuses.
            StreamMissingError: when it knows no such stream.
            PermissionDeniedError: when our user may not ask.
            NoAnswerError: when no answer comes within the budget.
        """
        payload = b"" if body is None else msgspec.json.encode(body)
        return await self._until_answered(operation, lambda: self._ask_once(operation, payload, answer), budget_s)

    async def ask_directly(self, stream: str, subject: str) -> tuple[bytes, bytes] | None:
        """Headers and payload of the newest message that a replica holds of a subject, `None` when it holds none.

        A stream that does not exist answers as one that is not ready: nothing; it is asked for `NO_STREAM_S`. Otherwise
        as `ask`.
        """
        operation = f"DIRECT.GET.{stream}.{subject}"
        return await self._until_answered(operation, lambda: self._ask_directly_once(operation), NO_STREAM_S)

    async def ask_server(self, subject: str, payload: bytes) -> bytes:
        """The answer to a request that is not JetStream's, sent once. Raises NoAnswerError, PermissionDeniedError."""
        try:
            reply = await self._round_trip(subject, payload)
        except TimeoutError:
            reply = None
        if reply is None:
            raise NoAnswerError(f"no answer to {subject} within {REQUEST_TIMEOUT_S:g} s")
        return reply.payload

    async def _until_answered(self, operation: str, once: Callable[[], Awaitable[T]], budget_s: float = BUDGET_S) -> T:
        begun, number = time.monotonic(), next(self._tokens)
        self._asked_at[number] = begun
        try:
            while True:
                try:
                    return await once()
                except (TimeoutError, ApiError) as error:
                    if isinstance(error, ApiError) and not error.may_pass:
                        raise
                    if time.monotonic() > begun + budget_s:
                        raise NoAnswerError(f"no answer to {operation} within {budget_s:g} s: {error}") from error
                await asyncio.sleep(RETRY_WAIT_S)
        finally:
            del self._asked_at[number]

    async def _ask_once(self, operation: str, payload: bytes, answer: type[A]) -> A:
        reply = await self._round_trip(self._connection.api + operation, payload)
        if reply is None:
            raise ApiError(f"{operation}: JetStream does not answer (is it enabled?)", 503, 0)
        result = msgspec.json.decode(reply.payload, type=answer)
        if result.error is not None:
            text = f"{operation}: {result.error.description} (code {result.error.code}, error {result.error.err_code})"
            if result.error.err_code == STREAM_NOT_FOUND:
                raise StreamMissingError(f"{text}: run `dynamix provision`")
            raise ApiError(text, result.error.code, result.error.err_code)
        return result

    async def _ask_directly_once(self, operation: str) -> tuple[bytes, bytes] | None:
        reply = await self._round_trip(self._connection.api + operation, b"")
        if reply is None:
            raise ApiError(f"{operation}: no such stream answers (run `dynamix provision`)", UNAVAILABLE, 0)
        status = parse_status(reply.headers)
        if status.code == NOT_FOUND:
            return None
        if status.code:
            raise ApiError(f"{operation}: {status.text} (code {status.code})", status.code, 0)
        return reply.headers, reply.payload

    async def _round_trip(self, subject: str, payload: bytes) -> _Reply | None:
        """The answer, `None` when no server listens."""
        if self._inbox_denial is not None:
            raise self._inbox_denial
        token = b"%d" % next(self._tokens)
        future: asyncio.Future[_Reply | None] = asyncio.get_running_loop().create_future()
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
            future.set_result(None if missing else _Reply(payload, headers or b""))

    def _on_denied(self, subject: str, denial: PermissionDeniedError) -> None:
        if subject == (self._prefix + "*").lower():
            self._inbox_denial = denial
            self._fail_all(denial)
        for asked, future in self._waiting.values():
            if asked == subject and not future.done():
                future.set_exception(denial)

    def _on_reconnected(self) -> None:
        """What was asked before is lost, or its answer is: ask again without waiting for the time-out."""
        self._fail_all(TimeoutError("the connection was lost"))

    def _fail_all(self, error: BusError | TimeoutError) -> None:
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # who asked may have ended
