"""Three servers on hosts of network namespaces, each of which can be cut off, and a client beside one of them."""

import asyncio
import contextlib
import os
import secrets
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from bench.failover.minority import Cut, MinorityView
from bench.failover.servers import ClusterServer, ThreeServers
from bench.harness.command import BenchmarkError
from bench.hosts import Host, Hosts
from bench.hosts.cluster import REPOSITORY

from dynamix.cli.services import bus_environment
from dynamix.runtime.embedded import server_binary
from dynamix.runtime.settings import BusSettings

ROUTE_PORT = 6222
SAY_TIMEOUT_S = 400.0


class HostServer(ClusterServer):
    """One of the three, on a host of its own.

    Attributes:
        place: the host, whose link can be cut.
    """

    def __init__(self, number: int, routes: list[str], password: str, place: Host) -> None:
        super().__init__(number, routes, password, host=place.address)
        self.place = place

    @property
    def address(self) -> str:
        """Where clients find it."""
        return f"{self.place.address}:{self.port}"

    def _command(self, config: Path) -> list[str]:
        return self.place.command(str(server_binary()), "-c", str(config))


def servers_on(hosts: Hosts) -> ThreeServers:
    """One server on each of three hosts; the calling thread must have entered the switch."""
    routes, password = [f"{host.address}:{ROUTE_PORT}" for host in hosts], secrets.token_urlsafe(24)
    return ThreeServers([HostServer(number, routes, password, host) for number, host in enumerate(hosts)])


class MinorityProcess:
    """The client on a server's host, as the trial sees it."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def until(self, word: str) -> None:
        """Wait until it says so."""
        line = await self._line(word)
        if line != f"{word}\n".encode():
            raise BenchmarkError(f"the client beside the server said {line.decode().strip()!r} instead of {word!r}")

    async def view(self, cut: Cut) -> MinorityView:
        """What it saw, once it is served again."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(cut) + b"\n")
        await self._process.stdin.drain()
        return msgspec.json.decode(await self._line("what it saw"), type=MinorityView)

    async def _line(self, what: str) -> bytes:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(SAY_TIMEOUT_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise BenchmarkError(f"the client beside the server did not say {what!r} in {SAY_TIMEOUT_S:g} s") from None
        if not line:
            raise BenchmarkError(f"the client beside the server ended before it said {what!r}: it said why above")
        return line


@contextlib.asynccontextmanager
async def client_beside(server: HostServer, settings: BusSettings, job: str) -> AsyncIterator[MinorityProcess]:
    """A client on a server's host, connected to it and served; it knows the addresses of all three."""
    command = server.place.command(sys.executable, "-m", "bench.failover.minority", job, server.address)
    environ = {**os.environ, **bus_environment(settings)}
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environ, cwd=REPOSITORY)
    try:
        client = MinorityProcess(process)
        await client.until("served")
        yield client
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
