"""Record a job: all its stored messages, into a file that can be replayed and inspected.

  dynamix capture JOB -o FILE            from the first stored message on, until the job has ended
  dynamix capture JOB -o FILE --past     what is stored now
  dynamix capture JOB -o FILE --windows 100

JOB is a job's id or how it begins. The file begins with the specification that is stored: capture a job while it runs
to have its start, since the broker keeps only the newest. Ctrl-C finishes the file; a kill leaves a readable beginning.
"""

import argparse
import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

from dynamix.cli.connection import connected, find
from dynamix.cli.errors import MisuseError, check_counts
from dynamix.cli.jobs import check_job, find_job
from dynamix.cli.output import Document, add_json_argument, add_output_argument, write_result, writing
from dynamix.cli.progress import ProgressLine, stop_event
from dynamix.cli.source import Source
from dynamix.recording.capture import CaptureHeader, CaptureWriter, Record
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Report

PLAIN_EVERY_S = 5.0
FLUSH_EVERY_S = 5.0
"""At most these last seconds of a live capture are lost when the process is killed."""


class CaptureCounts:
    """Counts records as they are written: by kind, and the windows (generation, index) that some node reported."""

    def __init__(self, most_windows: int | None) -> None:
        self.kinds: Counter[str] = Counter()
        self.windows: set[tuple[int, int]] = set()
        self._most_windows = most_windows

    def count_record(self, record: Record) -> bool:
        """Count a record; False, without counting it, when it begins a window beyond the wanted number.

        The messages that follow from the last wanted window come before the next one's first report, as a rule: a
        window takes longer than deciding on it.
        """
        kind = "foreign"  # the token of another program
        with contextlib.suppress(ValueError):  # what cannot be decoded is counted, too
            kind = subjects.parse(record.subject).kind
            if kind == "report":
                report = decode(Report, record.subject, record.payload)
                window = (report.generation, report.window)
                if window not in self.windows and len(self.windows) == self._most_windows:
                    return False
                self.windows.add(window)
        self.kinds[kind] += 1
        return True


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("job", metavar="JOB", help="the job's id, or how it begins if that is one job")
    add_output_argument(parser, None, "where to write the capture", required=True)
    parser.add_argument("--past", action="store_true", help="only what is stored now, also of a job that runs")
    parser.add_argument("--windows", type=int, metavar="N", help="end after the job's first N stored windows")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Capture to the end; 0 when the file is complete."""
    check_counts(arguments, "windows")
    check_job(arguments.job)
    path = Path(arguments.output)
    if path.exists() and not arguments.force:
        raise MisuseError(f"{path} exists: choose another name, or overwrite it with --force")
    with writing(path):
        found = asyncio.run(_from_bus(arguments, path))
    write_result(found, _sentence(found), arguments.json)
    return 0


async def _from_bus(arguments: argparse.Namespace, path: Path) -> Document:
    async with connected(find(os.environ), "capture") as bus:
        job = (await find_job(bus, arguments.job)).job
        with stop_event() as stop:
            return await _capture(bus, job, path, arguments, stop)


async def _capture(bus: Bus, job: str, path: Path, arguments: argparse.Namespace, stop: asyncio.Event) -> Document:
    counts = CaptureCounts(arguments.windows)
    with (
        CaptureWriter(path, CaptureHeader.of(job), overwrite=arguments.force) as writer,
        ProgressLine(PLAIN_EVERY_S, keep=True) as progress,
    ):
        async with Source(bus, job, past=arguments.past, stop=stop) as source:
            if not arguments.past:
                progress.write_line(f"Capturing {job} until it has ended; Ctrl-C finishes {path} before.")
            num_bytes, is_full = await _write(source, writer, counts, progress)
        end = writer.finish("windows" if is_full else source.reason)
    return {
        "file": str(path),
        "job": job,
        "num_windows": len(counts.windows),
        "kinds": dict(sorted(counts.kinds.items())),
        "num_payload_bytes": num_bytes,
        "num_file_bytes": writer.num_bytes,
        "end": end,
    }


async def _write(
    source: Source, writer: CaptureWriter, counts: CaptureCounts, progress: ProgressLine
) -> tuple[int, bool]:
    """Write all records; returns the bytes of all payloads, and whether the wanted windows are complete."""
    num_bytes = 0
    async with contextlib.aclosing(_flushing(source, writer)) as batches:
        async for batch in batches:
            for record in batch:
                if not counts.count_record(record):
                    return num_bytes, True
                writer.write_record(record)
                num_bytes += len(record.payload)
            progress.show(
                f"{len(counts.windows)} windows, {writer.num_records} messages, "
                f"{num_bytes / 1024:.0f} KiB ({writer.num_bytes / 1024:.0f} in the file)"
            )
    return num_bytes, False


async def _flushing(source: Source, writer: CaptureWriter) -> AsyncGenerator[list[Record], None]:
    """The batches of the source; the file is flushed every few seconds, also while no batch comes."""
    due_s = time.monotonic() + FLUSH_EVERY_S
    reading = asyncio.create_task(source.read())
    try:
        while True:
            await asyncio.wait([reading], timeout=max(0.0, due_s - time.monotonic()))
            if time.monotonic() >= due_s:
                writer.flush()
                due_s = time.monotonic() + FLUSH_EVERY_S
            if reading.done():
                if not (batch := reading.result()):
                    return
                reading = asyncio.create_task(source.read())
                yield batch
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _sentence(found: Document) -> str:
    why = {
        "ended": "the job has ended",
        "stored": "as stored so far",
        "windows": "as many windows as asked for",
        "interrupted": "interrupted, all before is there",
    }[found["end"].reason]
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["kinds"].items())
    num_left_out = found["end"].num_left_out
    left_out = f"; {num_left_out} messages over 1 MiB left out" if num_left_out else ""
    return (
        f"{found['file']}: {found['num_windows']} windows of {found['job']} ({why}): {kinds}{left_out}; "
        f"{found['num_file_bytes'] / 1024:.0f} KiB for {found['num_payload_bytes'] / 1024:.0f}"
    )
