"""One stream's messages of a job, as they come: the wait for more can be left and taken up again."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from dynamix.recording.capture import Record
from dynamix.runtime.bus import Bus, BusMessage


class Tail:
    """`async with Tail(...) as tail:`; `tail.waiting` is done when there is more, `tail.take_records()` hands it out.

    Attributes:
        stream: its name.
        sequence: of the last message taken, 0 before the first.
        newest_ns: the latest time of a message taken.
        waiting: the wait for the next batch. It is never cancelled while the context lasts: a cancelled read could
            lose the batch that it was about to return.
    """

    waiting: asyncio.Task[list[BusMessage]]

    def __init__(self, bus: Bus, stream: str, subjects: Sequence[str]) -> None:
        self.stream = stream
        self.sequence = 0
        self.newest_ns = 0
        self._bus = bus
        self._subjects = subjects
        self._consumer = bus.consume(stream, subjects, start="all")

    async def __aenter__(self) -> Self:
        await self._consumer.__aenter__()
        self._wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.waiting.cancel()
        await asyncio.gather(self.waiting, return_exceptions=True)
        await self._consumer.__aexit__(kind, error, trace)

    async def stored(self) -> int:
        """Sequence of the newest message that the stream has of the job now, 0 when it has none."""
        newest = [await self._bus.last(self.stream, subject) for subject in self._subjects]
        return max((message.sequence for message in newest if message is not None), default=0)

    def take_records(self) -> list[Record]:
        """The batch that was waited for. Raises BusError when the stream cannot be read any more."""
        batch = self.waiting.result()
        self.sequence = batch[-1].sequence
        self.newest_ns = max(self.newest_ns, *(message.timestamp_ns for message in batch))
        self._wait()
        return [
            Record(self.stream, one.sequence, one.timestamp_ns, one.subject, one.message_id, one.payload)
            for one in batch
        ]

    def _wait(self) -> None:
        self.waiting = asyncio.create_task(anext(self._consumer), name=f"capture of {self.stream}")
