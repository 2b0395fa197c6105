"""What a service's `main` gets: its bus, settings, stop event, log and counters."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
import structlog

from dynamix.runtime.bus import BusMessage, ServiceBus, StreamFullError
from dynamix.runtime.health.dead_letters import DeadLetters
from dynamix.runtime.metrics import ServiceMetrics
from dynamix.schemas.messages import Message

ROOM_WAIT_S = 1.0

S = TypeVar("S", bound=msgspec.Struct)
B_co = TypeVar("B_co", bound=ServiceBus, covariant=True)
"""The part of the bus that a service uses: `Bus` itself, or what stands in for it in a replay."""


class StartError(RuntimeError):
    """The service cannot work as it was set up; the text says why and how to fix it."""


@dataclass
class Context(Generic[S, B_co]):
    """What a service's `main` gets."""

    service: str
    instance: str
    node: str
    bus: B_co
    settings: S
    stop: asyncio.Event
    """Set by SIGTERM and SIGINT; loops over consumers and subscriptions end at the same moment."""
    log: structlog.stdlib.BoundLogger
    counters: dict[str, int] = field(default_factory=dict)
    """The service's own, shown in its heartbeat beside the bus's."""
    metrics: ServiceMetrics = field(default_factory=ServiceMetrics)
    """Where a service registers what it shows to Prometheus."""

    def __post_init__(self) -> None:
        self._dead_letters = DeadLetters(self.bus, self.service, self.counters)

    def count(self, name: str, num: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + num

    async def dead_letter(self, message: BusMessage, reason: str) -> None:
        """Set aside a message that cannot be used: counted, logged, published to `dead` at a limited rate.

        Never raises: what is wrong with a message must not end the service.
        """
        await self._dead_letters.set_aside(message, reason)

    async def publish_when_room(self, message: Message) -> bool:
        """Publish what must not be given up to a stream that may be full: wait for room.

        False when the service is to stop and there was no room. Each wait is counted as `waits_for_room`. Raises as
        `Bus.publish`, but for StreamFullError.
        """
        while True:
            try:
                await self.bus.publish(message)
            except StreamFullError:
                self.count("waits_for_room")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ROOM_WAIT_S):
                        await self.stop.wait()
                if self.stop.is_set():
                    return False
            else:
                return True
