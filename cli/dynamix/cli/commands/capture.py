"""Record all stored messages of a job into a file that can be replayed and inspected.

  dynamix capture JOB -o FILE            from the first stored message on, until the job has ended
  dynamix capture JOB -o FILE --past     what is stored now

The broker keeps only the newest specification: capture a job while it runs to have its start. Ctrl-C completes the
file; after a kill the file is readable up to that point.
"""

import argparse
import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from dynamix.cli.arguments import add_json_argument, add_output_argument
from dynamix.cli.connection import connected, find
from dynamix.cli.jobs import check_job, chosen, known_jobs
from dynamix.cli.output import CAPTURE, Document, write_result, writing
from dynamix.cli.services import beside
from dynamix.cli.terminal import ProgressLine, stop_event
from dynamix.recording.capture import (
    FOREVER_NS,
    CaptureHeader,
    CaptureWriter,
    EndReason,
    Record,
    RecordMerge,
    WindowKey,
)
from dynamix.runtime.bus import Bus, BusMessage
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode_or_none
from dynamix.schemas.messages import Job
from dynamix.schemas.streams import ACTIONS, FEED, JOBS, REPORTS

FLUSH_EVERY_S = 5.0
"""Interval of flushes: a killed live capture lacks at most these seconds."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("job", metavar="JOB", help="a job's id, or its first characters if they are unique")
    add_output_argument(parser, CAPTURE, "where to write the capture", required=True)
    parser.add_argument(
        "--past", action="store_true", help="record only what is stored now, also if the job is running"
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Capture to the end; 0 when the file is complete."""
    check_job(arguments.job)
    with writing(arguments.output):
        found = asyncio.run(_from_bus(arguments))
    text = (
        f"{found['file']}: {found['num_windows']} windows of {found['job']} ({found['end'].reason}), "
        f"{found['end'].num_records} messages in {found['num_file_bytes'] / 1024:.0f} KiB"
    )
    write_result(found, text, arguments.json)
    return 0


async def _from_bus(arguments: argparse.Namespace) -> Document:
    async with connected(find(os.environ), "capture") as bus:
        job = chosen(await known_jobs(bus), arguments.job).job
        with stop_event() as stop:
            return await capture(bus, job, Path(arguments.output), stop, past=arguments.past)


async def capture(bus: Bus, job: str, path: Path, stop: asyncio.Event, *, past: bool = False) -> Document:
    """Write a job's records to a file, until it has ended or `stop` is set; with `past` those stored now."""
    windows: set[WindowKey] = set()
    source = Source(bus, job, past=past, stop=stop)

    async def flush() -> None:
        """Flush the file every few seconds, also while no batch comes. Raises OSError when it cannot be written."""
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            writer.flush()

    with CaptureWriter(path, CaptureHeader.of(job)) as writer, ProgressLine() as progress:
        if not past:
            progress.write_line(f"Capturing {job} until it has ended; Ctrl-C finishes {path} before.")
        async with contextlib.aclosing(source.batches()) as batches, beside(flush()):
            async for batch in batches:
                for record in batch:
                    if record.kind == "report" and record.key is not None:
                        windows.add(record.key)
                    writer.write_record(record)
                progress.show(
                    f"{len(windows)} windows, {writer.num_records} messages, {writer.num_bytes / 1024:.0f} KiB"
                )
        end = writer.finish(source.reason)
    return {
        "file": str(path),
        "job": job,
        "num_windows": len(windows),
        "num_file_bytes": writer.num_bytes,
        "end": end,
    }


# --- the messages of one job from all its streams, in one order, from the first stored one on
#
# FEED drives: once its messages are known up to a time, the other streams are read up to the same time - until one of
# their messages is later, or the broker says that there are no more - and then all of them are in order (see
# `RecordMerge`). No timer takes part, so that a capture of the past and one made live agree.

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
