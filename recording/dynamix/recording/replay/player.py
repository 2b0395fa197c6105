"""A capture as it plays: its records in order, as fast as they are wanted or at the pace of the recording."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from dynamix.recording.capture import CutOffError, Record, records

Speed = Literal["original", "max"]
OnProgress = Callable[["Tape"], None]

MAX_BATCH = 512
"""Records handed out at once."""


class Tape:
    """Plays a capture once.

    Attributes:
        num_records: handed out so far.
        recorded_s: how far it has played, in seconds of the broker's time.
        cut_off: why the file ends early; empty when it is whole.
    """

    def __init__(self, path: Path, *, speed: Speed, stop: asyncio.Event, on_progress: OnProgress | None = None) -> None:
        self.num_records = 0
        self.recorded_s = 0.0
        self.cut_off = ""
        self._records = self._read(path)
        self._is_paced = speed == "original"
        self._stop = stop
        self._on_progress = on_progress
        self._next: deque[Record] = deque()
        self._begun_s = 0.0
        self._begun_ns = 0

    async def read(self) -> list[Record]:
        """The next records: at least one, or none when the capture is over or the replay was stopped.

        Lets the event loop run, so that a signal is heard also at full speed.
        """
        await asyncio.sleep(0)
        if self._is_paced:
            await self._wait_until_due()
        batch: list[Record] = []
        while len(batch) < MAX_BATCH and not self._stop.is_set() and self._peek() is not None and self._is_due():
            batch.append(self._next.popleft())
        if batch:
            self.num_records += len(batch)
            self.recorded_s = max(self.recorded_s, (batch[-1].timestamp_ns - self._begun_ns) / 1e9)
            if self._on_progress is not None:
                self._on_progress(self)
        return batch

    def end(self) -> None:
        """Hand out no more."""
        self._records = iter(())
        self._next.clear()

    def _peek(self) -> Record | None:
        if not self._next:
            record = next(self._records, None)
            if record is None:
                return None
            if not self._begun_ns:
                self._begun_ns, self._begun_s = record.timestamp_ns, time.monotonic()
            self._next.append(record)
        return self._next[0]

    def _is_due(self) -> bool:
        return not self._is_paced or self._wait_s() <= 0

    def _wait_s(self) -> float:
        record = self._next[0]
        return self._begun_s + (record.timestamp_ns - self._begun_ns) / 1e9 - time.monotonic()

    async def _wait_until_due(self) -> None:
        if self._peek() is None:
            return
        try:
            async with asyncio.timeout(max(0.0, self._wait_s())):
                await self._stop.wait()
        except TimeoutError:
            return

    def _read(self, path: Path) -> Iterator[Record]:
        try:
            yield from records(path)
        except CutOffError as error:
            self.cut_off = str(error)
