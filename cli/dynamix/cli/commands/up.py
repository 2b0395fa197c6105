"""Run the broker and the three services on this machine until interrupted.

A process that ends is started again, unless its settings are invalid: then all end. Other `dynamix` commands of the
same user find the broker by themselves. The streams are kept for the next start.
"""

import argparse
import asyncio
import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from dynamix.cli.arguments import MAX_PORT, add_option, count
from dynamix.cli.connection import connected, path, published, running
from dynamix.cli.errors import MISUSED, CommandError, MisuseError, explained
from dynamix.cli.services import (
    SERVICES,
    UNANSWERED,
    Heartbeats,
    ServiceProcess,
    beside,
    bus_environment,
    hear,
    wait_until_ready,
)
from dynamix.cli.terminal import stop_event
from dynamix.runtime import output_files
from dynamix.runtime.bus import Bus, BusError
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import EmbeddedServer, EmbeddedServerError
from dynamix.runtime.log import configure as configure_log
from dynamix.runtime.service import EXIT_USAGE
from dynamix.runtime.settings import SettingsError, SharedSettings, read
from dynamix.schemas.messages import Live

LOCK = "lock"
MIN_WAIT_S, MAX_WAIT_S = 0.5, 10.0
"""Before a process is started again; twice as long each time."""
STEADY_AFTER_S = 30.0
"""A process that ran this long has recovered: its next restart waits the least again."""
PATIENCE_S = 10.0
"""Seconds without a stored message after which the broker is restarted: longer than its restart takes."""
AGAIN_AFTER_S = 60.0
"""Between two restarts, or two complaints: the services need some time to recover."""
MIN_ROOM_BYTES = 16 << 20
"""Twice the largest block that a stream begins with."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--store-dir", metavar="DIR", help="keep the streams here (default: ~/.local/state/dynamix/jetstream)"
    )
    what = "the broker's port on 127.0.0.1; 0: a free one"
    add_option(parser, "--port", 0, what, type=count(0, MAX_PORT), metavar="N")
    what = (
        "serve /metrics, /livez and /readyz: the collector on port N of 127.0.0.1, reward and arbitrator on the next "
        "two; 0: none"
    )
    add_option(parser, "--metrics-port", 0, what, type=count(0, MAX_PORT - len(SERVICES) + 1), metavar="N")
    parser.add_argument(
        "--print-env",
        action="store_true",
        help='print the environment variables that reach the running broker, for eval "$(dynamix up --print-env)"',
    )


def run(arguments: argparse.Namespace) -> int:
    """Run until a signal; 0 after one."""
    other = running(os.environ)
    if arguments.print_env:
        if other is None:
            raise CommandError("no broker of `dynamix up` runs: start one with `dynamix up`")
        for key, value in bus_environment(other[0]).items():
            print(f"export {key}={shlex.quote(value)}")
        return 0
    with explained(SettingsError, exit_code=MISUSED):
        read(SharedSettings, "", os.environ)  # the services would refuse it, each by itself
    if other is not None:
        raise CommandError(f"it runs already, as process {other[1]} at {other[0].url}: stop that one first")
    if os.environ.get("DYNAMIX_METRICS_PORT"):
        raise CommandError("DYNAMIX_METRICS_PORT is for one service, and three start here: use --metrics-port N")
    first = arguments.metrics_port
    ports = [first + index if first else 0 for index in range(len(SERVICES))]
    _check_port("--port", arguments.port)
    for port in filter(None, ports):
        if port == arguments.port:
            raise CommandError(f"--metrics-port: {port} is the broker's own port: keep it out of the three")
        _check_port("--metrics-port", port)
    configure_log("warning")
    with _locked_store(arguments.store_dir) as store:
        asyncio.run(_run_until_signal(EmbeddedServer(store_dir=store, port=arguments.port), ports, store))
    return 0


def _check_port(flag: str, port: int) -> None:
    """Refuse a port that is taken or not ours to take, before anything starts; a server may still take it meanwhile."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError as error:
            what = f"{flag} {port}: 127.0.0.1:{port} cannot be listened on ({error.strerror})"
            raise CommandError(f"{what}; stop what uses it, or name another port (0: a free one)") from error


