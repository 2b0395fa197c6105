"""Spans to OpenTelemetry: the one module that knows its packages."""

import importlib.metadata
from collections.abc import Iterable

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from .spans import WindowSpan

SCOPE = "dynamix.cli.commands.trace"


MAX_BATCH = 512


def otlp_exporter(endpoint: str | None) -> SpanExporter:
    """Sends over OTLP/HTTP; without an address as OTEL_EXPORTER_OTLP_... say."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint) if endpoint else OTLPSpanExporter()


class SpanExport:
    """Sends spans with ids of our own, which a tracer would make up itself; none is dropped while others are sent.

    Attributes:
        num_sent: spans that were taken.
        num_refused: spans that were not, after the exporter's own retries.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        version = importlib.metadata.version("dynamix-batch")
        self._resource = Resource.create({"service.name": "dynamix", "service.version": version})
        self._scope = InstrumentationScope(SCOPE, version)
        self._waiting: list[ReadableSpan] = []
        self.num_sent = self.num_refused = 0

    def add(self, spans: Iterable[WindowSpan]) -> None:
        """Queue spans; blocks to send what makes a full batch."""
        self._waiting += [self._readable(span) for span in spans]
        while len(self._waiting) >= MAX_BATCH:
            self._send()

    def flush(self) -> None:
        """Send all that waits; blocks for as long as the exporter tries."""
        while self._waiting:
            self._send()

    def close(self) -> None:
        """Send what is left, and end the exporter."""
        try:
            self.flush()
        finally:
            self._exporter.shutdown()

    def _send(self) -> None:
        batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        if self._exporter.export(batch) is SpanExportResult.SUCCESS:
            self.num_sent += len(batch)
        else:
            self.num_refused += len(batch)

    def _readable(self, span: WindowSpan) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id),
            parent=None if span.parent_id is None else _context(span.trace_id, span.parent_id),
            resource=self._resource,
            attributes=span.attributes,
            kind=SpanKind.INTERNAL,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
