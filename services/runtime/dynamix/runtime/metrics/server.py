"""The HTTP port of a service: `/metrics`, `/livez` and `/readyz`, in the service's own event loop."""

import asyncio
import errno
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

from .registry import ServiceMetrics

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 16
TEXT = "text/plain; charset=utf-8"
_PHRASES = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class PortError(OSError):
    """The port cannot be listened on; the text says which, why, and how to choose another one."""


class HttpAnswer(NamedTuple):
    """What is answered."""

    status: int
    body: bytes
    content_type: str = TEXT


class MetricsServer:
    """Answers while `async with` lasts. It neither knows users nor encrypts: loopback, unless a network is trusted.

    The service's own loop answers, so that an answer shows that it runs: one that is stuck is found by the probe's
    time-out. Numbers are written in a thread.

    Args:
        host: the address to listen on.
        port: 0 takes a free one.
        metrics: what `/metrics` shows.
        not_ready: why the service cannot work now, for `/readyz`; empty when it can.

    Attributes:
        port: the port in use.
    """

    def __init__(self, host: str, port: int, metrics: ServiceMetrics, not_ready: Callable[[], str]) -> None:
        self.port = port
        self._host = host
        self._metrics = metrics
        self._not_ready = not_ready
        self._writing = asyncio.Lock()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self.port, limit=MAX_REQUEST_BYTES, reuse_address=True
            )
        except OSError as error:
            raise PortError(_refusal(self._host, self.port, error)) from error
        self.port = self._server.sockets[0].getsockname()[1]
        logger.info("metrics and health on http://%s:%d", self._host, self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio starts a task for each connection"
        self._connections.add(task)
        try:
            if len(self._connections) > MAX_CONNECTIONS:
                await _write(writer, HttpAnswer(503, b"too many connections\n"), head=False)
                return
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = await reader.readuntil(b"\r\n\r\n")
            method, path, headers = _parsed(request)
            await _write(writer, await self._answer(method, path, headers), head=method == "HEAD")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            await _write(writer, HttpAnswer(400, b"this port answers GET /metrics, /livez and /readyz\n"), head=False)
        except (OSError, TimeoutError):
            pass  # the other side is gone, or sends nothing
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, method: str, path: str, headers: Mapping[str, str]) -> HttpAnswer:
        if method not in {"GET", "HEAD"}:
            return HttpAnswer(405, b"only GET\n")
        match path.partition("?")[0]:
            case "/livez":
                return HttpAnswer(200, b"ok\n")
            case "/readyz":
                reason = self._not_ready()
                return HttpAnswer(503, f"{reason}\n".encode()) if reason else HttpAnswer(200, b"ok\n")
            case "/metrics":
                return await self._numbers(headers.get("accept", ""))
        return HttpAnswer(404, b"there are /metrics, /livez and /readyz\n")

    async def _numbers(self, accept: str) -> HttpAnswer:
        async with self._writing:
            try:
                body, content_type = await asyncio.to_thread(self._metrics.exposition, accept)
            except Exception:  # any service may add a source: its fault is answered and logged, and ends no service
                logger.exception("the metrics cannot be shown")
                return HttpAnswer(500, b"the metrics cannot be shown: see the service's log\n")
        return HttpAnswer(200, body, content_type)


def _parsed(request: bytes) -> tuple[str, str, dict[str, str]]:
    """Method, path and headers. Raises ValueError for what is no request of HTTP/1."""
    first, *lines = request.decode("latin-1").split("\r\n")
    method, path, version = first.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"{version} is not spoken here")
    pairs = (line.partition(":") for line in lines if line)
    return method, path, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _write(writer: asyncio.StreamWriter, answer: HttpAnswer, *, head: bool) -> None:
    lines = (
        f"HTTP/1.1 {answer.status} {_PHRASES[answer.status]}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Connection: close",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
    )
    writer.write("\r\n".join((*lines, "", "")).encode() + (b"" if head else answer.body))
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        await writer.drain()


def _refusal(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        why = f"port {port} of {host} is taken by another process"
    else:
        why = f"cannot listen on port {port} of {host} ({error.strerror or error})"
    return f"{why}: set DYNAMIX_METRICS_PORT or --metrics-port to a free one, or to 0 for no metrics"
