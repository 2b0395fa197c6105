"""The life of a service: settings, logs, connection, heartbeat, stop on a signal, exit code."""

import asyncio
import contextlib
import faulthandler
import gc
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import structlog
import uvloop

from dynamix.runtime import log as logs
from dynamix.runtime.bus import Bus, BusError, PermissionDeniedError, PublishError, StreamMissingError
from dynamix.runtime.health.heartbeat import send_heartbeats
from dynamix.runtime.health.watchdog import Watchdog
from dynamix.runtime.metrics import MetricsServer, ServiceMetrics
from dynamix.runtime.settings import Loaded, check_bus, help_text, load, node_name

from .context import Context, StartError
from .notifier import SystemdNotifier
from .shown import COUNTERS, GAUGES, ServiceState

STOP_TIMEOUT_S = 10.0
"""After a signal: so long for `main` to return, and as long again for what is in flight."""

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

S = TypeVar("S", bound=msgspec.Struct)
Main = Callable[[Context[S, Bus]], Coroutine[Any, Any, None]]


def run(service: str, settings_type: type[S], main: Main[S], arguments: Sequence[str] | None = None) -> int:
    """Run a service until a signal, an error or a closed connection; returns the exit code of the process.

    Reads settings from environment and `arguments` (`sys.argv` by default), sets up logs, connects (waiting for the
    broker as long as it takes), sends a heartbeat every second while `main` runs, and answers
    `/metrics`, `/livez` and `/readyz` where a port is set. systemd is notified where it asks. On SIGTERM
    or SIGINT it sets `context.stop` and ends the intake, waits for `main` to return, and drains. Codes: 0 after a
    signal or when `main` is done, 1 when `main` or the connection failed or the event loop was stuck, 2 for settings
    that cannot be used (also `StartError`).
    """
    given = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(given):
        sys.stdout.write(help_text(service, settings_type))
        return EXIT_OK
    try:
        loaded = load(service, settings_type, given)
        check_bus(loaded.bus)
    except ValueError as error:
        sys.stderr.write(f"dynamix {service}: {error}\n")
        return EXIT_USAGE
    logs.configure(loaded.shared.log_level)
    faulthandler.enable()  # systemd's SIGABRT then prints the threads' stacks, also when one keeps the interpreter lock
    gc.freeze()  # what imports made is never garbage: each full collection would spend 20 ms on it, loop and all
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_live(service, loaded, main))


async def _live(service: str, loaded: Loaded[S], main: Main[S]) -> int:
    return await _Life(service, loaded, main).live()


