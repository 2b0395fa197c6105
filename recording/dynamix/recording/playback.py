"""Playback: a capture in, its messages out as a service's bus delivers them, at full speed or at the recorded pace.

Which of them a service gets, and what becomes of its outputs, is decided in `dynamix.recording.replay`.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Literal, Self

from dynamix.recording.capture import CutOffError, Record, records
from dynamix.runtime.bus import BusMessage

Speed = Literal["original", "max"]
OnProgress = Callable[["RecordPlayer"], None]

MAX_BATCH = 512
"""Records returned at once."""


class ReplayError(RuntimeError):
    """A capture that cannot be replayed as requested; the text names what is missing and how to get it."""


class RecordPlayer:
    """Plays a capture once.

    Attributes:
        num_records: records returned so far.
        recorded_s: seconds of the broker's time from the first record to the last one returned.
        cut_off: why the file ends early; empty when it is complete.
    """

    def __init__(self, path: Path, *, speed: Speed, stop: asyncio.Event, on_progress: OnProgress | None = None) -> None:
        self.num_records = 0
        self.recorded_s = 0.0
        self.cut_off = ""
        self._records = self._read(path)
        self._pending: Record | None = None
        self._is_paced = speed == "original"
        self._stop = stop
        self._on_progress = on_progress
        self._begun_s = 0.0
        self._begun_ns = 0

    async def next_records(self) -> list[Record]:
        """Return at least one record, or none at the end of the capture or when the replay was stopped.

        It lets the event loop run, so that a signal is handled at full speed, too.
        """
        await asyncio.sleep(0)
        while (wait_s := self._wait_s()) and not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._stop.wait()
        batch: list[Record] = []
        while len(batch) < MAX_BATCH and not self._stop.is_set() and self._wait_s() == 0.0:
            assert self._pending is not None, "it is due"
            batch.append(self._pending)
            self._pending = None
        if batch:
            self.num_records += len(batch)
            self.recorded_s = max(self.recorded_s, (batch[-1].timestamp_ns - self._begun_ns) / 1e9)
            if self._on_progress is not None:
                self._on_progress(self)
        return batch

    def end(self) -> None:
        """Return no more records."""
        self._records = iter(())
        self._pending = None

    def _wait_s(self) -> float | None:
        """Seconds until the next record is due, 0 at full speed; `None` at the end."""
        if self._pending is None:
            self._pending = next(self._records, None)
            if self._pending is None:
                return None
            if not self._begun_ns:
                self._begun_ns, self._begun_s = self._pending.timestamp_ns, time.monotonic()
        if not self._is_paced:
            return 0.0
        due_s = self._begun_s + (self._pending.timestamp_ns - self._begun_ns) / 1e9
        return max(0.0, due_s - time.monotonic())

    def _read(self, path: Path) -> Iterator[Record]:
        try:
            yield from records(path)
        except CutOffError as error:
            self.cut_off = str(error)


class ReplayedConsumer:
    """`async with bus.consume(...) as consumer: async for batch in consumer: ...`, as the services use it."""

    def __init__(self, next_batch: Callable[[], Awaitable[list[BusMessage]]]) -> None:
        """Deliver what `next_batch` returns, until that is empty."""
        self._next_batch = next_batch

    @classmethod
    def of_stored(cls, batch: list[BusMessage]) -> Self:
        """A consumer of messages that are all known."""
        batches = iter([batch])

        async def next_batch() -> list[BusMessage]:
            return next(batches, [])

        return cls(next_batch)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[BusMessage]:
        batch = await self._next_batch()
        if not batch:
            raise StopAsyncIteration
        return batch

    async def ack(self, message: BusMessage) -> None:
        """Do nothing: no message is delivered twice."""


def acknowledgement(sequence: int) -> asyncio.Future[int]:
    """A publish acknowledgement that has already come."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_result(sequence)
    return future


def bus_message_of(record: Record) -> BusMessage:
    """A record as a consumer delivers it."""
    return BusMessage(record.subject, record.payload, record.sequence, record.timestamp_ns, 0)
