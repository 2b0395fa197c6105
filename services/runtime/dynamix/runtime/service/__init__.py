"""The frame of a service: `run(name, settings_type, main)` reads settings, connects, and calls `main` with a `Context`.

In come the environment, `--flags` and signals; out go a heartbeat, logs and the exit code. A service's own work is its
`main`; what all services do alike belongs here.
"""

import asyncio
import contextlib
import faulthandler
import gc
import importlib.metadata
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import msgspec
import structlog
import uvloop

from dynamix.runtime import log as logs
from dynamix.runtime.bus import (
    Bus,
    BusError,
    BusMessage,
    PermissionDeniedError,
    PublishError,
    StreamFullError,
    StreamMissingError,
)
from dynamix.runtime.bus.connection import BUS_COUNTERS
from dynamix.runtime.bus.health import DeadLetters, Watchdog, send_heartbeats
from dynamix.runtime.metrics import MetricsServer, Scrape, ServiceMetrics
from dynamix.runtime.rate_limit import RateLimit
from dynamix.runtime.settings import Loaded, check_bus, help_text, load, node_name
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Live, Message

logger = logging.getLogger(__name__)

ROOM_WAIT_S = 1.0

S = TypeVar("S", bound=msgspec.Struct)
M = TypeVar("M", bound=Message)


class StartError(RuntimeError):
    """The service cannot work with these settings; the message has the reason and the fix."""


@dataclass
class Context(Generic[S]):
    """A service's name, bus, settings, log and counters: the argument of its `main`."""

    service: str
    instance: str
    node: str
    bus: Bus
    settings: S
    stop: asyncio.Event
    """Set by SIGTERM and SIGINT; loops over consumers and subscriptions end at the same moment."""
    log: structlog.stdlib.BoundLogger
    metrics: ServiceMetrics = field(default_factory=ServiceMetrics)
    """Registry of what a service shows to Prometheus."""

    def __post_init__(self) -> None:
        self.counters = self.metrics.counters
        """The service's own, shown in its heartbeat beside the bus's."""
        self.dead_letter = DeadLetters(self.bus, self.service, self.counters).set_aside
        """Sets aside a message that cannot be used, which must not end the service: it never raises."""

    def count(self, name: str, num: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] += num

    async def decoded(self, kind: type[M], message: BusMessage) -> M | None:
        """The content of a message; `None` for one that cannot be used, which is set aside."""
        try:
            return decode(kind, message.subject, message.payload)
        except MalformedMessageError as error:
            await self.dead_letter(message, str(error))
            return None

    async def publish_when_room(self, message: Message) -> bool:
        """Publish what must not be given up to a stream that may be full: wait for room.

        False when the service is to stop and there was no room. Each wait is counted as `waits_for_room`. Raises as
        `Bus.publish`, but for StreamFullError.
        """
        while True:
            try:
                await self.bus.publish(message)
            except StreamFullError:
                self.count("waits_for_room")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ROOM_WAIT_S):
                        await self.stop.wait()
                if self.stop.is_set():
                    return False
            else:
                return True


COUNTERS = {
    "dead_letters": "messages that could not be used",
    "dead_letters_not_kept": "of those, not stored on the bus either",
    "waits_for_room": "seconds of waiting for room in a full stream",
}
"""Counters of any service (`Context.count`)."""
GAUGES = {"ready": "1 once the service reads its streams"}
BUS_GAUGES = {
    "in_flight": "messages published and not acknowledged yet",
    "unacknowledged": "of those, for longer than 5 s: the broker stores nothing",
    "unanswered": "requests to the broker without an answer for 5 s",
    "failed_lately": "messages that were not stored, in the last minute",
}


