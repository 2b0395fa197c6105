"""Publishing to JetStream: our own table of messages in flight, each with a deadline, an identity and retries.

nats-py's `publish_async` has no time-out and never gives the slots of lost messages back; its `publish` makes a request
per message. Here a message without an acknowledgement is retransmitted with the same `Nats-Msg-Id`, which the stream
drops when it has it already.
"""

import asyncio
import collections
import contextlib
import functools
import itertools
import logging
import re
from dataclasses import dataclass

import msgspec

from dynamix.runtime.rate_limit import RateLimit
from dynamix.schemas.subjects import KINDS

from .connection import NO_RESPONDERS, BrokerConnection, parse_status
from .errors import (
    STILL_IN_PROCESS,
    STORE_FAILED,
    WRONG_LAST_SEQUENCE,
    BusError,
    ConnectionClosedError,
    PermissionDeniedError,
    PublishError,
    StaleWriterError,
    StreamFullError,
    StreamMissingError,
)
from .requests import MESSAGE_ID, SIGNED, Answer, Refusal

logger = logging.getLogger(__name__)

ACK_TIMEOUT_S = 0.5
MAX_ACK_TIMEOUT_S = 2.0
BUDGET_S = 60.0
MAX_IN_FLIGHT = 2000
MAX_IN_FLIGHT_BYTES = 32 << 20
RESUME_AT = MAX_IN_FLIGHT * 3 // 4
RESUME_AT_BYTES = MAX_IN_FLIGHT_BYTES * 3 // 4
"""A full table takes new messages again at this fill: waking the publisher for each single slot costs a write each."""
LATE_S = 5.0
"""A message without an acknowledgement for so long is shown as such: a new leader of a cluster takes as long."""
LATELY_S = 60.0
"""Messages that failed are shown for so long."""
MAX_LATELY = 1000
TICK_S = 0.1
HEADER_ROOM_BYTES = 1024
SERVER_ERROR = 500
"""JetStream's codes from here on may pass: trying again can help."""
TOO_MANY_REQUESTS = 429
"""The stream's own queue is full, since some client sends more than the broker stores; nothing is lost by waiting."""
BUSY_TICK_S = 0.02
"""While that lasts, a try is lucky only where a place has just become free: doubled waits would take seconds."""
INSIST_S = 1.0
MAX_INSISTENT = 32
"""Most messages in flight that are retried at once; others wait: the disk stalls, or we send too much."""
EXPECTED_LAST = "Nats-Expected-Last-Subject-Sequence"

_OF_ONE_SENDER = frozenset(kind.name for kind in KINDS if kind.senders in {("trainer",), ("collector",)})
"""Kinds of which no two users send the same message; other services replace each other."""
_SUBJECT = re.compile(r"[^\s.*>\x00-\x1f]+(\.[^\s.*>\x00-\x1f]+)*")


@functools.lru_cache(maxsize=4096)
def check_subject(subject: str) -> str:
    """Return `subject` when one can publish on it.

    Raises:
        ValueError: when it has empty tokens, wildcards or white space (which would end the protocol's line).
    """
    if _SUBJECT.fullmatch(subject) is None:
        raise ValueError(f"{subject!r} is no subject to publish on")
    return subject


class _Ack(Answer):
    seq: int = 0
    duplicate: bool = False


_decode_ack = msgspec.json.Decoder(_Ack).decode


@dataclass(slots=True, eq=False)
class InFlight:
    """One message in flight: what to retransmit, its deadline, and the future that waits for it."""

    subject: str
    payload: bytes
    headers: dict[str, str]
    size: int
    future: asyncio.Future[int]
    since: float
    due: float
    num_retries: int = 0
    no_stream: bool = False


