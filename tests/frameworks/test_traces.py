"""Traces through OpenTelemetry's own packages: into its in-memory exporter, and over HTTP."""

import http.server
import threading
from pathlib import Path
from typing import ClassVar

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dynamix.cli.commands.trace import export
from dynamix.cli.commands.trace.export import SpanExport
from dynamix.cli.commands.trace.spans import WindowTraces
from dynamix.cli.main import main
from dynamix.recording.capture import read_header, records

CAPTURE = Path(__file__).parents[1] / "data/demo.dxc"


def test_a_captured_window_is_one_trace_of_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_BATCH", 7)
    memory = InMemorySpanExporter()
    sending, traces = SpanExport(memory), WindowTraces(read_header(CAPTURE).job)
    for record in records(CAPTURE):
        sending.add(traces.add_record(record))
    sending.add(traces.finish())
    sending.flush()
    spans = memory.get_finished_spans()
    assert sending.num_sent == len(spans) > 30
    roots = {span.context.trace_id: span for span in spans if span.parent is None}
    for span in spans:
        root = roots[span.context.trace_id]
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time
        assert span.resource.attributes["service.name"] == "dynamix"
    first = next(iter(roots))
    assert {"window", "decide"} <= {span.name for span in spans if span.context.trace_id == first}


class _Receiver(http.server.BaseHTTPRequestHandler):
    """Takes spans, or refuses them."""

    bodies: ClassVar[list[bytes]] = []
    status = 200

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("status", "code"), [(200, 0), (400, 1)])
def test_the_command_sends_them_and_says_when_they_are_refused(
    status: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = type("Handler", (_Receiver,), {"bodies": [], "status": status})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        assert main(["trace", str(CAPTURE), "--endpoint", endpoint]) == code
        server.shutdown()
    captured = capsys.readouterr()
    received = ExportTraceServiceRequest.FromString(handler.bodies[0])
    assert len(received.resource_spans[0].scope_spans[0].spans) > 30
    if code:
        assert "spans were not taken" in captured.err
    else:
        assert "spans sent" in captured.out
