"""Reading a stream: batches in stream order, each sequence once, whatever happens to connection and broker."""

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Self

from dynamix.runtime.bus.broker.connection import BrokerConnection
from dynamix.runtime.bus.broker.errors import (
    BusError,
    ConnectionClosedError,
    PermissionDeniedError,
    SequenceRegressError,
    StreamMissingError,
)
from dynamix.runtime.bus.broker.requests import Requests

from .broker_consumer import BrokerConsumer, Start, StreamPosition
from .message import BusMessage
from .pull import HEARTBEAT_S, Pull, new_inbox
from .statistics import HandlingStatistics

logger = logging.getLogger(__name__)

MIN_CAPACITY = 1024
MAX_BUFFERED_BYTES = 8 << 20
SILENT_BEATS = 3
"""Broken when nothing, not even a heartbeat, came for so many intervals."""
QUIET_BEATS = 3
"""After so many intervals without a message, and after each as many, the reader asks whether one should have come."""
REOPEN_WAIT_S = 0.25
MAX_REOPEN_WAIT_S = 2.0


class Consumer:
    """`async with bus.consume(...) as consumer: async for batch in consumer: ...`; made by `Bus.consume`.

    Without `durable` the broker keeps an unnamed consumer, recreated behind the last message after each
    interruption. With `durable` it keeps what was acknowledged; one process at a time uses a durable name.
    """

    def __init__(
        self,
        connection: BrokerConnection,
        requests: Requests,
        stream: str,
        subjects: Sequence[str],
        *,
        start: Start,
        durable: str | None = None,
        max_batch: int = 512,
        counters: dict[str, int],
        statistics: HandlingStatistics,
    ) -> None:
        if max_batch < 1 or not subjects:
            raise ValueError(f"a consumer needs at least one subject and max_batch >= 1, not {subjects}, {max_batch}")
        self._connection = connection
        self._stream = stream
        self._durable = durable
        self._max_batch = max_batch
        self._capacity = max(MIN_CAPACITY, 2 * max_batch)
        self._broker_side = BrokerConsumer(
            connection=connection,
            requests=requests,
            stream=stream,
            subjects=tuple(subjects),
            durable=durable,
            position=StreamPosition(start),
        )
        self._buffer: collections.deque[BusMessage] = collections.deque()
        self._bytes = 0
        self._unacknowledged: collections.deque[tuple[int, bytes]] = collections.deque()
        self._arrived = asyncio.Event()
        self._broken = False
        self._wake = asyncio.Event()
        self._error: BusError | None = None
        self._ended = False
        self._pull: Pull | None = None
        self._inbox = new_inbox(connection)
        """Where all pulls of a durable consumer listen."""
        self._owed = 0
        """The message that the stream's leader had for us at the last look; 0: none."""
        self._keeper: asyncio.Task[None] | None = None
        self._counters = counters
        self._statistics = statistics
        self._handed_out_ns = 0
        self._forget: list[Callable[[], None]] = []

    async def __aenter__(self) -> Self:
        self._forget = [
            self._connection.when_reconnected(lambda: self.break_off("the connection was lost")),
            self._connection.when_closed(lambda: self.fail(ConnectionClosedError("the connection is closed"))),
            self._connection.when_denied(self._on_denied),
        ]
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise
        self._keeper = asyncio.create_task(self._keep_alive(), name=f"consumer of {self._stream}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[BusMessage]:
        """All messages now queued, at least one, at most `max_batch`.

        Raises:
            BusError: when the stream cannot be read any more; the text says why.
        """
        self._note_handled()
        while not self._ended and self._error is None and not self._buffer:
            self._arrived.clear()
            await self._arrived.wait()
        if self._ended:
            raise StopAsyncIteration
        if self._error is not None:
            raise self._error
        batch = self._take()
        self._counters["received"] += len(batch)
        await self._ask_for_more()
        self._statistics.num_messages += len(batch)
        self._handed_out_ns = time.monotonic_ns()
        return batch

    async def ack(self, message: BusMessage) -> None:
        """Acknowledge this and every earlier message; a restart goes on behind it. Only with `durable`.

        An acknowledgement lost with the connection is made good by the next one, or those messages come again.
        """
        if self._durable is None:
            raise ValueError("ack() needs a durable consumer: pass durable=NAME to consume()")
        reply = b""
        while self._unacknowledged and self._unacknowledged[0][0] <= message.sequence:
            reply = self._unacknowledged.popleft()[1]
        if reply:
            await self._connection.send(reply.decode(), b"+ACK")

    def end(self) -> None:
        """Let the reader's loop end at once; what is queued is read again after a restart."""
        self._ended = True
        self._arrived.set()

    async def close(self) -> None:
        """End, and remove what the broker keeps for an unnamed consumer."""
        self.end()
        self._note_handled()
        for forget in self._forget:
            forget()
        self._forget = []
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._pull is not None:
            pull, self._pull = self._pull, None
            await pull.close()
            if self._durable is None and pull.has_begun and self._connection.connected.is_set():
                await self._broker_side.forget(pull.consumer)

    def _note_handled(self) -> None:
        """The next batch is asked for, or none any more."""
        if self._handed_out_ns:
            self._statistics.processing_ns += time.monotonic_ns() - self._handed_out_ns
            self._handed_out_ns = 0

    def _take(self) -> list[BusMessage]:
        buffer = self._buffer
        if len(buffer) <= self._max_batch:
            batch = list(buffer)
            buffer.clear()
            self._bytes = 0
            return batch
        batch = [buffer.popleft() for _ in range(self._max_batch)]
        self._bytes -= sum(len(message.payload) for message in batch)
        return batch

    def want_more(self) -> None:
        """Let the keeper ask for more."""
        self._wake.set()

    async def _ask_for_more(self) -> None:
        """Ask the broker for as many messages as there is room for, once that is half the capacity."""
        pull = self._pull
        if pull is None or not pull.has_begun or self._bytes >= MAX_BUFFERED_BYTES:
            return
        room = self._capacity - len(self._buffer) - pull.num_asked
        if 2 * room >= self._capacity:
            await pull.ask(room)

    def accept(self, message: BusMessage, reply: bytes) -> None:
        """Queue a message, unless it came before."""
        if self._durable is not None:
            self._unacknowledged.append((message.sequence, reply))
        if not self._broker_side.position.accepts(message.sequence):
            self._counters["received_twice"] += 1
            return
        self._bytes += len(message.payload)
        self._buffer.append(message)
        if not self._arrived.is_set():
            self._arrived.set()

    def break_off(self, reason: str) -> None:
        """Give up the present pull; the keeper opens a new one."""
        if self._broken:
            return
        logger.info("consumer of %s is reopened: %s", self._stream, reason)
        if self._pull is not None:
            self._pull.stop()
        self._broken = True
        self._wake.set()

    def fail(self, error: BusError) -> None:
        """End the reader's loop with an error."""
        self._error = self._error or error
        self._arrived.set()

    def _on_denied(self, subject: str, denial: PermissionDeniedError) -> None:
        if self._pull is not None and subject in self._pull.subjects:
            self.fail(denial)

    async def _keep_alive(self) -> None:
        """Ask for more when a request has ended, notice silence, and open again whatever broke."""
        while self._error is None:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._wake.wait()
                self._wake.clear()
                await self._ask_for_more()
            except TimeoutError:
                if self._pull is not None:
                    await self._look_after(self._pull)
            if self._broken:
                await self._reopen()

    async def _look_after(self, pull: Pull) -> None:
        """Called once per heartbeat interval: is the broker silent, or does it owe us messages?"""
        if pull.count_silence() >= SILENT_BEATS:
            self.break_off("the broker fell silent")
        elif self._durable is None and pull.quiet_beats and pull.quiet_beats % QUIET_BEATS == 0:
            await self._look_for_owed()

    async def _look_for_owed(self) -> None:
        """Break off where the stream's leader had the same message for us at the last look, `QUIET_BEATS` ago.

        A cluster places an unnamed consumer on any server. One that was cut off may catch up with the stream minutes
        later than it answers again, and delivers nothing meanwhile. A durable one has a leader of its own, elected.
        """
        if self._broker_side.num_replicas == 1:
            return
        before = self._owed
        with contextlib.suppress(BusError):  # asked again; a look is no reason to end a reader
            self._owed = await self._broker_side.find_owed()
            if self._owed and self._owed == before:
                self.break_off(f"it was not sent message {self._owed}, so its server's copy lags behind")

    async def _reopen(self) -> None:
        """Open a new consumer behind the last message; tries until it works or cannot work."""
        wait_s = REOPEN_WAIT_S
        self._counters["consumer_resets"] += 1
        while self._error is None:
            await self._connection.connected.wait()
            self._broken = False
            try:
                await self._open()
            except (PermissionDeniedError, StreamMissingError, SequenceRegressError, ConnectionClosedError) as error:
                self.fail(error)
            except BusError as error:
                logger.warning("cannot read %s yet: %s", self._stream, error)
            else:
                return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_REOPEN_WAIT_S)

    async def _open(self) -> None:
        inbox = self._inbox if self._durable is not None else new_inbox(self._connection)
        before, self._pull = self._pull, Pull(self._connection, self._stream, inbox, self)
        await self._pull.listen()
        if before is not None:
            await before.close()
        self._unacknowledged.clear()
        self._pull.begin(*await self._broker_side.open())
        await self._ask_for_more()
