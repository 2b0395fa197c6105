"""All services in this process on one bus, scraped as Prometheus would, and a made-up job that reports to them."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from tests.support.alert_trials import Recorded, record
from tests.support.brokers import ConfiguredServer
from tests.support.control_plane import report_of
from tests.support.services_here import ServiceHere

from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Job

EQUAL = (100.0, 100.0, 100.0, 100.0)
"""Samples per second of the job's ranks, where none is slower."""


class ScrapedPlane:
    """All services on one bus, and a made-up job that reports to them."""

    def __init__(self, server: ConfiguredServer, bus: Bus, services: dict[str, ServiceHere]) -> None:
        self.server = server
        self.bus = bus
        self.services = services
        self.window = 0

    async def train(self, job: Job, num_windows: int, speeds: tuple[float, ...] = EQUAL, **changes: Any) -> None:
        """Report windows of a job, each with the sizes last decided, and wait until all services have handled them."""
        for _ in range(num_windows):
            action = await self.bus.last("ACTIONS", subjects.of("action", job.job))
            known = None if action is None else decode(Action, action.subject, action.payload)
            sizes = job.initial_local_batch_sizes if known is None else known.local_batch_sizes
            report = report_of(job, self.window, sizes, speeds)
            await self.bus.publish(msgspec.structs.replace(report, **changes))
            self.window += 1
            await self.shows("arbitrator", "job_state_window", self.window - 1, training_job=job.job)

    async def shows(self, component: str, name: str, value: float, **labels: str) -> None:
        """Wait until a service shows a number."""
        inside = ",".join(f'{key}="{text}"' for key, text in {"component": component, **labels}.items())
        await self.scraped(component, lambda text: f"dynamix_{name}{{{inside}}} {float(value)}\n" in text)

    async def no_longer(self, component: str, job: str) -> None:
        """Wait until a service shows a job no longer."""
        await self.scraped(component, lambda text: job not in text)

    async def scraped(self, component: str, condition: Callable[[str], bool]) -> None:
        """Wait until what a service shows is as wanted."""
        async with asyncio.timeout(60):
            while not condition(self.services[component].scrape()):  # noqa: ASYNC110 - what a scraper would do
                await asyncio.sleep(0.05)

    async def record(self, happening: Any = None, **options: Any) -> dict[str, Recorded]:
        """Scrape all services before and after something happens."""
        return await record({name: one.scrape for name, one in self.services.items()}, happening, **options)
