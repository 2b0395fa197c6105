"""Write a job, or a capture, as a table with a row per rank and window.

  dynamix export job.dxc -o job.parquet           the file's ending sets the format
  dynamix export JOB --format csv                 what the broker has stored of a job, to standard output
  dynamix export JOB --format jsonl | head -1     an object per row, null for unknown values

A name that is a file, or has a slash or a dot in it, is a capture. The columns are those of `dynamix.recording.load`
(docs/replay.md). Parquet needs the extra `tables` and a file.
"""

import argparse
import asyncio
import contextlib
import csv
import io
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from dynamix.cli.arguments import add_output_argument
from dynamix.cli.commands.capture import capture
from dynamix.cli.connection import connected, find
from dynamix.cli.errors import CommandError, MisuseError, explained, reading
from dynamix.cli.jobs import check_job, chosen, known_jobs
from dynamix.cli.output import write_file
from dynamix.recording import CaptureTable, load
from dynamix.recording.capture import CaptureError
from dynamix.runtime.output_files import FileKind

TABLE = FileKind("a table of this program", lambda head: head.startswith((b"PAR1", b"job,generation,", b'{"job":')))

FORMATS = ("parquet", "csv", "jsonl")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("job", metavar="JOB|FILE", help="a job on the broker, or a capture")
    parser.add_argument("--format", choices=FORMATS, help="file format (default: by the ending of the file, else csv)")
    add_output_argument(parser, TABLE, "where to write the table (default: standard output)")


def run(arguments: argparse.Namespace) -> int:
    """Write the table; 0 when it is written."""
    written = arguments.output or ""
    form = arguments.format or Path(written).suffix.removeprefix(".") or "csv"
    if form not in FORMATS:
        raise MisuseError(f"{written}: its ending names no format: choose one with --format {'|'.join(FORMATS)}")
    if form == "parquet" and not written:
        raise MisuseError("Parquet is not text: name a file with -o FILE")
    job: str = arguments.job
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        with capture_of(job, "export") as path, explained(CaptureError), reading(job):
            table = load(path)
    for note in noted:
        print(f"dynamix export: {note.message}", file=sys.stderr)
    if table.num_rows == 0:
        raise CommandError(f"{job} has no window yet: there is nothing to write")
    content = _content(table, form)
    if written:
        write_file(written, content)
    else:
        sys.stdout.buffer.write(content)
    return 0


def is_file_name(text: str) -> bool:
    """Whether a capture is meant, also one that does not exist, and not a job: no id has a slash or a dot."""
    return "/" in text or "." in text or Path(text).is_file()


@contextlib.contextmanager
def capture_of(name: str, command: str) -> Iterator[Path]:
    """The capture of that name, or one of what the broker has now of the job of that name."""
    if is_file_name(name):
        yield Path(name)
        return

    async def write(path: Path) -> None:
        async with connected(find(os.environ), command) as bus:
            await capture(bus, chosen(await known_jobs(bus), name).job, path, asyncio.Event(), past=True)

    check_job(name, or_file=True)
    with TemporaryDirectory(prefix="dynamix-") as directory:
        path = Path(directory) / name
        asyncio.run(write(path))
        yield path


def _content(table: CaptureTable, form: str) -> bytes:
    """A file of the table; in text numbers as Python writes them, so that they are read back exactly."""
    if form == "jsonl":
        return msgspec.json.Encoder().encode_lines(table.rows())
    if form == "csv":  # what is not known is empty
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
        return text.getvalue().encode()
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table.to_arrow(), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content
