"""The services in this process, with what each would show to Prometheus."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import structlog

from dynamix.arbitrator.service import ArbitratorSettings
from dynamix.arbitrator.service import serve as serve_arbitrator
from dynamix.collector.observation import CollectorSettings
from dynamix.collector.service import serve as serve_collector
from dynamix.reward.service import RewardSettings
from dynamix.reward.service import serve as serve_reward
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.health import Watchdog
from dynamix.runtime.metrics import ServiceMetrics
from dynamix.runtime.service import Context, ServiceState

from .brokers import until
from .control_plane import NODE

SERVICES: dict[str, tuple[Any, Callable[[Any], Awaitable[None]]]] = {
    "collector": (CollectorSettings(probe="tcp_info"), serve_collector),
    "reward": (RewardSettings(), serve_reward),
    "arbitrator": (ArbitratorSettings(), serve_arbitrator),
}


class ServiceHere:
    """One service: its context, and what a scrape of it would show."""

    def __init__(self, name: str, bus: Bus, settings: Any, watchdog: Watchdog) -> None:
        metrics = ServiceMetrics(name)
        metrics.is_served = True
        self.context: Context[Any] = Context(
            name, NODE, NODE, bus, settings, asyncio.Event(), structlog.stdlib.get_logger(), metrics=metrics
        )
        ServiceState(NODE, NODE, self.context.stop, watchdog, metrics).bus = bus

    def scrape(self) -> str:
        """What `/metrics` answers."""
        return self.context.metrics.exposition("")[0].decode()


@contextlib.asynccontextmanager
async def services_here(bus: Bus, *names: str) -> AsyncIterator[dict[str, ServiceHere]]:
    """Run services in this event loop until the end of the block, from when they read their streams."""
    async with Watchdog(0.0) as watchdog:
        running = {name: ServiceHere(name, bus, SERVICES[name][0], watchdog) for name in names}
        tasks = [asyncio.ensure_future(SERVICES[name][1](one.context)) for name, one in running.items()]
        try:
            for one in running.values():
                await until(lambda one=one: one.context.counters.get("ready"))
            yield running
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def context_of(bus: Bus, counts: Counter[str] | None = None, **settings: Any) -> Context[ArbitratorSettings]:
    """What an arbitrator is given; it counts in `counts`."""
    log = structlog.stdlib.get_logger()
    context = Context("arbitrator", "0", "here", bus, ArbitratorSettings(**settings), asyncio.Event(), log)
    if counts is not None:
        context.counters = counts
    return context


@contextlib.asynccontextmanager
async def arbitrator_here(bus: Bus, **settings: Any) -> AsyncIterator[Context[ArbitratorSettings]]:
    """Run an arbitrator in this event loop until the end of the block, where it must still run; yields its context."""
    context = context_of(bus, **settings)
    task = asyncio.create_task(serve_arbitrator(context))
    try:
        yield context
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
