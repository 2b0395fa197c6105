"""Record all stored messages of a job into a file that can be replayed and inspected.

  dynamix capture JOB -o FILE            from the first stored message on, until the job has ended
  dynamix capture JOB -o FILE --past     what is stored now
  dynamix capture JOB -o FILE --windows 100

The broker keeps only the newest specification: capture a job while it runs to have its start. Ctrl-C completes the
file; after a kill the file is readable up to that point.
"""

import argparse
import asyncio
import contextlib
import os
from pathlib import Path

from dynamix.cli.arguments import add_json_argument, add_output_argument, count
from dynamix.cli.connection import connected, find
from dynamix.cli.jobs import check_job, chosen, known_jobs
from dynamix.cli.output import CAPTURE, Document, write_result, writing
from dynamix.cli.services import beside
from dynamix.cli.source import Source
from dynamix.cli.terminal import ProgressLine, stop_event
from dynamix.recording.capture import CaptureHeader, CaptureWriter, WindowKey
from dynamix.runtime.bus import Bus

FLUSH_EVERY_S = 5.0
"""Interval of flushes: a killed live capture lacks at most these seconds."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("job", metavar="JOB", help="a job's id, or its first characters if they are unique")
    add_output_argument(parser, CAPTURE, "where to write the capture", required=True)
    parser.add_argument(
        "--past", action="store_true", help="record only what is stored now, also if the job is running"
    )
    parser.add_argument("--windows", type=count(), metavar="N", help="end after the job's first N stored windows")
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
            return await capture(bus, job, Path(arguments.output), stop, past=arguments.past, most=arguments.windows)


async def capture(
    bus: Bus, job: str, path: Path, stop: asyncio.Event, *, past: bool = False, most: int | None = None
) -> Document:
    """Write a job's records to a file, until it has ended, `stop` is set or its first `most` windows are there.

    A window is complete when the first report of the next one comes: a window takes longer than deciding on it.
    """
    windows: set[WindowKey] = set()
    is_full = False
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
                    window = record.key if record.kind == "report" else None
                    if window is not None and window not in windows and len(windows) == most:
                        is_full = True
                        break
                    windows |= {window} if window is not None else set()
                    writer.write_record(record)
                progress.show(
                    f"{len(windows)} windows, {writer.num_records} messages, {writer.num_bytes / 1024:.0f} KiB"
                )
                if is_full:
                    break
        end = writer.finish("windows" if is_full else source.reason)
    return {
        "file": str(path),
        "job": job,
        "num_windows": len(windows),
        "num_file_bytes": writer.num_bytes,
        "end": end,
    }
