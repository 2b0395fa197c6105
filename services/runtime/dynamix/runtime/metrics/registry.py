"""What a service shows: its counters with their meanings, and functions that are called for each scrape."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from .scrape import Scrape

Source = Callable[[Scrape], None]
"""Shows what a service holds. Called in a thread: it reads what the event loop may change meanwhile."""


class ServiceMetrics:
    """The numbers of one service, asked for at each scrape.

    A service declares the counters that it may count, so that they are shown as 0 before: what appears with 1 is no
    increase to Prometheus.

    Attributes:
        is_served: whether anything may ask: what costs more than keeping the newest of something is left out otherwise.
    """

    def __init__(self, component: str = "") -> None:
        """Begin without any number; `component` is the service."""
        self.is_served = False
        self._component = component
        self._sources: list[Source] = []
        self._counters: dict[str, str] = {}
        self._gauges: dict[str, str] = {}

    def declare(self, *, counters: Mapping[str, str] | None = None, gauges: Mapping[str, str] | None = None) -> None:
        """Give entries of the service's counters their meanings; gauges are those of them that may fall."""
        self._counters |= counters or {}
        self._gauges |= gauges or {}

    def add(self, source: Source) -> None:
        """Ask a function, too."""
        self._sources.append(source)

    def show_counters(self, scrape: Scrape, counters: Mapping[str, int]) -> None:
        """Show a service's counters, also those that it has declared and not counted yet."""
        values = dict.fromkeys((*self._counters, *self._gauges), 0) | dict(counters)
        for name, value in values.items():
            if name in self._gauges:
                scrape.gauge(name, self._gauges[name], value)
            else:
                scrape.counter(name, self._counters.get(name, "counted by this service"), value)

    def collect(self) -> Iterable[Metric]:
        """Ask all sources; called by Prometheus's registry."""
        scrape = Scrape(self._component)
        for source in self._sources:
            source(scrape)
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
