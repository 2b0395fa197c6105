"""Record a job: all that the streams hold of it, into a file that can be replayed and inspected.

  dynamix capture JOB -o FILE            from the first stored message on, until the job has ended
  dynamix capture JOB -o FILE --past     what is stored now
  dynamix capture JOB -o FILE --windows 100

JOB is a job's id or how it begins. The file begins with the specification that is stored: capture a job while it runs
to have its start, since the broker keeps only the newest. Ctrl-C finishes the file; a kill leaves a readable beginning.
"""

import argparse
import asyncio
import contextlib
import datetime as dt
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from dynamix.cli.broker import connected
from dynamix.cli.connection import find
from dynamix.cli.errors import CommandError
from dynamix.cli.jobs import find_job
from dynamix.cli.output import STANDARD_OUTPUT, add_json_argument, output_path, write_json
from dynamix.recording.capture import CaptureEnd, CaptureHeader, CaptureWriter, Record, fingerprint
from dynamix.runtime.bus import Bus

from .counts import CaptureCounts
from .progress import Progress
from .source import Source

FLUSH_EVERY_S = 5.0
"""At most so much of a live capture is lost when this process is killed."""


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    file: str
    job: str
    num_windows: int
    kinds: dict[str, int]
    num_payload_bytes: int
    num_file_bytes: int
    end: CaptureEnd


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("job", metavar="JOB", help="the job's id, or how it begins if that is one job")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=output_path(None, streams=False),
        required=True,
        help="where to write the capture",
    )
    parser.add_argument("--past", action="store_true", help="only what is stored now, also of a job that runs")
    parser.add_argument("--windows", type=int, metavar="N", help="end after the job's first N stored windows")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    add_json_argument(parser)


def run(namespace: argparse.Namespace) -> int:
    """Capture until there is no more; 0 when the file is whole."""
    if namespace.windows is not None and namespace.windows < 1:
        raise CommandError(f"--windows {namespace.windows}: say a number from 1 on", exit_code=2)
    path = Path(namespace.output)
    if path.exists() and not namespace.force:
        raise CommandError(f"{path} exists: choose another name, or overwrite it with --force", exit_code=2)
    try:
        found = asyncio.run(_from_bus(namespace, path))
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from error
    if namespace.json is not None:
        write_json(found, namespace.json)
    if namespace.json != STANDARD_OUTPUT:
        print(_sentence(found))
    return 0


async def _from_bus(namespace: argparse.Namespace, path: Path) -> Captured:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with connected(find(os.environ), "capture") as bus:
        job = (await find_job(bus, namespace.job)).job
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        try:
            return await _capture(bus, job, path, namespace, stop)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


async def _capture(bus: Bus, job: str, path: Path, namespace: argparse.Namespace, stop: asyncio.Event) -> Captured:
    counts = CaptureCounts(namespace.windows)
    created = dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    header = CaptureHeader(job=job, created=created, fingerprint=fingerprint())
    with CaptureWriter(path, header, overwrite=namespace.force) as writer, Progress(job) as progress:
        async with Source(bus, job, past=namespace.past, stop=stop) as source:
            if not namespace.past:
                print(f"Capturing {job} until it has ended; Ctrl-C finishes {path} before.", file=sys.stderr)
            num_bytes, is_full = await _write(source, writer, counts, progress)
        end = writer.finish("windows" if is_full else source.reason)
    return Captured(
        file=str(path),
        job=job,
        num_windows=counts.num_windows,
        kinds=dict(sorted(counts.kinds.items())),
        num_payload_bytes=num_bytes,
        num_file_bytes=writer.num_bytes,
        end=end,
    )


async def _write(source: Source, writer: CaptureWriter, counts: CaptureCounts, progress: Progress) -> tuple[int, bool]:
    """Write until there is no more; the bytes of all payloads, and whether the wanted windows are full."""
    num_bytes = 0
    async with contextlib.aclosing(_flushing(source, writer)) as batches:
        async for batch in batches:
            for record in batch:
                if not counts.count_record(record):
                    return num_bytes, True
                writer.write_record(record)
                num_bytes += len(record.payload)
            progress.show(counts.num_windows, writer.num_records, num_bytes, writer.num_bytes)
    return num_bytes, False


async def _flushing(source: Source, writer: CaptureWriter) -> AsyncGenerator[list[Record], None]:
    """What the source gives; meanwhile what was written is flushed, also while nothing comes."""
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


def _sentence(found: Captured) -> str:
    why = {
        "ended": "the job has ended",
        "stored": "as stored so far",
        "windows": "as many windows as asked for",
        "interrupted": "interrupted, all before is there",
    }[found.end.reason]
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.kinds.items())
    left_out = f"; {found.end.num_left_out} messages over 1 MiB left out" if found.end.num_left_out else ""
    return (
        f"{found.file}: {found.num_windows} windows of {found.job} ({why}): {kinds}{left_out}; "
        f"{found.num_file_bytes / 1024:.0f} KiB for {found.num_payload_bytes / 1024:.0f}"
    )
