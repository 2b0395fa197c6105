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
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamix.cli.connection import connected, path, published, running
from dynamix.cli.errors import MISUSED, CommandError, MisuseError, explained
from dynamix.cli.services import SERVICES, ServiceProcess, bus_environment, wait_until_ready
from dynamix.cli.terminal import stop_event
from dynamix.runtime import output_files
from dynamix.runtime.bus import Bus, BusError
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import EmbeddedServer, EmbeddedServerError
from dynamix.runtime.log import configure as configure_log
from dynamix.runtime.settings import MAX_PORT, BusSettings, SettingsError, SharedSettings, read

from .store_watch import watch_store
from .supervisor import Child, ChildSettingsError, broker, kept, service

LOCK = "lock"


class UpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `dynamix up`: `DYNAMIX_UP_<FIELD>` or `--field`."""

    store_dir: str = ""
    """Where the streams are kept; default: dynamix/jetstream below XDG_STATE_HOME (~/.local/state)."""
    port: int = 0
    """Port of the broker on 127.0.0.1; 0 takes a free one."""
    metrics_port: int = 0
    """First of three ports on 127.0.0.1 with metrics and health of collector, reward and arbitrator; 0: none."""

    def __post_init__(self) -> None:
        """Raise ValueError for what is no port."""
        if not 0 <= self.port <= MAX_PORT:
            raise ValueError(f"port must be 0 (a free one) to {MAX_PORT}, not {self.port}")
        last = MAX_PORT - len(SERVICES) + 1
        if not 0 <= self.metrics_port <= last:
            raise ValueError(f"metrics_port must be 0 (none) to {last}, not {self.metrics_port}")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--store-dir", metavar="DIR", help="keep the streams here (default: ~/.local/state/dynamix/jetstream)"
    )
    parser.add_argument("--port", metavar="N", help="the broker's port on 127.0.0.1 (default: a free one)")
    parser.add_argument(
        "--metrics-port",
        metavar="N",
        help="answer /metrics, /livez and /readyz: the collector on port N of 127.0.0.1, reward and arbitrator on the "
        "next two (default: none)",
    )
    parser.add_argument(
        "--print-env",
        action="store_true",
        help='start nothing: print how to reach the one that runs, for eval "$(dynamix up --print-env)"',
    )


def run(arguments: argparse.Namespace) -> int:
    """Run until a signal; 0 after one."""
    if arguments.print_env:
        return _print_environment(os.environ)
    given = {name: getattr(arguments, name) for name in ("store_dir", "port", "metrics_port")}
    with explained(SettingsError, exit_code=MISUSED):
        read(SharedSettings, "", os.environ)  # the services would refuse it, each by itself
        settings = read(UpSettings, "up", os.environ, {name: value for name, value in given.items() if value})
    if (other := running(os.environ)) is not None:
        raise CommandError(f"it runs already, as process {other.pid} at {other.url}: stop that one first")
    if os.environ.get("DYNAMIX_METRICS_PORT"):
        raise CommandError("DYNAMIX_METRICS_PORT is for one service, and three start here: use --metrics-port N")
    _check_port("--port", settings.port)
    for port in metrics_ports(settings):
        if port == settings.port:
            raise CommandError(f"--metrics-port: {port} is the broker's own port: keep it out of the three")
        _check_port("--metrics-port", port)
    configure_log("warning")
    store = Path(settings.store_dir) if settings.store_dir else _default_store(os.environ)
    connection_file = path(os.environ)
    _check_places(store, connection_file)
    _make_directory(store)
    _make_directory(connection_file.parent)
    with _locked(store):
        asyncio.run(_run_until_signal(EmbeddedServer(store_dir=store, port=settings.port), settings, store, os.environ))
    return 0


async def _run_until_signal(
    server: EmbeddedServer, settings: UpSettings, store: Path, environ: Mapping[str, str]
) -> None:
    """The broker outside, then our own connection, then the services: each needs what is around it to end well."""
    restarted = asyncio.Event()
    with stop_event(signal.SIGHUP) as stop, explained(EmbeddedServerError, ChildSettingsError):
        keeping = kept([broker(server, restarted.set)], _say, stop)
        async with server, keeping, connected(server.settings, "up") as bus:
            await provision(bus)
            _say("broker", f"{server.settings.url} as process {server.pid}, streams in {store}")
            ports = metrics_ports(settings)
            if ports:
                _say("metrics", f"http://127.0.0.1:{ports[0]} to {ports[-1]}, /metrics, /livez and /readyz")
            with published(server.settings, environ) as file:
                beside = [_provision_again(bus, restarted), watch_store(bus, server, store, _say)]
                await _serve(bus, _services(server.settings, ports, environ), file, stop, beside)
    _say("stopped", "")


def _services(settings: BusSettings, ports: Sequence[int], environ: Mapping[str, str]) -> list[Child]:
    """The services, not started, each with its port of metrics where there are any."""
    shared = bus_environment(settings) | {"DYNAMIX_LOG_LEVEL": environ.get("DYNAMIX_LOG_LEVEL") or "warning"}
    return [
        service(ServiceProcess(name, shared | {"DYNAMIX_METRICS_PORT": str(port)}))
        for name, port in zip(SERVICES, ports or [0] * len(SERVICES), strict=True)
    ]


async def _serve(
    bus: Bus, services: list[Child], file: Path, stop: asyncio.Event, beside: list[Coroutine[Any, Any, None]]
) -> None:
    for child in services:
        await child.start()
    async with kept(services, _say, stop):
        tasks = [asyncio.create_task(work) for work in (_announce(bus, services, file), *beside)]
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _provision_again(bus: Bus, restarted: asyncio.Event) -> None:
    """After each restart of the broker: its store may have been emptied meanwhile."""
    while True:
        await restarted.wait()
        restarted.clear()
        try:
            made = [line for line in await provision(bus) if not line.endswith(": unchanged")]
        except BusError as error:
            _say("streams", f"not made: {error}")
        else:
            _say("streams", "; ".join(made) or "as they were")


async def _announce(bus: Bus, services: list[Child], file: Path) -> None:
    """Say what is ready as it becomes ready, then how to use it."""

    async def one(child: Child) -> None:
        try:
            await wait_until_ready(bus, [child.name])
        except TimeoutError as error:
            _say(child.name, f"{error}; DYNAMIX_LOG_LEVEL=info shows more")
        else:
            _say(child.name, f"ready as process {child.pid()}")

    await asyncio.gather(*map(one, services))
    _say("train", "dynamix train -- --standalone --nproc-per-node 4 train.py")
    _say("watch", "dynamix top; as a web page: dynamix dashboard")
    _say("connect", f'dynamix commands read {file}; others: eval "$(dynamix up --print-env)"')
    _say("stop", "Ctrl-C")


def _print_environment(environ: Mapping[str, str]) -> int:
    if (found := running(environ)) is None:
        raise CommandError("no broker of `dynamix up` runs: start one with `dynamix up`")
    for key, value in bus_environment(found.settings).items():
        print(f"export {key}={shlex.quote(value)}")
    return 0


def metrics_ports(settings: UpSettings) -> range:
    """Ports with metrics, in the order of `SERVICES`; empty where there are to be none."""
    first = settings.metrics_port
    return range(first, first + len(SERVICES)) if first else range(0)


def _check_port(flag: str, port: int) -> None:
    """Refuse a port that is taken or not ours to take, before anything starts; a server may still take it meanwhile."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError as error:
            what = f"{flag} {port}: 127.0.0.1:{port} cannot be listened on ({error.strerror})"
            raise CommandError(f"{what}; stop what uses it, or name another port (0: a free one)") from error


def _default_store(environ: Mapping[str, str]) -> Path:
    state = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME") or Path.home()) / ".local" / "state"
    return Path(state) / "dynamix" / "jetstream"


def _check_places(store: Path, connection_file: Path) -> None:
    """Refuse, before anything starts, places that are not what we would write there."""
    try:
        output_files.check_directory(store)
        output_files.check(store / LOCK, make_parents=True)
        output_files.check(connection_file, make_parents=True)
    except output_files.RefusedOutputError as error:
        raise MisuseError(f"{error}: pass --store-dir DIR, or set HOME to a directory of yours") from error


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        fix = "pass --store-dir DIR, or set XDG_RUNTIME_DIR or HOME to a directory of yours"
        raise CommandError(f"cannot make the directory {directory} ({error.strerror}): {fix}") from error


@contextlib.contextmanager
def _locked(store: Path) -> Iterator[None]:
    """Keep a second broker from the same streams: it would destroy them."""
    with (store / LOCK).open("a") as lock:  # nothing is written, so that a file of that name keeps its content
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"{store} is in use by another `dynamix up`: stop it or pass --store-dir") from None
        yield


def _say(what: str, text: str) -> None:
    print(f"{what:<11}{text}".rstrip(), file=sys.stderr, flush=True)
