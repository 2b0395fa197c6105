"""Traces through OpenTelemetry's own packages: into its in-memory exporter, and over HTTP."""

import asyncio
import contextlib
import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.support import examples
from tests.support.brokers import connected

from dynamix.cli.main import main
from dynamix.cli.services import bus_environment
from dynamix.extras import trace
from dynamix.extras.trace import SpanExport, WindowTraces
from dynamix.recording.capture import read_header, records
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import EmbeddedServer

CAPTURE = Path(__file__).parents[1] / "data/demo.dxc"


def test_a_captured_window_is_one_trace_of_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_BATCH", 7)
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


class Endpoint(NamedTuple):
    """Where traces are sent to, and what came."""

    url: str
    bodies: list[bytes]

    def spans(self) -> list[Span]:
        """All spans so far."""
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        resources = [resource for request in requests for resource in request.resource_spans]
        return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]


@contextlib.contextmanager
def endpoint(status: int = 200) -> Iterator[Endpoint]:
    handler = type("Handler", (_Receiver,), {"bodies": [], "status": status})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Endpoint(f"http://127.0.0.1:{server.server_port}/v1/traces", handler.bodies)
        server.shutdown()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (400, 1)])
def test_the_command_sends_them_and_says_when_they_are_refused(
    status: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with endpoint(status) as receiver:
        assert main(["trace", str(CAPTURE), "--endpoint", receiver.url]) == code
    captured = capsys.readouterr()
    assert len(receiver.spans()) > 30
    if code:
        assert "spans were not taken" in captured.err
    else:
        assert "spans sent" in captured.out


async def test_a_job_on_the_broker_is_followed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report, window, state, reward, action and receipt of one window are one trace."""
    job = examples.job({"node-a": (0, 1)})
    async with EmbeddedServer() as broker:
        for name, value in bus_environment(broker.settings).items():
            monkeypatch.setenv(name, value)
        async with connected(broker.settings) as bus:
            await provision(bus)
            await bus.publish(job)
            with endpoint() as receiver:
                command = [sys.executable, "-m", "dynamix.cli.main", "trace", job.job, "--endpoint", receiver.url]
                following = await asyncio.create_subprocess_exec(*command)
                for make in (examples.report, examples.window, examples.state, examples.reward):
                    await bus.publish(make("node-a", (0, 1)))
                await bus.publish(examples.action(0, local_batch_sizes=(128, 128), deltas=(0, 0)))
                await bus.publish(examples.applied(0, 2, local_batch_sizes=(128, 128)))
                await bus.publish(msgspec.structs.replace(job, phase="ended", end_reason="completed"))
                assert await following.wait() == 0
    spans = receiver.spans()
    assert {span.name for span in spans} == {"window", "collect node-a", "reward node-a", "decide", "adopt"}
    assert len({span.trace_id for span in spans}) == 1
    assert [span.name for span in spans if not span.parent_span_id] == ["window"]
