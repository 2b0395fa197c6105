"""Send one OpenTelemetry trace per window of a job: when its reports, states, action and receipt were stored.

  dynamix trace JOB                     while it runs, from its first stored message until it has ended
  dynamix trace JOB --past              what is stored now
  dynamix trace FILE                    a capture: the same traces, with the same ids

Traces are sent by OTLP over HTTP to --endpoint, or to OTEL_EXPORTER_OTLP_ENDPOINT (default: http://localhost:4318).
Needs the packages of 'dynamix-batch[otel]'. The spans of a trace:

  window            from the first report to the last message of the window
  collect NODE      from a node's report to its state
  reward NODE       from its metric window to its rewards
  decide            from the last state to the action
  adopt             from the action to the receipt that all ranks agreed on its step
"""

import argparse
import asyncio
import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from dynamix.cli.connection import connected, find
from dynamix.cli.errors import CommandError, MisuseError, explained, reading
from dynamix.cli.jobs import check_job, chosen, known_jobs
from dynamix.cli.source import Source
from dynamix.cli.terminal import ProgressLine, stop_event
from dynamix.extras.export import is_file_name
from dynamix.recording.capture import CaptureError, Record, WindowKey, read_header, records
from dynamix.recording.job_view import JobView, Window
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Report

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

SCOPE = "dynamix.extras.trace"
MAX_BATCH = 512
KEPT_WINDOWS = 8
"""A window is closed when this many later ones have begun: a trainer refuses actions that are older."""

AttributeValue = str | int | float | bool | list[int]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("job", metavar="JOB|FILE", help="a job's id, or its first characters; or a capture")
    parser.add_argument("--past", action="store_true", help="send only what is stored now, also if the job is running")
    parser.add_argument(
        "--endpoint", metavar="URL", help="address of the trace receiver, such as http://localhost:4318/v1/traces"
    )


def run(arguments: argparse.Namespace) -> int:
    """Send all traces; 0 when the last one is sent."""
    if arguments.endpoint and not arguments.endpoint.startswith(("http://", "https://")):
        raise MisuseError(f"--endpoint {arguments.endpoint!r} is no URL: write http://host:4318/v1/traces")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    export = SpanExport(OTLPSpanExporter(endpoint=arguments.endpoint or None))
    try:
        if is_file_name(arguments.job):
            with explained(CaptureError), reading(arguments.job):
                traces = WindowTraces(read_header(arguments.job).job)
                for record in records(arguments.job):
                    export.add(traces.add_record(record))
        else:
            traces = asyncio.run(_from_bus(arguments, export))
        export.add(traces.finish())
    finally:
        export.close()
    malformed = traces.num_malformed
    left_out = f"; {malformed} messages that cannot be read were left out" if malformed else ""
    print(f"{export.num_sent} spans sent{left_out}")
    if export.num_refused:
        raise CommandError(f"{export.num_refused} spans were not taken: is there a collector of OpenTelemetry?")
    return 0


async def _from_bus(arguments: argparse.Namespace, export: "SpanExport") -> "WindowTraces":
    check_job(arguments.job)
    async with connected(find(os.environ), "trace") as bus:
        job = chosen(await known_jobs(bus), arguments.job).job
        traces = WindowTraces(job)
        with stop_event() as stop, ProgressLine() as progress:
            source = Source(bus, job, past=arguments.past, stop=stop)
            async with contextlib.aclosing(source.batches()) as batches:
                async for batch in batches:
                    for record in batch:
                        export.add(traces.add_record(record))
                    await asyncio.to_thread(export.flush)
                    progress.show(f"{export.num_sent} spans of {job}")
        return traces


