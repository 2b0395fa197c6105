"""A broker of three real nats-servers that keep every stream three times, and what happens to one of them.

A steady job with the real services runs on them; a bystander counts what they acknowledge; `run_trial` does something
to a server and says what was lost, and how long no decision came.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Self

import msgspec
from bench.jobs import SteadyJob
from tests.support.bus_watch import stored_messages

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.errors import BusError
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Report
from dynamix.schemas.streams import ACTIONS, FEED, STREAMS, Stream

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


Fault = Literal["leader-kill", "leader-freeze", "rolling-restart"]
BACK_TIMEOUT_S = 90.0
BEFORE_S = 1.0
AFTER_S = 2.0
"""Judged before the fault, and after decisions are back."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one fault."""

    fault: str
    acknowledged: int
    """Messages of the bystander, reports and actions."""
    lost: int
    """Acknowledged and not in the stream afterwards, or with other content."""
    longest_wait_s: float
    """From a window's report to its action at the reader, at most: so long was the job without decisions."""
    num_windows: int
    out_of_chain: int = 0
    """Actions that did not follow the one before them."""


class Scene(NamedTuple):
    """What a fault happens to."""

    servers: ThreeServers
    bus: Bus
    job: SteadyJob


async def run_trial(scene: Scene, fault: str, number: int, stream: str, happening: "Happening | None" = None) -> Trial:
    """One fault, from a cluster that is whole to one that is whole again, to the server that leads a stream.

    `number` is another one in each trial: it names the bystander's messages.
    """
    bystander, begin = Bystander(scene.bus, number), len(scene.job.reported_at)
    out_of_chain = scene.job.num_out_of_chain()
    await asyncio.sleep(BEFORE_S)
    server = await scene.servers.leader_of(scene.bus, stream)
    await (happening or _HAPPENS[fault])(scene, server)
    await scene.servers.until_current(scene.bus)
    async with scene.job.paused(BACK_TIMEOUT_S):
        windows = range(begin, len(scene.job.reported_at))
        lost, acknowledged = await bystander.num_lost(), bystander.num_acknowledged + 2 * len(windows)
        return Trial(
            fault=fault,
            acknowledged=acknowledged,
            lost=lost + await _lost_reports(scene, windows) + await _lost_actions(scene, windows),
            longest_wait_s=max(scene.job.waits_s(windows)),
            num_windows=len(windows),
            out_of_chain=scene.job.num_out_of_chain() - out_of_chain,
        )


async def _leader_kill(scene: Scene, server: ClusterServer) -> None:
    await server.kill()
    await until_back(scene)
    await server.start()


async def _leader_freeze(scene: Scene, server: ClusterServer) -> None:
    server.freeze()
    try:
        await until_back(scene)
    finally:
        server.thaw()


async def _rolling_restart(scene: Scene, _server: ClusterServer) -> None:
    for server in scene.servers.servers.values():
        await server.restart()
        await scene.servers.until_current(scene.bus)
    await until_back(scene)


Happening = Callable[[Scene, ClusterServer], Awaitable[None]]
_HAPPENS: dict[str, Happening] = {
    "leader-kill": _leader_kill,
    "leader-freeze": _leader_freeze,
    "rolling-restart": _rolling_restart,
}


async def until_back(scene: Scene) -> None:
    """Wait until a window that is reported from now on was decided, and a little longer."""
    await scene.job.until_decided(len(scene.job.reported_at), BACK_TIMEOUT_S)
    await asyncio.sleep(AFTER_S)


async def _lost_reports(scene: Scene, windows: range) -> int:
    """Reports of some windows that FEED does not have; all were acknowledged."""
    job = scene.job.job
    found = await stored_messages(scene.bus, FEED.name, subjects.of("report", job.job, job.nodes[0].node))
    kept = {decode(Report, message.subject, message.payload).window for message in found}
    return len(set(windows) - kept)


async def _lost_actions(scene: Scene, windows: range) -> int:
    """Actions of some windows that the reader had and ACTIONS has not, or has otherwise."""
    found = await stored_messages(scene.bus, ACTIONS.name, subjects.of("action", scene.job.job.job))
    kept = {action.window: action for action in (decode(Action, one.subject, one.payload) for one in found)}
    return sum(action.window in windows and kept.get(action.window) != action for action in scene.job.actions)
