"""Playback: a capture in, its records out, at full speed or at the recorded pace."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal

from dynamix.recording.capture import CutOffError, Record, records

Speed = Literal["original", "max"]
OnProgress = Callable[["Player"], None]

BATCH = 512
"""At full speed, signals are handled and progress is shown after so many records."""


class ReplayError(RuntimeError):
    """A capture that cannot be replayed as requested; the text names what is missing and how to get it."""


class Player:
    """Reads a capture once, at full speed or at the recorded pace.

    Attributes:
        stop: ends it.
        num_records: records returned so far.
        recorded_s: seconds of the broker's time from the first record to the last one returned.
        cut_off: why the file ends early; empty when it is complete.
    """

    def __init__(self, path: Path, *, speed: Speed, stop: asyncio.Event, on_progress: OnProgress | None) -> None:
        self.stop = stop
        self.num_records = 0
        self.recorded_s = 0.0
        self.cut_off = ""
        self._path = path
        self._is_paced = speed == "original"
        self._on_progress = on_progress

    async def __aiter__(self) -> AsyncIterator[Record]:
        begun_s, begun_ns = time.monotonic(), 0
        try:
            for record in records(self._path):
                begun_ns = begun_ns or record.timestamp_ns
                at_s = (record.timestamp_ns - begun_ns) / 1e9
                if self._is_paced:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(max(0.0, begun_s + at_s - time.monotonic())):
                            await self.stop.wait()
                if self._is_paced or self.num_records % BATCH == 0:
                    await asyncio.sleep(0)
                    if self._on_progress is not None:
                        self._on_progress(self)
                if self.stop.is_set():
                    return
                self.num_records += 1
                self.recorded_s = max(self.recorded_s, at_s)
                yield record
        except CutOffError as error:
            self.cut_off = str(error)
