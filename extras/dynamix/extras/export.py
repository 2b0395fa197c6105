"""Write a job, or a capture, as a table with a row per rank and window.

  dynamix export job.dxc -o job.parquet           the file's ending sets the format
  dynamix export JOB --format csv                 what the broker has stored of a job, to standard output
  dynamix export JOB --format jsonl | head -1     an object per row, null for unknown values

A name that is a file, or has a slash in it, is a capture. The columns are those of `dynamix.recording.load`
(docs/replay.md). Parquet needs the extra `tables` and a file.
"""

import argparse
import asyncio
import csv
import io
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec

from dynamix.cli.arguments import add_output_argument
from dynamix.cli.connection import connected, find
from dynamix.cli.errors import CommandError, MisuseError, explained, reading
from dynamix.cli.jobs import check_job, find_job
from dynamix.cli.output import write_file
from dynamix.cli.source import Source
from dynamix.recording import CaptureTable, load, table_of
from dynamix.recording.capture import CaptureError, Record
from dynamix.runtime.output_files import FileKind

TABLE = FileKind("a table of this program", lambda head: head.startswith((b"PAR1", b"job,generation,", b'{"job":')))


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("job", metavar="JOB|FILE", help="a job on the broker, or a capture")
    parser.add_argument(
        "--format", choices=tuple(FORMATS), help="file format (default: by the ending of the file, else csv)"
    )
    add_output_argument(parser, TABLE, "where to write the table (default: standard output)")


def run(arguments: argparse.Namespace) -> int:
    """Write the table; 0 when it is written."""
    written = arguments.output or ""
    form = arguments.format or Path(written).suffix.removeprefix(".") or "csv"
    if form not in FORMATS:
        raise MisuseError(f"{written}: its ending names no format: choose one with --format {'|'.join(FORMATS)}")
    if form == "parquet" and not written:
        raise MisuseError("Parquet is not text: name a file with -o FILE")
    content = FORMATS[form](_table(arguments.job))
    if written:
        write_file(written, content)
    else:
        sys.stdout.buffer.write(content)
    return 0


def _table(job: str) -> CaptureTable:
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        if Path(job).exists() or os.sep in job:
            with explained(CaptureError), reading(job):
                table = load(job)
        else:
            table = asyncio.run(_of_job(job))
    for note in noted:
        print(f"dynamix export: {note.message}", file=sys.stderr)
    if table.num_rows == 0:
        raise CommandError(f"{job} has no window yet: there is nothing to write")
    return table


async def _of_job(wanted: str) -> CaptureTable:
    check_job(wanted, or_file=True)
    async with connected(find(os.environ), "export") as bus:
        job = (await find_job(bus, wanted)).job
        records: list[Record] = []
        async with Source(bus, job, past=True, stop=asyncio.Event()) as source:
            while batch := await source.read():
                records += batch
    return table_of(job, records, job)


def _csv(table: CaptureTable) -> bytes:
    """Numbers as Python writes them, so that they are read back exactly; what is not known is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table)
    writer.writerows(zip(*table.values(), strict=True))
    return text.getvalue().encode()


def _parquet(table: CaptureTable) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table.to_arrow(), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


FORMATS: dict[str, Callable[[CaptureTable], bytes]] = {
    "parquet": _parquet,
    "csv": _csv,
    "jsonl": lambda table: msgspec.json.Encoder().encode_lines(table.rows()),
}
