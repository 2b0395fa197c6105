"""A reader at a server that lacks what a stream stores asks the stream's leader.

The routes between three real servers pass through proxies that leave out entries of one stream's log to one server, in
the leader's stream of them and when it catches up: its copy lags, as that of a server of 2.15.1 may for two minutes
after a partition, and the server goes on to serve clients.
"""

import asyncio
import contextlib
import secrets
import struct
from pathlib import Path
from typing import Self

import msgspec
from tests.support.brokers import connected, publish_states
from tests.support.reading import STATES, numbers, read
from tests.support.server_cluster import NUM_SERVERS, ClusterServer, ThreeServers, free_ports

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.bus.requests import Answer
from dynamix.schemas.streams import FEED

HOST = "127.0.0.1"
_NUM_ENTRIES = struct.Struct("<H")
_ENTRIES_AT = 40
"""In an append entry of nats-server's raft.go: behind the leader's name, and four numbers of 8 bytes."""


class _Group(msgspec.Struct):
    raft_group: str = ""


class _Places(Answer):
    cluster: _Group = msgspec.field(default_factory=_Group)


class RouteProxy:
    """Stands before the cluster port of one server."""

    def __init__(self, owner: "LaggingCopy", server: str, port: int, target: int) -> None:
        self._owner = owner
        self._server = server
        self._port = port
        self._target = target
        self._listening: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._listening = await asyncio.start_server(self._accept, HOST, self._port)

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        to_server = None
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            server, to_server = await asyncio.open_connection(HOST, self._target)
            peer = asyncio.get_running_loop().create_future()
            await asyncio.gather(self._pass_on(client, to_server, peer), self._pass_back(server, to_client, peer))
        for writer in (to_client, to_server):
            if writer is not None:
                writer.transport.abort()

    async def _pass_on(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, peer: asyncio.Future[str]
    ) -> None:
        """From the server that made the connection, which names itself."""
        while True:
            line, payload = await _read_message(source)
            if not peer.done() and line.startswith(b"INFO "):
                peer.set_result(next(name for name in self._owner.servers if f'"{name}"'.encode() in line))
            if not self._owner.leaves_out(self._server, line, payload):
                target.write(line + payload)
                await target.drain()

    async def _pass_back(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, peer: asyncio.Future[str]
    ) -> None:
        while True:
            line, payload = await _read_message(source)
            if not (peer.done() and self._owner.leaves_out(peer.result(), line, payload)):
                target.write(line + payload)
                await target.drain()


class _BehindProxy(ClusterServer):
    """Listens for the others at a port of its own, and finds them at their proxies."""

    def __init__(self, number: int, routes: list[str], listen: str, password: str) -> None:
        super().__init__(number, routes, password)
        self._advertise = self._listen
        self._listen = f'"{listen}"'

    def _config(self, store: Path) -> str:
        text = super()._config(store)
        return text.replace("no_advertise: true", f"no_advertise: true, advertise: {self._advertise}, compression: off")


class LaggingCopy(ThreeServers):
    """`async with LaggingCopy() as servers: ...`; then `await servers.keep_behind(bus, "FEED", "broker-3")`."""

    def __init__(self) -> None:
        shown, own = free_ports(2 * NUM_SERVERS)[:NUM_SERVERS], free_ports(NUM_SERVERS)
        routes, password = [f"{HOST}:{port}" for port in shown], secrets.token_urlsafe(24)
        super().__init__([_BehindProxy(n, routes, f"{HOST}:{own[n]}", password) for n in range(NUM_SERVERS)])
        self._proxies = [RouteProxy(self, name, shown[n], own[n]) for n, name in enumerate(self.servers)]
        self._group = b""
        self.behind = ""

    async def __aenter__(self) -> Self:
        for proxy in self._proxies:
            await proxy.open()
        return await super().__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        await super().__aexit__(kind, *rest)
        for proxy in self._proxies:
            await proxy.close()

    async def keep_behind(self, bus: Bus, stream: str, server: str) -> None:
        """Let no entry of the stream reach this server from now on."""
        group = (await bus.requests.ask(f"STREAM.INFO.{stream}", None, _Places)).cluster.raft_group
        assert group, f"{stream} has one copy"
        self.behind, self._group = server, group.encode()

    def leaves_out(self, server: str, line: bytes, payload: bytes) -> bool:
        """Whether the message has entries of the log that shall not reach this server."""
        if server != self.behind or not line.startswith((b"RMSG ", b"HMSG ")):
            return False
        is_appended = b" $NRG.AE." + self._group + b" " in line or b" $NRG.CR." in line
        if not is_appended or len(payload) < _ENTRIES_AT + _NUM_ENTRIES.size + len(b"\r\n"):
            return False  # shorter ones are answers, and requests to be brought up to date
        (num_entries,) = _NUM_ENTRIES.unpack_from(payload, _ENTRIES_AT)
        return bool(num_entries)


async def _read_message(source: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """One line of the routes' protocol, and the payload that follows it."""
    line = await source.readuntil(b"\n")
    if not line.startswith((b"RMSG ", b"HMSG ", b"MSG ")):
        return line, b""
    return line, await source.readexactly(int(line.split()[-1]) + 2)


async def test_a_reader_at_a_server_whose_copy_lags_reads_everything_in_order() -> None:
    async with LaggingCopy() as servers, contextlib.AsyncExitStack() as stack:
        writer: Bus = await stack.enter_async_context(connected(servers.settings))
        await provision(writer, [FEED], num_replicas=3)
        await servers.until_current(writer, [FEED])
        leader = (await servers.leader_of(writer, FEED.name)).name
        behind = next(name for name in servers.servers if name != leader)
        there = await stack.enter_async_context(connected(servers.servers[behind].settings))
        await publish_states(writer, range(1))
        async with there.consume(FEED.name, STATES, start="all") as reader:
            assert numbers(await read(reader, 1)) == [0]
            await servers.keep_behind(writer, FEED.name, behind)
            await publish_states(writer, range(1, 6))
            assert numbers(await read(reader, 5)) == [1, 2, 3, 4, 5]
            servers.behind = ""
            await publish_states(writer, range(6, 9))
            assert numbers(await read(reader, 3)) == [6, 7, 8]
        assert there.counters["consumer_resets"] == 0
        await servers.until_current(writer, [FEED])