class Publisher:
    """The table of messages in flight of one connection."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self._prefix = f"{connection.inbox}.a."
        self._tokens = itertools.count()
        self.table: dict[bytes, InFlight] = {}
        """Messages not acknowledged yet."""
        self._bytes = 0
        self._full = False
        self._room = asyncio.Event()
        self._busy = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._failure: BusError | None = None
        self._broker_is_busy = False
        self._limit = RateLimit(per_s=1.0)
        self._retries: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._failed_at: collections.deque[float] = collections.deque(maxlen=MAX_LATELY)
        self._counters = connection.counters

    @property
    def num_late(self) -> int:
        """Messages without an acknowledgement for `LATE_S`."""
        before = self._loop.time() - LATE_S
        return sum(entry.since <= before for entry in list(self.table.values()))  # also asked in other threads

    @property
    def num_failed_lately(self) -> int:
        """Messages that were not stored, in the last `LATELY_S`; at most `MAX_LATELY`."""
        after = self._loop.time() - LATELY_S
        return sum(failed > after for failed in list(self._failed_at))

    async def open(self) -> None:
        """Listen for acknowledgements and start to watch deadlines."""
        await self._connection.subscribe(self._prefix + "*", self._on_ack)
        self._connection.when("reconnected", self._on_reconnected)
        self._connection.when("denied", self._on_denied)
        self._connection.when("closed", lambda: self._fail_all(ConnectionClosedError("the connection is closed")))
        self._retries = asyncio.create_task(self._retry(), name="publish retries")

    async def close(self) -> None:
        """Stop; what is still in flight fails."""
        if self._retries is not None:
            self._retries.cancel()
            await asyncio.gather(self._retries, return_exceptions=True)
        self._fail_all(ConnectionClosedError("the bus was closed before the broker acknowledged"))

    async def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False when that takes longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return not self.table

    async def publish(
        self,
        subject: str,
        payload: bytes,
        message_id: str,
        expected_last: int | None = None,
    ) -> asyncio.Future[int]:
        """Put a message in flight, waiting while the table is full; the future is its sequence in the stream.

        A stream compares identities over all its subjects: who knows that of a message could publish another one with
        it before, and the broker would drop this one as a duplicate. So they are signed where one user sends them.

        Raises:
            ValueError: when payload and headers together are over the broker's limit.
            BusError: when the connection is closed.
        """
        if message_id.partition(":")[0] in _OF_ONE_SENDER:
            message_id += SIGNED + self._connection.login.sign_id(message_id)
        size = len(payload) + len(message_id)
        if size > self._connection.max_payload - HEADER_ROOM_BYTES:
            # nats-py checks the payload alone; with headers over the limit the broker cuts the connection for good
            raise ValueError(
                f"{size} bytes for {subject} are over the broker's limit of {self._connection.max_payload} "
                f"less {HEADER_ROOM_BYTES} for the protocol: send less, or raise max_payload"
            )
        while self._failure is None and (len(self.table) >= MAX_IN_FLIGHT or self._bytes >= MAX_IN_FLIGHT_BYTES):
            self._full = True
            self._room.clear()
            await self._room.wait()
        if self._failure is not None:
            raise self._failure
        headers = {MESSAGE_ID: message_id}
        if expected_last is not None:
            headers[EXPECTED_LAST] = str(expected_last)
        future, now = self._loop.create_future(), self._loop.time()
        entry = InFlight(check_subject(subject), payload, headers, size, future, now, now + ACK_TIMEOUT_S)
        token = b"%d" % next(self._tokens)
        self.table[token] = entry
        self._bytes += size
        if len(self.table) == 1:
            self._busy.set()
            self._idle.clear()
        await self._send(token, entry)
        return entry.future

    async def _send(self, token: bytes, entry: InFlight) -> None:
        try:
            await self._connection.send(entry.subject, entry.payload, self._prefix + token.decode(), entry.headers)
        except BusError as error:
            self._fail(token, entry, error)

    def _on_ack(self, subject: bytes, _reply: bytes, payload: bytes, headers: bytes | None) -> None:
        token = subject[len(self._prefix) :]
        entry = self.table.get(token)
        if entry is None:
            return  # the second acknowledgement of a message that was sent twice
        if headers and parse_status(headers).code == NO_RESPONDERS:
            # not final: a broker that just started, or a stream without its leader, looks the same
            entry.no_stream = True
            if self._limit.allow("no stream"):
                logger.warning("no stream takes %s yet: has `dynamix provision` been run?", entry.subject)
            return
        ack = _decode_ack(payload)
        if ack.error is not None:
            self._note_refusal(token, entry, ack.error)
            return
        self._counters["published"] += 1
        if ack.duplicate:
            self._counters["duplicates"] += 1
        self._remove(token, entry)
        if not entry.future.done():
            entry.future.set_result(ack.seq)

    def _note_refusal(self, token: bytes, entry: InFlight, refusal: Refusal) -> None:
        text = f"{entry.subject}: {refusal.description} (error {refusal.err_code})"
        if refusal.err_code in WRONG_LAST_SEQUENCE:
            self._fail(token, entry, StaleWriterError(text))
        elif refusal.err_code == STORE_FAILED and refusal.description.startswith("maximum"):
            # a stream at its own limit that discards nothing: it will not have room in a minute
            self._fail(token, entry, StreamFullError(text))
        elif refusal.err_code == STILL_IN_PROCESS:
            pass  # no refusal: the first copy is acknowledged once it is stored, or a later one tells that it is not
        elif refusal.code >= SERVER_ERROR or refusal.code == TOO_MANY_REQUESTS:  # it is sent once more when it is due
            if refusal.code == TOO_MANY_REQUESTS:
                self._counters["too_many_requests"] += 1
                if len(self.table) <= MAX_INSISTENT and self._loop.time() < entry.since + INSIST_S:
                    self._broker_is_busy = True
                    entry.due = 0.0
            if self._limit.allow(str(refusal.err_code)):
                logger.warning("the broker cannot store now: %s", text)
        else:
            self._fail(token, entry, PublishError(text))

    def _on_reconnected(self) -> None:
        """Messages in flight, or their acknowledgements, may be lost: retransmit all of them."""
        for entry in self.table.values():
            entry.due = 0.0

    def _on_denied(self, subject: str, denial: PermissionDeniedError) -> None:
        if subject == (self._prefix + "*").lower():
            self._fail_all(denial)
        for token, entry in list(self.table.items()):
            if entry.subject.lower() == subject:
                self._fail(token, entry, denial)

    async def _retry(self) -> None:
        while True:
            await self._busy.wait()
            tick_s = BUSY_TICK_S if self._broker_is_busy else TICK_S
            self._broker_is_busy = False
            await asyncio.sleep(tick_s)
            now = self._loop.time()
            for token, entry in list(self.table.items()):
                if entry.future.cancelled() or now >= entry.since + BUDGET_S:
                    error: BusError = PublishError(
                        f"{entry.subject}: no acknowledgement in {BUDGET_S:g} s, sent {1 + entry.num_retries} times"
                    )
                    if entry.no_stream:
                        error = StreamMissingError(f"no stream takes {entry.subject}: run `dynamix provision`")
                    self._fail(token, entry, error)
                elif now >= entry.due and self._connection.connected.is_set():
                    entry.num_retries += 1
                    entry.due = now + min(ACK_TIMEOUT_S * 2**entry.num_retries, MAX_ACK_TIMEOUT_S)
                    self._counters["retries"] += 1
                    await self._send(token, entry)

    def _fail(self, token: bytes, entry: InFlight, error: BusError) -> None:
        self._remove(token, entry)
        if not entry.future.done():
            self._counters["publish_errors"] += 1
            if not isinstance(error, StaleWriterError | ConnectionClosedError):  # nothing is wrong with the store
                self._failed_at.append(self._loop.time())
            entry.future.set_exception(error)
            entry.future.exception()  # counted and logged here: a publisher that does not look is not warned twice
            if self._limit.allow(type(error).__name__):
                logger.warning("not published: %s", error)

    def _fail_all(self, error: BusError) -> None:
        self._failure = error
        for token, entry in list(self.table.items()):
            self._fail(token, entry, error)
        self._room.set()

    def _remove(self, token: bytes, entry: InFlight) -> None:
        if self.table.pop(token, None) is None:
            return
        self._bytes -= entry.size
        if self._full and len(self.table) <= RESUME_AT and self._bytes <= RESUME_AT_BYTES:
            self._full = False
            self._room.set()
        if not self.table:
            self._busy.clear()
            self._idle.set()
