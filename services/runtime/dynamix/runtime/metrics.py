"""Metrics and health probes of a service, on one HTTP port: `/metrics`, `/livez`, `/readyz`.

In come functions that show what a service holds anyway; out goes text, when it is asked for. Between two scrapes it
costs nothing: no number is copied or labelled while messages are handled. It knows no service and no bus.
"""

import asyncio
import collections
import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from http import HTTPStatus
from typing import Generic, Self, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

logger = logging.getLogger(__name__)

MAX_ENTRIES = 100
FORGET_AFTER_S = 3600.0
"""Longer than a collective that hangs waits by default (30 minutes)."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LabelTable(Generic[K, V]):
    """Bounded table of values with the label of a job: users make up any number of names.

    The entry recorded longest ago goes first; none is shown without news for `FORGET_AFTER_S`. Recording takes 0.3 us.
    The loop records while the thread that writes a scrape reads. `num_evicted` are the entries that went because there
    were more than `max_entries`.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_entries = max_entries
        self._clock = clock
        self._entries: dict[K, tuple[V, float]] = {}
        self._lock = threading.Lock()
        self.num_evicted = 0

    def record(self, key: K, value: V) -> None:
        """Store the newest of a key."""
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = (value, self._clock())
            if len(self._entries) > self._max_entries:
                del self._entries[next(iter(self._entries))]
                self.num_evicted += 1

    def get(self, key: K) -> V | None:
        """The last recorded value, however old."""
        found = self._entries.get(key)
        return None if found is None else found[0]

    def drop(self, key: K) -> None:
        """Show a key no longer: its job has ended."""
        with self._lock:
            self._entries.pop(key, None)

    def entries(self) -> list[tuple[K, V, float]]:
        """Key, value and age in seconds of what was recorded within `FORGET_AFTER_S`, oldest first."""
        now_s = self._clock()
        with self._lock:
            found = [(key, value, now_s - at_s) for key, (value, at_s) in self._entries.items()]
        return [entry for entry in found if entry[2] <= FORGET_AFTER_S]


PREFIX = "dynamix_"
MAX_SAMPLES = 20_000
"""Samples of one service in all; what is beyond is left out and counted. To write them takes 0.16 s of CPU time."""


class Scrape:
    """Takes what a service shows, once per request.

    Every sample has the label `component`, the service. Labels never are `job` and `instance`, which Prometheus gives
    to what it scrapes: a run of ours is `training_job`.
    """

    def __init__(self, component: str) -> None:
        self._component = component
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        self._num_samples = 0
        self._num_left_out = 0

    def gauge(self, name: str, meaning: str, value: float | None, /, **labels: str) -> None:
        """Show what goes up and down; nothing when it is not known."""
        if value is not None:
            self._add(GaugeMetricFamily, name, meaning, value, labels)

    def counter(self, name: str, meaning: str, value: float, /, **labels: str) -> None:
        """Show what only grows while the process lives; its name gets the ending `_total`."""
        self._add(CounterMetricFamily, name, meaning, value, labels)

    def families(self) -> Iterable[Metric]:
        """All samples, and the number of those left out."""
        self._num_samples = 0  # there is always room for the one sample that says that there was none
        self.gauge("samples_left_out", "samples beyond the bound of one service, not shown", self._num_left_out)
        return self._families.values()

    def _add(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        meaning: str,
        value: float,
        labels: dict[str, str],
    ) -> None:
        if self._num_samples >= MAX_SAMPLES:
            self._num_left_out += 1
            return
        self._num_samples += 1
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = kind(PREFIX + name, meaning, labels=("component", *labels))
        family.add_metric((self._component, *labels.values()), value)


Source = Callable[[Scrape], None]
"""Shows what a service holds. Called in a thread: it reads what the event loop may change meanwhile."""


