"""Three real nats-servers, on loopback or where they are given, that keep every stream three times."""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.broker.errors import BusError
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.streams import STREAMS, Stream

NUM_SERVERS = 3
LOOPBACK = "127.0.0.1"
CURRENT_TIMEOUT_S = 400.0
"""A copy that nats-server takes long for is waited for: it forces a new snapshot in the leader only after minutes."""
MAX_COMPLAINTS = 20
_COMPLAINT = re.compile(r"\[(WRN|ERR|FTL)\]")
_NAME, _SYNC = 'server_name: "dynamix-embedded"', 'sync_interval: "2m"'


class ClusterServer(EmbeddedServer):
    """One of the three: an embedded server that syncs as the deployed one does and knows the others."""

    def __init__(self, number: int, routes: Sequence[str], password: str, *, host: str = LOOPBACK) -> None:
        """`routes`: the addresses that the servers find each other at, this one's at `number`."""
        super().__init__(host=host)
        self.name = f"broker-{number + 1}"
        self._password = password
        self._routes = ", ".join(f'"nats-route://{address}"' for address in routes)
        self._listen = f'"{routes[number]}"'

    def freeze(self) -> None:
        """Let it neither answer nor close a connection, as a machine that is out of memory."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen one go on with what it believes."""
        os.kill(self.pid, signal.SIGCONT)

    def _config(self, store: Path) -> str:
        text = super()._config(store)
        assert _NAME in text, "the embedded server's configuration has another name"
        assert _SYNC in text, "the embedded server's configuration syncs otherwise"
        text = text.replace(_NAME, f'server_name: "{self.name}"').replace(_SYNC, "sync_interval: always")
        cluster = f"name: dynamix, listen: {self._listen}, no_advertise: true, routes: [{self._routes}]"
        return f"{text}cluster {{ {cluster} }}\n"


class CopiesMissingError(RuntimeError):
    """Not every copy of every stream was current in time; the text names streams, servers and how far they lag."""


class ThreeServers:
    """`async with ThreeServers() as servers: ...`; streams are made by the caller.

    Attributes:
        servers: by name.
    """

    def __init__(self, servers: Sequence[ClusterServer] = ()) -> None:
        """With none given they are on loopback."""
        self.servers = {server.name: server for server in servers or _on_loopback()}
        self._open = contextlib.AsyncExitStack()

    @property
    def settings(self) -> BusSettings:
        """How to connect to any of them, once started."""
        own = [server.settings for server in self.servers.values()]
        return msgspec.structs.replace(own[0], url=",".join(settings.url for settings in own))

    async def __aenter__(self) -> Self:
        try:
            for server in self.servers.values():
                await self._open.enter_async_context(server)
        except BaseException:
            await self._open.aclose()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            sys.stderr.write(self._complaints())
        await self._open.aclose()

    def _complaints(self) -> str:
        """The last warnings and errors in the logs of the servers, which are removed with them."""
        lines = []
        for server in self.servers.values():
            found = server.log_file.read_text().splitlines() if server.log_file.exists() else []
            lines += [f"{server.name}: {line}" for line in found if _COMPLAINT.search(line)][-MAX_COMPLAINTS:]
        return "".join(f"{line}\n" for line in lines)

    async def leader_of(self, bus: Bus, stream: str) -> ClusterServer:
        """The server that stores a stream's messages first."""
        try:
            async with asyncio.timeout(CURRENT_TIMEOUT_S):
                while not (leader := (await bus.stream_state(stream)).copies.leader):  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise CopiesMissingError(f"{stream} has had no leader for {CURRENT_TIMEOUT_S:g} s") from None
        return self.servers[leader]

    async def until_current(self, bus: Bus, streams: Sequence[Stream] = STREAMS) -> None:
        """Wait until every stream has all its copies, and no copy lags."""
        await until_current(bus, streams)


def _on_loopback() -> list[ClusterServer]:
    routes, password = [f"{LOOPBACK}:{port}" for port in free_ports(NUM_SERVERS)], secrets.token_urlsafe(24)
    return [ClusterServer(number, routes, password) for number in range(NUM_SERVERS)]


async def until_current(bus: Bus, streams: Sequence[Stream] = STREAMS) -> None:
    """Wait until each of these streams has all its copies, and no copy lags. Raises CopiesMissingError."""
    waits_for = ""
    try:
        async with asyncio.timeout(CURRENT_TIMEOUT_S):
            for stream in streams:
                waits_for = f"{stream.name}: no answer yet"
                while (missing := await _missing(bus, stream.name)) is not None:
                    waits_for = f"{stream.name}: {missing}"
                    await asyncio.sleep(0.25)
    except TimeoutError:
        raise CopiesMissingError(f"not all copies are current after {CURRENT_TIMEOUT_S:g} s: {waits_for}") from None


async def _missing(bus: Bus, stream: str) -> str | None:
    """What a stream has not; `None` when it is whole."""
    try:
        copies = (await bus.stream_state(stream)).copies
    except BusError as error:  # it has no leader at the moment
        return str(error)
    return None if copies.are_whole(NUM_SERVERS) else str(copies)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that no socket listens on now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