class WindowSpan(NamedTuple):
    """One span: ids as integers, times in ns since the epoch."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue]


class WindowTraces:
    """Folds the records of one job, in the order in which they were stored, into the spans of its windows."""

    def __init__(self, job: str) -> None:
        self._view = JobView(job, most_windows=1 << 62)
        self.num_malformed = 0

    def add_record(self, record: Record) -> list[WindowSpan]:
        """The spans of the windows that are complete by this record."""
        try:
            message = decode_any(record.subject, record.payload)
        except MalformedMessageError:
            self.num_malformed += 1
            return []
        self._view.fold(message, record.timestamp_ns)
        if isinstance(message, Report) and message.job == self._view.name:
            return self._close(WindowKey(message.generation, message.window - KEPT_WINDOWS))
        return []

    def finish(self) -> list[WindowSpan]:
        """The spans of all windows that are left."""
        return self._close(max(self._view.windows, default=WindowKey(0, 0)))

    def _close(self, last: WindowKey) -> list[WindowSpan]:
        closed = [self._view.windows.pop(key) for key in sorted(self._view.windows) if key <= last]
        return [span for window in closed for span in spans_of(self._view.name, window)]


def spans_of(job: str, known: Window) -> Iterator[WindowSpan]:
    """The spans of one window, the root first; none where no report of it is known.

    Ids are derived from job, generation, window and name: no message has to carry any, and a capture gives the same
    trace as the job did while it ran.
    """
    if not known.started_ns:
        return
    trace = f"{job}:{known.generation}:{known.window}"
    trace_id, root_id = _id(trace, 16), _id(f"{trace}:window", 8)

    def span(name: str, start_ns: int, end_ns: int, parent_id: int | None, **more: AttributeValue) -> WindowSpan:
        attributes = {
            "dynamix.job": job,
            "dynamix.generation": known.generation,
            "dynamix.window": known.window,
            **{f"dynamix.{key}": value for key, value in more.items()},
        }
        span_id = _id(f"{trace}:{name}", 8)
        return WindowSpan(name, trace_id, span_id, parent_id, start_ns, max(start_ns, end_ns), attributes)

    times = [at for node in known.nodes.values() for kind, at in node.stored_ns.items() if kind != "window"]
    last_ns = max([known.decided_ns, known.applied_ns, *times])
    decided, applied = known.action is not None, known.applied is not None
    yield span("window", known.started_ns, last_ns, None, decided=decided, applied=applied, nodes=len(known.nodes))
    for name, node in sorted(known.nodes.items()):
        stored = node.stored_ns
        if "report" in stored and "state" in stored:
            probe = {"probe": node.probe} if "window" in stored else {}
            collect = span(f"collect {name}", stored["report"], stored["state"], root_id, node=name, **probe)
            yield collect
            if "window" in stored and "reward" in stored:
                yield span(f"reward {name}", stored["window"], stored["reward"], collect.span_id, node=name)
    if known.action is not None:
        action = known.action
        states = [at for node in known.nodes.values() if 0 < (at := node.stored_ns.get("state", 0)) <= known.decided_ns]
        start_ns = max(states, default=known.decided_ns)
        more: dict[str, AttributeValue] = {"policy": action.policy, "policy_version": action.policy_version}
        more |= {"local_batch_sizes": list(action.local_batch_sizes[:64]), "split": action.allocation.split}
        yield span("decide", start_ns, known.decided_ns, root_id, **more)
    if known.applied is not None and known.action is not None:
        receipt = known.applied
        effective = {"effective_window": receipt.effective_window, "effective_step": receipt.effective_step}
        yield span("adopt", known.decided_ns, known.applied_ns, root_id, **effective)


def _id(text: str, num_bytes: int) -> int:
    """An id that is the same wherever it is derived; never 0, which means none."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:num_bytes]) or 1


class SpanExport:
    """Sends spans with ids of our own, which a tracer would make up itself; none is dropped while others are sent.

    Attributes:
        num_sent: spans that were taken.
        num_refused: spans that were not, after the exporter's own retries.
    """

    def __init__(self, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._exporter = exporter
        version = importlib.metadata.version("dynamix-batch")
        self._resource = Resource.create({"service.name": "dynamix", "service.version": version})
        self._scope = InstrumentationScope(SCOPE, version)
        self._waiting: list[ReadableSpan] = []
        self.num_sent = self.num_refused = 0

    def add(self, spans: Iterable[WindowSpan]) -> None:
        """Queue spans; blocks to send what makes a full batch."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

        def context(trace_id: int, span_id: int) -> SpanContext:
            return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        self._waiting += [
            ReadableSpan(
                name=span.name,
                context=context(span.trace_id, span.span_id),
                parent=None if span.parent_id is None else context(span.trace_id, span.parent_id),
                resource=self._resource,
                attributes=span.attributes,
                kind=SpanKind.INTERNAL,
                start_time=span.start_ns,
                end_time=span.end_ns,
                instrumentation_scope=self._scope,
            )
            for span in spans
        ]
        if len(self._waiting) >= MAX_BATCH:
            self.flush()

    def flush(self) -> None:
        """Send all that waits; blocks for as long as the exporter tries."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            if self._exporter.export(batch) is SpanExportResult.SUCCESS:
                self.num_sent += len(batch)
            else:
                self.num_refused += len(batch)

    def close(self) -> None:
        """Send what is left, and end the exporter."""
        try:
            self.flush()
        finally:
            self._exporter.shutdown()