class ServiceMetrics:
    """The metrics of one service, computed at each scrape.

    A service declares the counters that it may count, so that they start at 0: otherwise `rate()` misses the first
    increment.

    Attributes:
        counters: the service's own, by name.
        is_served: whether anything may ask: what costs more than keeping the newest of something is left out otherwise.
    """

    def __init__(self, component: str = "") -> None:
        """Begin without any number; `component` is the service."""
        self.counters: collections.Counter[str] = collections.Counter()
        self.is_served = False
        self._component = component
        self._sources: list[Source] = []
        self._meanings: dict[str, str] = {}
        self._gauges: set[str] = set()

    def declare(self, *, counters: Mapping[str, str], gauges: Mapping[str, str] = {}) -> None:
        """Give entries of the service's counters their meanings; gauges are those of them that may fall."""
        self._meanings |= {**counters, **gauges}
        self._gauges |= set(gauges)

    def add(self, source: Source) -> None:
        """Register a function that is called at each scrape."""
        self._sources.append(source)

    def collect(self) -> Iterable[Metric]:
        """Ask all sources; called by Prometheus's registry."""
        scrape = Scrape(self._component)
        for source in self._sources:
            source(scrape)
        for name, value in {**dict.fromkeys(self._meanings, 0), **self.counters}.items():
            show = scrape.gauge if name in self._gauges else scrape.counter
            show(name, self._meanings.get(name, "counted by this service"), value)
        return scrape.families()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All numbers in the format that the header `Accept` prefers, and its content type.

        Takes up to 0.16 s of CPU time.
        """
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type


MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 16
TEXT = "text/plain; charset=utf-8"


class MetricsServer:
    """Answers while `async with` lasts. It neither knows users nor encrypts: loopback, unless a network is trusted.

    The service's own loop answers, so that an answer shows that it runs: one that is stuck is found by the probe's
    time-out. Numbers are written in a thread. A `port` of 0 takes a free one; afterwards it is the one in use.
    `not_ready` returns why the service cannot work now, for `/readyz`; empty when it can.
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
            why = f"cannot listen on port {self.port} of {self._host} ({error.strerror or error})"
            if error.errno == errno.EADDRINUSE:
                why = f"port {self.port} of {self._host} is taken by another process"
            fix = "set DYNAMIX_METRICS_PORT or --metrics-port to a free one, or to 0 for no metrics"
            raise OSError(f"{why}: {fix}") from error
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
            head = b""
            if len(self._connections) <= MAX_CONNECTIONS:
                with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                    async with asyncio.timeout(REQUEST_TIMEOUT_S):
                        head = await reader.readuntil(b"\r\n\r\n")
                status, body, content_type = await self._answer(head.decode("latin-1"))
            else:
                status, body, content_type = 503, b"too many connections\n", TEXT
            lines = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
                f"Content-Type: {content_type}",
                f"Content-Length: {len(body)}",
                "Connection: close",
                "Cache-Control: no-store",
                "X-Content-Type-Options: nosniff",
            )
            writer.write("\r\n".join((*lines, "", "")).encode() + (b"" if head.startswith(b"HEAD ") else body))
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await writer.drain()
        except (OSError, TimeoutError):
            pass  # the other side is gone, or sends nothing
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, head: str) -> tuple[int, bytes, str]:
        """Status, body and its type of the answer to a request, by its first line and headers."""
        first, *lines = head.split("\r\n")
        method, path, version = first.split(" ") if first.count(" ") == 2 else ("", "", "")
        if not version.startswith("HTTP/1."):
            return 400, b"this port answers GET /metrics, /livez and /readyz\n", TEXT
        if method not in {"GET", "HEAD"}:
            return 405, b"only GET\n", TEXT
        match path.partition("?")[0]:
            case "/livez":
                reason = ""
            case "/readyz":
                reason = self._not_ready()
            case "/metrics":
                accepted = "".join(line.partition(":")[2] for line in lines if line.lower().startswith("accept:"))
                try:
                    async with self._writing:
                        return 200, *await asyncio.to_thread(self._metrics.exposition, accepted.strip())
                except Exception:  # any service may add a source: its fault is answered and logged, and ends no service
                    logger.exception("the metrics cannot be shown")
                    return 500, b"the metrics cannot be shown: see the service's log\n", TEXT
            case _:
                return 404, b"there are /metrics, /livez and /readyz\n", TEXT
        return (503, f"{reason}\n".encode(), TEXT) if reason else (200, b"ok\n", TEXT)
