"""What every service shows of itself: whether it is ready, its connection, its event loop, what it has handled."""

import asyncio
import importlib.metadata
import time
from collections.abc import Mapping

from dynamix.runtime.bus import Bus
from dynamix.runtime.health.watchdog import Watchdog
from dynamix.runtime.metrics import Scrape

COUNTERS = {
    "dead_letters": "messages that could not be used",
    "dead_letters_not_kept": "of those, not stored on the bus either",
    "waits_for_room": "seconds of waiting for room in a full stream",
}
"""What any service may count (`Context.count`)."""
GAUGES = {"ready": "1 once the service reads its streams"}
BUS_COUNTERS = {
    "published": "messages acknowledged by the broker",
    "retries": "messages published again, since no acknowledgement came",
    "duplicates": "acknowledged as stored before",
    "too_many_requests": "messages that the broker refused for a moment, since a stream had too many to store",
    "publish_errors": "messages that the broker refused",
    "received": "messages read from streams",
    "received_twice": "of those, left out since they came before",
    "consumer_resets": "readers of streams that had to begin again",
    "dropped_live": "heartbeats that were not sent, without a connection",
    "dropped_received": "heartbeats not taken in time by their reader",
    "errors": "errors of the connection",
    "reconnects": "connections made again",
    "slow_consumer_drops": "messages that the client dropped since they came too fast",
    "permission_denials": "subjects that the broker refused to this user",
}
BUS_GAUGES = {
    "in_flight": "messages published and not acknowledged yet",
    "unacknowledged": "of those, for longer than 5 s: the broker stores nothing",
    "unanswered": "requests to the broker without an answer for 5 s",
    "failed_lately": "messages that were not stored, in the last minute",
}


class ServiceState:
    """The state of one service's process, for `/metrics` and `/readyz`.

    Attributes:
        bus: its connection, `None` before the first.
        counters: the service's own.
    """

    def __init__(self, node: str, instance: str, stop: asyncio.Event, watchdog: Watchdog) -> None:
        self.bus: Bus | None = None
        self.counters: Mapping[str, int] = {}
        self._node = node
        self._instance = instance
        self._stop = stop
        self._watchdog = watchdog
        self._version = importlib.metadata.version("dynamix-batch")

    def not_ready(self) -> str:
        """Why the service cannot work now, as one line; empty when it can."""
        if self._stop.is_set():
            return "stopping"
        if self.bus is None:
            return "waiting for the broker"
        if not self.bus.is_connected:
            return "the connection to the broker is lost"
        counted = self.bus.counters
        if late := counted["unacknowledged"]:
            return f"the broker has not acknowledged {late} messages for 5 s: is its disk full?"
        if late := counted["unanswered"]:  # such as a service that publishes nothing now
            return f"the broker has not answered {late} requests for 5 s: is its disk full?"
        return "" if self.counters.get("ready") else "not reading its streams yet"

    def show(self, scrape: Scrape) -> None:
        """Show it in a scrape."""
        scrape.gauge(
            "service_info",
            "always 1; what runs, by its labels",
            1,
            node=self._node,
            name=self._instance,
            version=self._version,
        )
        scrape.gauge("connected", "1 while there is a connection to the broker", self._is_connected())
        scrape.counter("loop_lag_seconds", "how late the event loop ran, summed over ticks", self._watchdog.total_lag_s)
        scrape.gauge("loop_lag_max_seconds", "how late it ran at most since the start", self._watchdog.max_lag_s)
        scrape.counter("process_cpu_seconds", "processor time of this process", time.process_time())
        if self.bus is not None:
            _show_bus(scrape, self.bus)

    def _is_connected(self) -> int:
        return int(self.bus is not None and self.bus.is_connected)


def _show_bus(scrape: Scrape, bus: Bus) -> None:
    counted = bus.counters
    for name, meaning in BUS_COUNTERS.items():
        scrape.counter(f"bus_{name}", meaning, counted[name])
    for name, meaning in BUS_GAUGES.items():
        scrape.gauge(f"bus_{name}", meaning, counted[name])
    scrape.gauge("credential_seconds_left", "until the credential expires", bus.seconds_left)
    for kind in bus.statistics.all():
        scrape.counter("messages_handled", "messages of a kind read from a stream", kind.num_messages, kind=kind.kind)
        scrape.counter("messages_unusable", "of those, set aside as dead letters", kind.num_errors, kind=kind.kind)
        scrape.counter(
            "message_handling_seconds",
            "from a batch handed out until the next one was asked for",
            kind.processing_ns / 1e9,
            kind=kind.kind,
        )