@contextlib.contextmanager
def _locked_store(given: str | None) -> Iterator[Path]:
    """The directory of the streams, made and kept from a second broker, which would destroy them."""
    state = os.environ.get("XDG_STATE_HOME") or Path(os.environ.get("HOME") or Path.home()) / ".local" / "state"
    connection = path(os.environ)
    store = Path(given or Path(state) / "dynamix" / "jetstream")
    fix = "pass --store-dir DIR, or set XDG_RUNTIME_DIR or HOME to a directory of yours"
    try:
        output_files.check_directory(store)
        output_files.check(store / LOCK, make_parents=True)
        output_files.check(connection, make_parents=True)
    except output_files.RefusedOutputError as error:
        raise MisuseError(f"{error}: {fix}") from error
    for directory in (store, connection.parent):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"cannot make the directory {directory} ({error.strerror}): {fix}") from error
    with (store / LOCK).open("a") as lock:  # nothing is written, so that a file of that name keeps its content
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"{store} is in use by another `dynamix up`: stop it or pass --store-dir") from None
        yield store


async def _run_until_signal(server: EmbeddedServer, ports: list[int], store: Path) -> None:
    """The broker outside, then our own connection, then the services: each needs what is around it to end well."""

    async def restart() -> None:
        """With the same port, password and streams, so that clients come back alone; the store may be emptied."""
        await server.restart()
        try:
            made = [line for line in await provision(bus) if not line.endswith(": unchanged")]
        except BusError as error:
            _say("streams", f"not made: {error}")
        else:
            _say("streams", "; ".join(made) or "as they were")

    with stop_event(signal.SIGHUP) as stop, explained(EmbeddedServerError, ChildSettingsError):
        async with server, connected(server.settings, "up") as bus:
            await provision(bus)
            _say("broker", f"{server.settings.url} as process {server.pid}, streams in {store}")
            if ports[0]:
                _say("metrics", f"http://127.0.0.1:{ports[0]} to {ports[-1]}, /metrics, /livez and /readyz")
            shared = bus_environment(server.settings)
            shared["DYNAMIX_LOG_LEVEL"] = os.environ.get("DYNAMIX_LOG_LEVEL") or "warning"
            processes = [
                ServiceProcess(name, shared | {"DYNAMIX_METRICS_PORT": str(port)})
                for name, port in zip(SERVICES, ports, strict=True)
            ]
            for process in processes:
                process.start()
            # the broker is stopped by its own context, after our connection
            broker = Child("broker", lambda: server.pid, restart, lambda: asyncio.sleep(0))
            children = [broker, *map(service, processes)]
            with published(server.settings, os.environ) as file:
                works = [_announce(bus, processes, file), watch_store(bus, server, store)]
                async with beside(*map(keep, children), *works):
                    await stop.wait()
    _say("stopped", "")


async def _announce(bus: Bus, processes: Iterable[ServiceProcess], file: Path) -> None:
    """Print each service as it becomes ready, then how to use them."""

    async def one(process: ServiceProcess) -> None:
        try:
            await wait_until_ready(bus, [process.name])
        except TimeoutError as error:
            _say(process.name, f"{error}; DYNAMIX_LOG_LEVEL=info shows more")
        else:
            _say(process.name, f"ready as process {process.pid}")

    await asyncio.gather(*map(one, processes))
    _say("train", "dynamix train -- --standalone --nproc-per-node 4 train.py")
    _say("watch", "dynamix top; as a web page: dynamix dashboard")
    _say("connect", f'dynamix commands read {file}; others: eval "$(dynamix up --print-env)"')
    _say("stop", "Ctrl-C")


def _say(what: str, text: str) -> None:
    print(f"{what:<11}{text}".rstrip(), file=sys.stderr, flush=True)


# --- processes that are kept running