class _Life(Generic[S]):
    """One process's way from connection to exit code, in the loop that made it."""

    def __init__(self, service: str, loaded: Loaded[S], main: Main[S]) -> None:
        self._service = service
        self._loaded = loaded
        self._main = main
        self._node = node_name(loaded.shared)
        self._instance = loaded.shared.instance or self._node
        # of this process's context and not of one logger: those of the bus and of the standard library say it, too
        structlog.contextvars.bind_contextvars(service=service, instance=self._instance)
        self._log: structlog.stdlib.BoundLogger = structlog.get_logger(f"dynamix.{service}")
        self._stop = asyncio.Event()
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watchdog = Watchdog(loaded.shared.stuck_after_s)
        self._metrics = ServiceMetrics(service)
        self._metrics.declare(counters=COUNTERS, gauges=GAUGES)
        self._state = ServiceState(self._node, self._instance, self._stop, self._watchdog)
        self._metrics.add(self._state.show)
        self._notifier = SystemdNotifier(loaded.supervisor, self._state.not_ready)

    async def live(self) -> int:
        """Connect, work, drain; returns the exit code."""
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        try:
            async with self._watchdog, self._notifier, self._answering():
                bus = await self._connect(stopped)
                return EXIT_OK if bus is None else await self._work(bus, stopped)
        except (BusError, OSError) as error:
            self._log.error("cannot start", reason=str(error))
            return EXIT_FAILED
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            stopped.cancel()

    def _end(self) -> None:
        self._stop.set()
        self._notifier.stopping()

    @contextlib.asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Answer on the HTTP port, where there is one, from before the connection until after it."""
        shared = self._loaded.shared
        if shared.metrics_port == 0:
            yield
            return
        self._metrics.is_served = True
        async with MetricsServer(shared.metrics_host, shared.metrics_port, self._metrics, self._state.not_ready):
            yield

    async def _connect(self, stopped: asyncio.Task[bool]) -> Bus | None:
        """The connection; `None` when a signal came first."""
        connecting = asyncio.create_task(
            Bus.connect(self._loaded.bus, name=f"{self._service}-{self._instance}", on_closed=self._on_closed)
        )
        await asyncio.wait({connecting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if connecting.done():
            return connecting.result()
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        return None

    async def _work(self, bus: Bus, stopped: asyncio.Task[bool]) -> int:
        context = Context(
            service=self._service,
            instance=self._instance,
            node=self._node,
            bus=bus,
            settings=self._loaded.own,
            stop=self._stop,
            log=self._log,
            metrics=self._metrics,
        )
        self._state.bus, self._state.counters = bus, context.counters
        self._metrics.add(lambda scrape: self._metrics.show_counters(scrape, dict(context.counters)))
        heartbeats = send_heartbeats(
            bus,
            self._watchdog,
            lambda: context.counters,
            service=self._service,
            instance=self._instance,
            node=self._node,
            started_s=time.monotonic(),
        )
        self._log.info("started", pid=os.getpid())
        code = EXIT_FAILED
        try:
            async with asyncio.TaskGroup() as tasks:
                beating = tasks.create_task(heartbeats, name="heartbeat")
                main = tasks.create_task(self._main(context), name="main")
                code = await self._wait(main, bus, stopped)
                beating.cancel()
                main.cancel()
        except* Exception as errors:  # noqa: BLE001 - whatever it is ends this service, with its traceback in the log
            self._complain(_leaves(errors))
            code = EXIT_USAGE if errors.subgroup(StartError) else EXIT_FAILED
        finally:
            await bus.drain(0.0 if self._closed.done() else STOP_TIMEOUT_S)
            self._log.info("stopped")
        return code

    async def _wait(self, main: asyncio.Task[None], bus: Bus, stopped: asyncio.Task[bool]) -> int:
        """Wait until `main` is done, a signal came, or the connection closed for good; a failure ends the wait, too."""
        ends: list[asyncio.Future[Any]] = [main, self._closed]
        await asyncio.wait([*ends, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not main.done() and not self._closed.done():
            bus.stop_intake()
            await asyncio.wait(ends, timeout=STOP_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if self._closed.done():
            self._complain(())
            return EXIT_FAILED
        if not main.done():
            self._log.error("did not stop in time", timeout_s=STOP_TIMEOUT_S)
            return EXIT_FAILED
        return EXIT_OK

    def _complain(self, errors: Sequence[BaseException]) -> None:
        """Log why the service fails; where the connection is closed, that is the reason of all else."""
        if self._closed.done():
            self._log.error("ends because the connection is closed", reason=self._closed.result())
            return
        for error in errors:
            if isinstance(error, StartError):
                self._log.error("cannot start", reason=str(error))
            elif isinstance(error, PermissionDeniedError | StreamMissingError | PublishError):
                self._log.error("cannot go on", reason=str(error))
            else:
                self._log.error("failed", exc_info=error)

    def _on_closed(self, reason: str) -> None:
        if not self._closed.done():
            self._closed.set_result(reason)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The errors of a group and of the groups in it."""
    parts = ([one] if not isinstance(one, BaseExceptionGroup) else _leaves(one) for one in group.exceptions)
    return list(itertools.chain.from_iterable(parts))