class ServiceState:
    """The state of one service's process, for `/metrics` and `/readyz`.

    Attributes:
        bus: its connection, `None` before the first.
    """

    def __init__(
        self, node: str, instance: str, stop: asyncio.Event, watchdog: Watchdog, metrics: ServiceMetrics
    ) -> None:
        self.bus: Bus | None = None
        self._labels = {"node": node, "name": instance, "version": importlib.metadata.version("dynamix-batch")}
        self._stop = stop
        self._watchdog = watchdog
        self._counters = metrics.counters
        metrics.declare(counters=COUNTERS, gauges=GAUGES)
        metrics.add(self._show)

    def not_ready(self) -> str:
        """Reason why the service cannot work now, as one line; empty if it can."""
        if self._stop.is_set():
            return "stopping"
        if self.bus is None:
            return "waiting for the broker"
        if not self.bus.is_connected:
            return "the connection to the broker is lost"
        counted = self.bus.counters
        if late := counted["unacknowledged"]:
            return f"the broker has not acknowledged {late} messages for 5 s: is its disk full?"
        if late := counted["unanswered"]:  # such as a service that publishes nothing now
            return f"the broker has not answered {late} requests for 5 s: is its disk full?"
        return "" if self._counters.get("ready") else "not reading its streams yet"

    def _show(self, scrape: Scrape) -> None:
        bus = self.bus
        scrape.gauge("service_info", "always 1; what runs, by its labels", 1, **self._labels)
        scrape.gauge("connected", "1 while there is a connection to the broker", bus is not None and bus.is_connected)
        scrape.counter("loop_lag_seconds", "how late the event loop ran, summed over ticks", self._watchdog.total_lag_s)
        scrape.gauge("loop_lag_max_seconds", "how late it ran at most since the start", self._watchdog.max_lag_s)
        scrape.counter("process_cpu_seconds", "processor time of this process", time.process_time())
        if bus is None:
            return
        counted = bus.counters
        for name, meaning in BUS_COUNTERS.items():
            scrape.counter(f"bus_{name}", meaning, counted[name])
        for name, meaning in BUS_GAUGES.items():
            scrape.gauge(f"bus_{name}", meaning, counted[name])
        scrape.gauge("credential_seconds_left", "until the credential expires", bus.seconds_left)
        for kind, num_messages in sorted(bus.num_handled.items()):
            scrape.counter("messages_handled", "messages of a kind read from a stream", num_messages, kind=kind)


LOOK_S = 0.5
"""Interval of checks of the state; one without a change costs 5 us."""
PER_WATCHDOG = 4
"""Least signs of life within the time after which systemd takes the service for stuck."""


class SystemdNotifier:
    """Notifies systemd between `async with` and the end of the block, by datagrams of `KEY=value` lines: sd_notify(3).

    It works in the service's own event loop, like `/livez`: one that is stuck sends no `WATCHDOG=1`, and systemd ends
    the process and starts it again (`WatchdogSec=`). That also covers what `bus.health.Watchdog` cannot see: code that
    keeps the interpreter lock, and a process that was stopped. `READY=1` is sent once, when `/readyz` would answer 200.
    Without a socket nothing is sent.
    """

    def __init__(self, address: str, watchdog_s: float, not_ready: Callable[[], str]) -> None:
        self._address = address
        if self._address.startswith("@"):
            self._address = f"\0{self._address[1:]}"
        self._signs = ["WATCHDOG=1"] if watchdog_s else []
        self._look_s = min(LOOK_S, watchdog_s / PER_WATCHDOG or LOOK_S)
        self._not_ready = not_ready
        self._status: str | None = None
        self._was_ready = False
        self._limit = RateLimit(per_s=1 / 60)
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            self._look()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def stopping(self) -> None:
        """Notify at once that the service ends in order; a supervisor then waits for it."""
        self._send("STOPPING=1")

    def _look(self) -> None:
        """Run in the loop, again and again; an error here would end the signs of life, and systemd would restart us."""
        reason = self._not_ready()
        lines = [f"STATUS={reason or 'working'}"] if reason != self._status else []
        if not reason and not self._was_ready:
            lines.append("READY=1")
        lines += self._signs
        if lines and self._send("\n".join(lines)):
            self._status, self._was_ready = reason, self._was_ready or not reason
        self._timer = asyncio.get_running_loop().call_later(self._look_s, self._look)

    def _send(self, text: str) -> bool:
        """Whether systemd took it: if the socket is full, the next check tries again."""
        if self._socket is None:
            return False
        try:
            self._socket.sendto(text.encode(), self._address)
        except BlockingIOError:
            return False
        except OSError as error:
            if self._limit.allow("refused"):
                logger.warning("systemd cannot be notified (NOTIFY_SOCKET): %s", error)
            return False
        return True


