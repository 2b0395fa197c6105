"""The broker and the services as children that can be started again."""

import asyncio
from collections.abc import Mapping

from dynamix.cli.services import ServiceProcess
from dynamix.runtime.embedded import EmbeddedServer


class Broker:
    """The embedded nats-server; a restart keeps its port, password and streams, so that clients come back alone."""

    name = "broker"

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server

    @property
    def pid(self) -> int:
        """The running process's id."""
        return self._server.pid

    async def start(self) -> None:
        """Start it again."""
        await self._server.restart()

    async def stop(self) -> None:
        """Let it finish its writes."""
        await self._server.stop()


class Service:
    """One of our services."""

    def __init__(self, name: str, environ: Mapping[str, str]) -> None:
        self.name = name
        self._process = ServiceProcess(name, environ)

    @property
    def pid(self) -> int:
        """The running process's id."""
        return self._process.pid

    async def start(self) -> None:
        """Start it, or start it again."""
        await asyncio.to_thread(self._process.stop)  # takes leave of the one that ended
        self._process.start()

    async def stop(self) -> None:
        """Let it drain; the event loop goes on meanwhile."""
        await asyncio.to_thread(self._process.stop)
