"""A broker of three real nats-servers that keep every stream three times, and what happens to one of them.

A `Bystander` publishes numbered messages and counts those that were acknowledged and are missing.
"""

import asyncio
import contextlib
import re
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec
from bench.hosts import Host, Hosts
from tests.support.brokers import ConfiguredServer
from tests.support.bus_watch import stored_messages

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.errors import BusError
from dynamix.runtime.embedded import server_binary
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.streams import FEED, STREAMS, Stream

NUM_SERVERS = 3
LOOPBACK = "127.0.0.1"
ROUTE_PORT = 6222
CURRENT_TIMEOUT_S = 400.0
"""A copy that nats-server takes long for is waited for: it forces a new snapshot in the leader only after minutes."""
MAX_COMPLAINTS = 20
_COMPLAINT = re.compile(r"\[(WRN|ERR|FTL)\]")
_NAME, _SYNC = 'server_name: "dynamix-embedded"', 'sync_interval: "2m"'


class ClusterServer(ConfiguredServer):
    """One of the three: an embedded server that syncs as the deployed one does and knows the others."""

    def __init__(self, number: int, routes: Sequence[str], password: str, place: Host | None = None) -> None:
        """`routes`: the addresses that the servers find each other at, this one's at `number`.

        On a host of its own, `place`, its link can be cut.
        """
        super().__init__(host=LOOPBACK if place is None else place.address)
        self.place = place
        self.name = f"broker-{number + 1}"
        self._password = password
        self._routes = ", ".join(f'"nats-route://{address}"' for address in routes)
        self._listen = f'"{routes[number]}"'

    def _config(self, store: Path) -> str:
        text = super()._config(store)
        assert _NAME in text, "the embedded server's configuration has another name"
        assert _SYNC in text, "the embedded server's configuration syncs otherwise"
        text = text.replace(_NAME, f'server_name: "{self.name}"').replace(_SYNC, "sync_interval: always")
        cluster = f"name: dynamix, listen: {self._listen}, no_advertise: true, routes: [{self._routes}]"
        return f"{text}cluster {{ {cluster} }}\n"

    def _command(self, config: Path) -> list[str]:
        if self.place is None:
            return super()._command(config)
        return self.place.command(str(server_binary()), "-c", str(config))


class ThreeServers:
    """`async with ThreeServers() as servers: ...`; streams are made by the caller.

    Attributes:
        servers: by name.
    """

    def __init__(self, servers: Sequence[ClusterServer] = ()) -> None:
        """With none given they are on loopback."""
        if not servers:
            routes, password = [f"{LOOPBACK}:{port}" for port in free_ports(NUM_SERVERS)], secrets.token_urlsafe(24)
            servers = [ClusterServer(number, routes, password) for number in range(NUM_SERVERS)]
        self.servers = {server.name: server for server in servers}
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
        async with asyncio.timeout(CURRENT_TIMEOUT_S):
            while not (leader := (await bus.stream_state(stream)).copies.leader):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.1)
        return self.servers[leader]

    async def until_current(self, bus: Bus, streams: Sequence[Stream] = STREAMS) -> None:
        """Wait until each of these streams has all its copies, and no copy lags."""
        waits_for = ""
        try:
            async with asyncio.timeout(CURRENT_TIMEOUT_S):
                for stream in streams:
                    while True:
                        try:
                            copies = (await bus.stream_state(stream.name)).copies
                            waits_for = f"{stream.name}: {copies}"
                            if copies.are_whole(NUM_SERVERS):
                                break
                        except BusError as error:  # it has no leader at the moment
                            waits_for = f"{stream.name}: {error}"
                        await asyncio.sleep(0.25)
        except TimeoutError:
            raise AssertionError(f"copies are missing after {CURRENT_TIMEOUT_S:g} s: {waits_for}") from None


def free_ports(count: int) -> list[int]:
    """Ports of loopback that no socket listens on now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def servers_on(hosts: Hosts) -> ThreeServers:
    """One server on each of three hosts; the calling thread must have entered the switch."""
    routes, password = [f"{host.address}:{ROUTE_PORT}" for host in hosts], secrets.token_urlsafe(24)
    return ThreeServers([ClusterServer(number, routes, password, host) for number, host in enumerate(hosts)])


NUM_WRITERS = 4
PAUSE_S = 0.01
"""A writer waits so long between two messages."""
MESSAGES_PER_SUBJECT = 4000
"""A writer then goes on with another subject: FEED gives the oldest of one away that has more than 4,096."""


class Bystander:
    """Publishes numbered messages as they are acknowledged, and compares what FEED has of them."""

    def __init__(self, bus: Bus, number: int, *, pause_s: float = PAUSE_S) -> None:
        """Begin to publish; `number` is another one for each bystander of a broker."""
        self._bus = bus
        self._pause_s = pause_s
        self._job = f"bystander-{number:08d}"
        self._stop = asyncio.Event()
        self._acknowledged: dict[int, bytes] = {}
        """Payload by sequence."""
        self._num_twice = 0
        self._writers = [asyncio.create_task(self._write(writer)) for writer in range(NUM_WRITERS)]

    @property
    def num_acknowledged(self) -> int:
        """Messages that the broker said it has."""
        return len(self._acknowledged) + self._num_twice

    async def num_lost(self) -> int:
        """Stop, and count the acknowledged messages that are not in FEED as they were."""
        self._stop.set()
        await asyncio.gather(*self._writers)
        found = await stored_messages(self._bus, FEED.name, subjects.of("reward", self._job, subjects.ANY))
        kept = {message.sequence: message.payload for message in found}
        return self._num_twice + sum(kept.get(at) != payload for at, payload in self._acknowledged.items())

    async def _write(self, writer: int) -> None:
        number = 0
        while not self._stop.is_set():
            payload = b"%d/%d" % (writer, number)
            subject = subjects.of("reward", self._job, f"node-{writer}-{number // MESSAGES_PER_SUBJECT}")
            sequence = await self._bus.publish_bytes(subject, payload, f"{subject}:{number}")
            self._num_twice += sequence in self._acknowledged  # a place that was given away twice has lost one
            self._acknowledged[sequence] = payload
            number += 1
            await asyncio.sleep(self._pause_s)
