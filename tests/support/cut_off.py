"""Three servers on hosts of network namespaces, one of which is cut off, and a client that goes on beside it.

`python -m tests.support.cut_off JOB SERVER` is that client, on the server's host with the broker's addresses in the
environment. It publishes and follows decisions all the time; it writes a line once it is connected to SERVER and
served, another once it has left it, and after a `Cut` on its standard input a `MinorityView`.
"""

import asyncio
import contextlib
import functools
import os
import secrets
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
from bench.hosts import ROOT, Host, Hosts
from tests.support.bus_watch import stored_messages
from tests.support.server_cluster import MESSAGES_PER_SUBJECT, ClusterServer, Scene, ThreeServers, until_back

from dynamix.cli.services import bus_environment
from dynamix.runtime import settings
from dynamix.runtime.bus import Bus, BusError
from dynamix.runtime.embedded import server_binary
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action
from dynamix.schemas.streams import ACTIONS, FEED

EVERY_S = 0.02
"""Between two messages, which do not wait for each other's acknowledgement."""
LOOK_EVERY_S = 0.05
UNDER_WAY_S = 1.0
"""What was stored when the link was cut may be acknowledged a moment later."""
BACK_TIMEOUT_S = 90.0
MAX_CONNECTIONS = 50
"""Each goes to any of the three servers."""


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """When a link was cut and healed, by the clock that all processes of a machine share."""

    began_at: float
    ended_at: float


class MinorityView(msgspec.Struct, frozen=True, kw_only=True):
    """What a client on the side of the server that was cut off saw."""

    acknowledged: int
    lost: int
    """Acknowledged and not stored once, as it was; or read as a decision that is not in its stream."""
    cut_for_s: float
    sent_while_cut: int
    acknowledged_while_cut: int
    """From a second after the cut to the healing."""
    stored_of_these: int
    """Messages that were sent while the link was cut and are stored in the end, each once."""
    left_after_s: float
    """From the cut until the client left the server that answers and stores nothing."""
    back_after_s: float
    """From the healing until a message was acknowledged and a decision was read."""


class MinorityClient:
    """Publishes numbered messages and follows a job's decisions, on one connection."""

    def __init__(self, bus: Bus, job: str) -> None:
        self._bus = bus
        self._job = f"minority-{os.getpid()}"
        self._decisions = subjects.of("action", job)
        self._sent_at: list[float] = []
        self._waiting: set[asyncio.Future[int]] = set()
        self._acknowledged: dict[int, tuple[int, float]] = {}
        """Sequence and time by number."""
        self._read: list[tuple[Action, float]] = []

    async def publish(self) -> None:
        """Publish until cancelled."""
        while True:
            number = len(self._sent_at)
            self._sent_at.append(time.monotonic())
            own = subjects.of("reward", self._job, f"node-{number // MESSAGES_PER_SUBJECT}")
            future = await self._bus.publish_bytes_soon(own, b"%d" % number, f"{own}:{number}")
            self._waiting.add(future)
            future.add_done_callback(functools.partial(self._on_answer, number))
            await asyncio.sleep(EVERY_S)

    async def follow(self) -> None:
        """Read decisions until cancelled, as a training process does."""
        while True:
            with contextlib.suppress(BusError):  # none could be looked up: following again finds the newest
                async with self._bus.follow(ACTIONS.name, self._decisions) as messages:
                    async for message in messages:
                        action = decode(Action, self._decisions, message.payload)
                        self._read.append((action, time.monotonic()))
            await asyncio.sleep(LOOK_EVERY_S)

    async def until_served(self, after: float) -> float:
        """When, after that time, a message had been acknowledged and a decision read."""
        answered = read = None
        try:
            async with asyncio.timeout(BACK_TIMEOUT_S):
                while True:
                    answered = next((at for _, at in self._acknowledged.values() if at > after), None)
                    read = next((at for _, at in self._read if at > after), None)
                    if answered is not None and read is not None:
                        return max(answered, read)
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            missing = [what for what, at in (("acknowledgement", answered), ("decision", read)) if at is None]
            raise BusError(f"no {' and no '.join(missing)} for {BACK_TIMEOUT_S:g} s") from None

    async def until_left(self) -> float:
        """When the connection was given up."""
        before = self._bus.counters["reconnects"]
        while self._bus.is_connected and self._bus.counters["reconnects"] == before:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(LOOK_EVERY_S)
        return time.monotonic()

    async def view(self, cut: Cut, left_at: float, back_at: float) -> MinorityView:
        """Compare with the streams, once all that was sent has been answered; nothing may be sent any more."""
        await asyncio.gather(*self._waiting, return_exceptions=True)
        places = defaultdict(list)
        for message in await stored_messages(self._bus, FEED.name, subjects.of("reward", self._job, subjects.ANY)):
            places[int(message.payload)].append(message.sequence)
        found = await stored_messages(self._bus, ACTIONS.name, self._decisions)
        kept = {action.window: action for action in (decode(Action, one.subject, one.payload) for one in found)}
        lost = sum(places[number] != [sequence] for number, (sequence, _) in self._acknowledged.items())
        made_up = sum(kept.get(action.window) != action for action, _ in self._read)
        while_cut = [number for number, at in enumerate(self._sent_at) if cut.began_at < at < cut.ended_at]
        surely_cut = cut.began_at + UNDER_WAY_S
        return MinorityView(
            acknowledged=len(self._acknowledged),
            lost=lost + made_up,
            cut_for_s=cut.ended_at - cut.began_at,
            sent_while_cut=len(while_cut),
            acknowledged_while_cut=sum(surely_cut < at < cut.ended_at for _, at in self._acknowledged.values()),
            stored_of_these=sum(len(places[number]) == 1 for number in while_cut),
            left_after_s=left_at - cut.began_at,
            back_after_s=back_at - cut.ended_at,
        )

    def _on_answer(self, number: int, future: asyncio.Future[int]) -> None:
        self._waiting.discard(future)
        if not future.cancelled() and future.exception() is None:
            self._acknowledged[number] = future.result(), time.monotonic()


