"""The messages of one job from all its streams, in one order, from the first stored one on.

FEED drives: once its messages are known up to a time, the other streams are read up to the same time - until one of
their messages is later, or the broker says that there are no more - and then all of them are in order (see
`dynamix.recording.capture.RecordMerge`). No timer takes part, so that a capture of the past and one made live agree.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from dynamix.recording.capture import FOREVER_NS, EndReason, Record, RecordMerge
from dynamix.runtime.bus import Bus, BusMessage
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode_or_none
from dynamix.schemas.messages import Job
from dynamix.schemas.streams import ACTIONS, FEED, JOBS, REPORTS

QUIET_S = 2.0
"""After the end of a job its last windows are still on their way; this long after the last message they are not."""


class Tail:
    """One stream's messages of a job; `sequence` is of the last one taken, `newest_ns` the latest time of any."""

    waiting: asyncio.Task[list[BusMessage]]
    """Done when there is more. Never cancelled while the context lasts: a cancelled read could lose its batch."""

    def __init__(self, bus: Bus, stream: str, wanted: Sequence[str]) -> None:
        self.stream = stream
        self.sequence = 0
        self.newest_ns = 0
        self._bus = bus
        self._wanted = wanted
        self._consumer = bus.consume(stream, wanted, start="all")

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Read for as long as the context lasts."""
        async with self._consumer:
            self._wait()
            try:
                yield
            finally:
                self.waiting.cancel()
                await asyncio.gather(self.waiting, return_exceptions=True)

    async def stored(self) -> int:
        """Sequence of the newest message that the stream has of the job now, 0 when it has none."""
        newest = [await self._bus.last(self.stream, subject) for subject in self._wanted]
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


class Source:
    """A job's messages, until `stop`: with `past` those stored now, otherwise until the job has ended.

    The permissions of a watcher are enough.
    """

    def __init__(self, bus: Bus, job: str, *, past: bool, stop: asyncio.Event) -> None:
        self._past = past
        self._stop = stop
        per_node = [subjects.of(kind, job, subjects.ANY) for kind in ("window", "state", "trace", "reward")]
        self._jobs = Tail(bus, JOBS.name, [subjects.of("job", job)])
        self._reports = Tail(bus, REPORTS.name, [subjects.of("report", job, subjects.ANY)])
        self._feed = Tail(bus, FEED.name, [*per_node, subjects.of("applied", job), subjects.of("event", job)])
        self._actions = Tail(bus, ACTIONS.name, [subjects.of("action", job)])
        self._tails = (self._jobs, self._reports, self._feed, self._actions)
        self._merge = RecordMerge()
        self._ends: dict[str, int] = {}
        """End of each stream; empty while the job runs."""
        self._job_ended = False

    @property
    def reason(self) -> EndReason:
        """Why there are no more batches."""
        return "interrupted" if self._stop.is_set() else "stored" if self._past else "ended"

    async def batches(self) -> AsyncGenerator[list[Record], None]:
        """The records in order, as soon as their order is known. Read it within `contextlib.aclosing`."""
        async with contextlib.AsyncExitStack() as stack:
            for tail in self._tails:
                await stack.enter_async_context(tail.reading())
            self._stopping = asyncio.create_task(self._stop.wait())
            stack.callback(self._stopping.cancel)
            if self._past:
                self._ends = await self._stored()
            is_last = False
            while not is_last:
                before, up_to = self._feed.sequence, FOREVER_NS
                is_last = bool(self._ends) and before >= self._ends[FEED.name]
                if not is_last:
                    await self._hear(self._feed, self._jobs)
                    if self._feed.sequence == before and not self._stop.is_set():
                        continue
                    up_to = self._feed.newest_ns
                await self._read_up_to(up_to)
                if self._stop.is_set():
                    return
                if ready := list(self._merge.pop_until(up_to)):
                    yield ready

    async def _read_up_to(self, time_ns: int) -> None:
        """Have the other streams read up to a time, or to their ends."""
        for tail in (self._jobs, self._reports, self._actions):
            if tail.newest_ns > time_ns:
                continue
            end = self._ends[tail.stream] if self._ends else await tail.stored()
            while tail.sequence < end and tail.newest_ns <= time_ns and not self._stop.is_set():
                await self._hear(tail)

    async def _hear(self, *tails: Tail) -> None:
        """Wait for a batch of one of these streams, for `stop`, or for the silence after the end of the job."""
        waits: list[asyncio.Task[Any]] = [self._stopping, *(tail.waiting for tail in tails)]
        quiet_s = QUIET_S if self._job_ended and not self._ends else None
        await asyncio.wait(waits, timeout=quiet_s, return_when=asyncio.FIRST_COMPLETED)
        if self._stop.is_set():
            return
        heard = [tail for tail in tails if tail.waiting.done()]
        for tail in heard:
            for record in tail.take_records():
                self._merge.add_record(record)
                if tail is self._jobs:
                    job = decode_or_none(Job, record.subject, record.payload)
                    self._job_ended = job is not None and job.phase == "ended"
        if not heard:
            self._ends = await self._stored()

    async def _stored(self) -> dict[str, int]:
        return {tail.stream: await tail.stored() for tail in self._tails}
