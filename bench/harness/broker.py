"""A real broker with its streams, our bus to it, and a bare nats-py client beside it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import nats
import uvloop
from nats.aio.client import Client

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.runtime.settings import BusSettings

T = TypeVar("T")


@contextlib.asynccontextmanager
async def broker_with_bus(name: str, host: str | None = None) -> AsyncIterator[tuple[EmbeddedServer, Bus]]:
    """A broker of its own, streams provisioned, and a bus named `name`; on `host`, or on loopback."""
    async with EmbeddedServer() if host is None else EmbeddedServer(host=host) as server:
        bus = await Bus.connect(server.settings, name=name)
        try:
            await provision(bus)
            yield server, bus
        finally:
            await bus.close()


@contextlib.asynccontextmanager
async def raw_client(settings: BusSettings) -> AsyncIterator[Client]:
    """nats-py without our bus."""
    client = await nats.connect(settings.url, user=settings.user, password=settings.password)
    try:
        yield client
    finally:
        await client.close()


def run_with_uvloop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop, as the services run."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
