"""Send one OpenTelemetry trace per window of a job: when its reports, states, action and receipt were stored.

  dynamix trace JOB                     while it runs, from its first stored message until it has ended
  dynamix trace JOB --past              what is stored now
  dynamix trace FILE                    a capture: the same traces, with the same ids

They go to --endpoint, or where OTEL_EXPORTER_OTLP_ENDPOINT says, by OTLP over HTTP (http://localhost:4318 by default).
Nothing of the job knows of it. Needs the packages of 'dynamix-batch[otel]'.
"""

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dynamix.cli.connection import connected, find
from dynamix.cli.errors import CommandError, MisuseError, explained, reading
from dynamix.cli.jobs import check_job, find_job
from dynamix.cli.progress import ProgressLine, stop_event
from dynamix.cli.source import Source
from dynamix.recording.capture import CaptureError, read_header, records

from .spans import WindowTraces

if TYPE_CHECKING:
    from .export import SpanExport


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("job", metavar="JOB|FILE", help="the job's id, or how it begins; or a capture")
    parser.add_argument("--past", action="store_true", help="only what is stored now, also of a job that runs")
    parser.add_argument("--endpoint", metavar="URL", help="where traces go, such as http://localhost:4318/v1/traces")


def run(arguments: argparse.Namespace) -> int:
    """Send all traces; 0 when the last one is sent."""
    if arguments.endpoint and not arguments.endpoint.startswith(("http://", "https://")):
        raise MisuseError(f"--endpoint {arguments.endpoint!r} is no URL: write http://host:4318/v1/traces")
    from .export import SpanExport, otlp_exporter

    export = SpanExport(otlp_exporter(arguments.endpoint))
    try:
        if is_file_name(arguments.job):
            malformed = _from_file(Path(arguments.job), export)
        else:
            malformed = asyncio.run(_from_bus(arguments, export))
    finally:
        export.close()
    left_out = f"; {malformed} messages that cannot be read were left out" if malformed else ""
    print(f"{export.num_sent} spans sent{left_out}")
    if export.num_refused:
        raise CommandError(f"{export.num_refused} spans were not taken: is there a collector of OpenTelemetry?")
    return 0


def is_file_name(text: str) -> bool:
    """Whether a capture is meant, also one that does not exist, and not a job: no id has a slash or a dot."""
    return "/" in text or "." in text or Path(text).is_file()


def _from_file(file: Path, export: "SpanExport") -> int:
    with explained(CaptureError), reading(file):
        traces = WindowTraces(read_header(file).job)
        for record in records(file):
            export.add(traces.add_record(record))
    export.add(traces.finish())
    return traces.num_malformed


async def _from_bus(arguments: argparse.Namespace, export: "SpanExport") -> int:
    check_job(arguments.job)
    async with connected(find(os.environ), "trace") as bus:
        job = (await find_job(bus, arguments.job)).job
        traces = WindowTraces(job)
        with stop_event() as stop, ProgressLine() as progress:
            async with Source(bus, job, past=arguments.past, stop=stop) as source:
                while batch := await source.read():
                    for record in batch:
                        export.add(traces.add_record(record))
                    await asyncio.to_thread(export.flush)
                    progress.show(f"{export.num_sent} spans of {job}")
        export.add(traces.finish())
        return traces.num_malformed