async def connected_to(server: str, bus_settings: BusSettings) -> Bus:
    """A bus that knows all servers and is connected to this one, of the form `host:port`."""
    for _ in range(MAX_CONNECTIONS):
        bus = await Bus.connect(bus_settings, name="trainer-minority")
        url = bus._connection._client.connected_url
        if url is not None and url.netloc.rpartition("@")[2] == server:
            return bus
        await bus.close()
    raise BusError(f"none of {MAX_CONNECTIONS} connections went to {server}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def run(job: str, server: str) -> None:
    """From the first connection to the view."""
    bus = await connected_to(server, settings.read(BusSettings, "nats", os.environ))
    client = MinorityClient(bus, job)
    work = [asyncio.create_task(client.publish()), asyncio.create_task(client.follow())]
    try:
        await client.until_served(time.monotonic())
        _say("served")
        left_at = await client.until_left()
        _say("left")
        cut = msgspec.json.decode(await asyncio.to_thread(sys.stdin.buffer.readline), type=Cut)
        back_at = await client.until_served(cut.ended_at)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        _say(msgspec.json.encode(await client.view(cut, left_at, back_at)).decode())
    finally:
        await bus.close()


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
            raise AssertionError(f"the client beside the server said {line.decode().strip()!r} instead of {word!r}")

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
            raise AssertionError(f"the client beside the server did not say {what!r} in {SAY_TIMEOUT_S:g} s") from None
        if not line:
            raise AssertionError(f"the client beside the server ended before it said {what!r}: it said why above")
        return line


@contextlib.asynccontextmanager
async def client_beside(server: HostServer, settings: BusSettings, job: str) -> AsyncIterator[MinorityProcess]:
    """A client on a server's host, connected to it and served; it knows the addresses of all three."""
    command = server.place.command(sys.executable, "-m", "tests.support.cut_off", job, server.address)
    environ = {**os.environ, **bus_environment(settings)}
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environ, cwd=ROOT)
    try:
        client = MinorityProcess(process)
        await client.until("served")
        yield client
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()


class Partition:
    """Cuts the link of a server and heals it once decisions are back and the client beside it has left."""

    def __init__(self) -> None:
        self.views: list[MinorityView] = []

    async def __call__(self, scene: Scene, server: ClusterServer) -> None:
        assert isinstance(server, HostServer), "only a host's link can be cut"
        async with client_beside(server, scene.servers.settings, scene.job.job.job) as client:
            began_at = time.monotonic()
            server.place.cut()
            try:
                await until_back(scene)
                await client.until("left")
            finally:
                ended_at = time.monotonic()
                server.place.cut(is_cut=False)
            await scene.servers.until_current(scene.bus)
            self.views.append(await client.view(Cut(began_at=began_at, ended_at=ended_at)))


def main(arguments: Sequence[str]) -> None:
    """Run for a job's name and a server's address."""
    asyncio.run(run(*arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