STOP_TIMEOUT_S = 10.0
"""After a signal: time for `main` to return, and again for messages in flight."""

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

Main = Callable[[Context[S]], Coroutine[Any, Any, None]]


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
    """Connect, work, drain; returns the exit code."""
    node = node_name(loaded.shared)
    instance = loaded.shared.instance or node
    log: structlog.stdlib.BoundLogger = structlog.get_logger(f"dynamix.{service}")
    # in the context of the loop's tasks, not in one logger: lines of the bus and of libraries have them, too
    structlog.contextvars.bind_contextvars(service=service, instance=instance)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    stopped = asyncio.create_task(stop.wait(), name="stop")
    closed: asyncio.Future[str] = loop.create_future()
    """Why the connection is closed for good."""
    watchdog, metrics = Watchdog(loaded.shared.stuck_after_s), ServiceMetrics(service)
    state = ServiceState(node, instance, stop, watchdog, metrics)
    notifier = SystemdNotifier(*loaded.supervisor, state.not_ready)

    def end() -> None:
        stop.set()
        notifier.stopping()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    try:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(watchdog)
            await stack.enter_async_context(notifier)
            if port := loaded.shared.metrics_port:  # it answers from before the connection until after it
                metrics.is_served = True
                served = MetricsServer(loaded.shared.metrics_host, port, metrics, state.not_ready)
                await stack.enter_async_context(served)
            connecting = asyncio.create_task(
                Bus.connect(loaded.bus, name=f"{service}-{instance}", on_closed=closed.set_result)
            )
            await asyncio.wait({connecting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                connecting.cancel()
                await asyncio.gather(connecting, return_exceptions=True)
                return EXIT_OK
            state.bus = bus = connecting.result()
            context = Context(service, instance, node, bus, loaded.own, stop, log, metrics)
            return await _work(context, main, watchdog, stopped, closed)
    except (BusError, OSError) as error:
        log.error("cannot start", reason=str(error))
        return EXIT_FAILED
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        stopped.cancel()


async def _work(
    context: Context[S], main: Main[S], watchdog: Watchdog, stopped: asyncio.Task[bool], closed: asyncio.Future[str]
) -> int:
    """Run `main` until it is done or fails, a signal comes, or the connection is closed for good."""
    log, bus, code, errors = context.log, context.bus, EXIT_FAILED, list[BaseException]()
    ours = Live(service=context.service, instance=context.instance, node=context.node, uptime_s=0.0)
    heartbeats = send_heartbeats(bus, watchdog, lambda: context.counters, ours, time.monotonic())
    log.info("started", pid=os.getpid())
    try:
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(heartbeats, name="heartbeat")
            working = tasks.create_task(main(context), name="main")
            ends: list[asyncio.Future[Any]] = [working, closed]
            await asyncio.wait([*ends, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and not closed.done():
                bus.stop_intake()
                await asyncio.wait(ends, timeout=STOP_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and not closed.done():
                code = EXIT_OK
            elif not closed.done():
                log.error("did not stop in time", timeout_s=STOP_TIMEOUT_S)
            beating.cancel()
            working.cancel()
    except* Exception as group:  # noqa: BLE001 - whatever it is ends this service, with its traceback in the log
        errors = _leaves(group)
        code = EXIT_USAGE if group.subgroup(StartError) else EXIT_FAILED
    finally:
        if closed.done():  # the reason of all else
            log.error("ends because the connection is closed", reason=closed.result())
            errors = []
        for error in errors:
            if isinstance(error, StartError):
                log.error("cannot start", reason=str(error))
            elif isinstance(error, PermissionDeniedError | StreamMissingError | PublishError):
                log.error("cannot go on", reason=str(error))
            else:
                log.error("failed", exc_info=error)
        await bus.drain(0.0 if closed.done() else STOP_TIMEOUT_S)
        log.info("stopped")
    return code


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The errors of a group and of the groups in it."""
    parts = ([one] if not isinstance(one, BaseExceptionGroup) else _leaves(one) for one in group.exceptions)
    return list(itertools.chain.from_iterable(parts))
