"""The HTTP port of a service: metrics in Prometheus's format, health, refusals, bounds."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.runtime.test_service import end, heartbeat
from tests.support.brokers import ConfiguredServer, publish_states
from tests.support.http_get import free_port, get
from tests.support.small_service import service_process

from dynamix.runtime import metrics as metrics_module
from dynamix.runtime.bus import Bus
from dynamix.runtime.metrics import (
    FORGET_AFTER_S,
    MAX_REQUEST_BYTES,
    LabelTable,
    MetricsServer,
    ServiceMetrics,
)


def values(text: str) -> dict[str, float]:
    """Every sample of a scrape, by name and labels."""
    return {
        sample.name + "".join(f"/{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@contextlib.asynccontextmanager
async def answering(metrics: ServiceMetrics, reason: str = "") -> AsyncIterator[int]:
    async with MetricsServer("127.0.0.1", 0, metrics, lambda: reason) as server:
        yield server.port


async def test_a_service_shows_what_it_has_handled_and_that_it_is_ready(server: ConfiguredServer, bus: Bus) -> None:
    await publish_states(bus, range(3))
    port = free_port()
    async with service_process(server, f"--metrics-port={port}") as process:
        while (await heartbeat(bus)).counters.get("states_seen", 0) < 3:
            pass
        assert await get(port, "/livez") == (200, "ok\n")
        assert await get(port, "/readyz") == (503, "not reading its streams yet\n")  # it never says that it does
        status, text = await get(port, "/metrics")
        assert status == 200
        process.send_signal(signal.SIGTERM)
        assert (await end(process))[0] == 0
    shown = values(text)
    assert shown["dynamix_states_seen_total/component=collector"] == 3
    assert shown["dynamix_messages_handled_total/component=collector/kind=state"] == 3
    assert shown["dynamix_bus_published_total/component=collector"] == 3
    assert shown["dynamix_connected/component=collector"] == 1
    assert shown["dynamix_ready/component=collector"] == 0
    assert shown["dynamix_dead_letters_total/component=collector"] == 0  # not counted yet: shown before the first
    assert 0 < shown["dynamix_process_cpu_seconds_total/component=collector"] < 60
    assert shown["process_resident_memory_bytes"] > 1e6
    (info,) = [name for name in shown if name.startswith("dynamix_service_info")]
    assert "/name=node-a/node=node-a/" in info


async def test_a_service_that_waits_for_the_broker_is_not_ready_and_ends_on_a_signal(server: ConfiguredServer) -> None:
    await server.stop()
    port = free_port()
    async with service_process(server, f"--metrics-port={port}") as process:
        while b"waiting for the broker" not in await process.stderr.readline():
            pass
        assert await get(port, "/livez") == (200, "ok\n")
        assert await get(port, "/readyz") == (503, "waiting for the broker\n")
        assert values((await get(port, "/metrics"))[1])["dynamix_connected/component=collector"] == 0
        process.send_signal(signal.SIGINT)
        assert (await end(process))[0] == 0


async def test_a_port_that_is_taken_is_one_sentence_and_exit_code_1(server: ConfiguredServer, bus: Bus) -> None:
    assert bus.is_connected
    async with answering(ServiceMetrics()) as port, service_process(server, f"--metrics-port={port}") as process:
        code, text, lines = await end(process)
    assert code == 1
    (failure,) = [line for line in lines if line["level"] == "error"]
    assert failure["reason"] == (
        f"port {port} of 127.0.0.1 is taken by another process: set DYNAMIX_METRICS_PORT or --metrics-port to a free "
        "one, or to 0 for no metrics"
    )
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
        (b"\x16\x03\x01 no text at all\r\n\r\n", 400),
        (b"GET /" + b"x" * 2 * MAX_REQUEST_BYTES + b" HTTP/1.1\r\n\r\n", 400),
    ],
)
async def test_every_request_gets_the_answer_that_it_should(request_text: bytes, status: int) -> None:
    async with answering(ServiceMetrics()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_text)
        assert (await reader.read()).startswith(b"HTTP/1.1 %d " % status)
        writer.close()


async def test_a_number_that_cannot_be_shown_is_said_and_does_no_other_harm(caplog: pytest.LogCaptureFixture) -> None:
    metrics = ServiceMetrics()
    metrics.add(lambda _: 1 / 0)
    async with answering(metrics) as port:
        assert (await get(port, "/metrics"))[0] == 500
        assert await get(port, "/livez") == (200, "ok\n")
    assert "the metrics cannot be shown" in caplog.text


def test_a_scrape_has_a_bound_and_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MAX_SAMPLES", 5)
    metrics = ServiceMetrics("reward")
    for n in range(8):
        metrics.add(lambda shown, n=n: shown.gauge("size", "a size", n, training_job=f"job-{n}"))
    text, _ = metrics.exposition("")
    shown = values(text.decode())
    assert [name for name in shown if name.startswith("dynamix_size")] == [
        f"dynamix_size/component=reward/training_job=job-{n}" for n in range(5)
    ]
    assert shown["dynamix_samples_left_out/component=reward"] == 3


def test_jobs_are_bounded_in_number_and_in_time() -> None:
    now = [0.0]
    table: LabelTable[str, int] = LabelTable(max_entries=2, clock=lambda: now[0])
    table.record("a", 1)
    now[0] = 10.0
    table.record("b", 2)
    table.record("a", 3)  # the newest again
    table.record("c", 4)
    assert table.entries() == [("a", 3, 0.0), ("c", 4, 0.0)]
    assert table.num_evicted == 1
    now[0] += FORGET_AFTER_S
    table.record("c", 5)
    assert [key for key, _, _ in table.entries()] == ["a", "c"]
    now[0] += 0.1
    assert [key for key, _, _ in table.entries()] == ["c"]
    table.drop("c")
    assert table.entries() == []