class Child(NamedTuple):
    """A process that can be started again after its end."""

    name: str
    pid: Callable[[], int]
    """The running process's id."""
    start: Callable[[], Awaitable[None]]
    """Start it, or start it again."""
    stop: Callable[[], Awaitable[None]]
    """Ask it to end, and wait until it has."""
    exit_code: Callable[[], int | None] = lambda: None
    """Exit code of its end; `None` if it is always restarted."""


class ChildSettingsError(Exception):
    """A child refused its settings: it would do so after every restart."""


def service(process: ServiceProcess) -> Child:
    """A service; the event loop continues while it drains."""

    async def start() -> None:
        await asyncio.to_thread(process.stop)  # reaps the one that ended
        process.start()

    return Child(process.name, lambda: process.pid, start, lambda: asyncio.to_thread(process.stop), process.exit_code)


async def keep(child: Child) -> None:
    """Start a child again whenever it ends, until cancelled. Raises ChildSettingsError when it refused its settings."""
    wait_s, time_s = MIN_WAIT_S, asyncio.get_running_loop().time
    try:
        while True:
            begin_s = time_s()
            await exited(child.pid())
            lived_s = time_s() - begin_s
            if child.exit_code() == EXIT_USAGE:
                raise ChildSettingsError(f"{child.name} cannot use its settings, and said why: correct them")
            wait_s = MIN_WAIT_S if lived_s >= STEADY_AFTER_S else wait_s
            await asyncio.sleep(wait_s)
            _say(child.name, f"ended after {lived_s:.1f} s; starting it again")
            try:
                await child.start()
            except (OSError, RuntimeError) as error:
                _say(child.name, f"does not start: {error}")
            wait_s = min(2 * wait_s, MAX_WAIT_S)
    finally:
        await child.stop()


async def exited(pid: int) -> None:
    """Return when a process has ended. The kernel reports it: nothing is polled."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


# --- a broker that stores nothing: after a full disk nats-server answers nothing until it is started again, also when
# there is room by then; connections stay open, services beat, and no decision is stored


class StoreJudge:
    """Decides what to do about a broker that stores nothing. Pure: the caller passes numbers and the time."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._acted_s: float | None = None
        self._was_full = False

    def judge(self, num_unanswered: int, free_bytes: int, now_s: float) -> Literal["restart", "full", ""]:
        """Decide what to do, at most every `AGAIN_AFTER_S`: nothing while all is stored, or for less than `PATIENCE_S`.

        Once a full disk has room, the restart is due at once.
        """
        if not num_unanswered:
            self._since_s = None
            return ""
        self._since_s = now_s if self._since_s is None else self._since_s
        has_room = free_bytes >= MIN_ROOM_BYTES
        acts_again = self._acted_s is None or now_s - self._acted_s >= AGAIN_AFTER_S or (self._was_full and has_room)
        if now_s - self._since_s < PATIENCE_S or not acts_again:
            return ""
        self._acted_s, self._was_full = now_s, not has_room
        return "restart" if has_room else "full"


async def watch_store(bus: Bus, server: EmbeddedServer, store: Path) -> None:
    """Listen to heartbeats until cancelled, and end a broker that stores nothing; then it is started again."""
    judge, heartbeats, time_s = StoreJudge(), Heartbeats(), asyncio.get_running_loop().time

    def observe(beat: Live) -> None:
        heartbeats.record(beat, time_s())
        num_unanswered = heartbeats.count(*UNANSWERED, now_s=time_s())
        try:
            free_bytes = shutil.disk_usage(store).free
        except OSError:  # there is no store any more
            free_bytes = 0
        verdict = judge.judge(num_unanswered, free_bytes, time_s())
        what = f"it has not answered {num_unanswered} messages or requests for {PATIENCE_S:g} s"
        if verdict == "restart":
            _say("broker", f"{what}, and there is room: starting it again")
            with contextlib.suppress(ProcessLookupError, EmbeddedServerError):  # it ends already
                os.kill(server.pid, signal.SIGTERM)
        elif verdict == "full":
            _say("broker", f"{what}: {store} has {free_bytes >> 20} MiB left, make room; it is then started again")

    await hear(bus, observe)
