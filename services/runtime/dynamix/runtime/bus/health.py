"""Health of a process: a watchdog over its event loop, its heartbeat, dead letters.

Services and training processes share it. In come the process's counters and messages that cannot be used; out go
`live` and `dead` messages, log lines, and, where an event loop is stuck for too long, the process's exit code.
"""

import asyncio
import collections
import contextlib
import faulthandler
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Never, Self

from msgspec.structs import replace

from dynamix.runtime.rate_limit import RateLimit
from dynamix.schemas import codec, subjects
from dynamix.schemas.messages import Dead, Live
from dynamix.schemas.streams import DAY_S
from dynamix.schemas.subjects import BY_NAME

from .bus import Bus
from .errors import BusError, PermissionDeniedError
from .requests import BusMessage

logger = logging.getLogger(__name__)

TICK_S = 0.1
LAG_LOGGED_S = 1.0
LOOKS = 20
"""Checks of the watching thread within the limit."""
MAX_LOOK_S = 0.5
SAYING_TIMEOUT_S = 2.0
"""A log whose reader has stopped must not keep a stuck process alive."""
EXIT_STUCK = 1


class Watchdog:
    """Watches the running event loop between `async with Watchdog(limit_s):` and the end of the block.

    The time is counted in what the watching thread itself lived through: of the time between two of its looks no more
    than two intervals count. A process that was stopped (SIGSTOP, a debugger, a frozen container) or starved of
    processor time, or a machine that slept, therefore never looks stuck: thread and loop continue together.

    It does not see code that keeps Python's interpreter lock for ever: the thread then waits, too.

    Args:
        limit_s: a loop that is blocked for so long ends the process with code 1; 0 only measures.
        tick_s: how often the loop shows that it runs; each costs 20 us of CPU time.

    Attributes:
        max_lag_s: how much later than scheduled the loop ran, at most, since the start.
        total_lag_s: the same, summed over all ticks: its rate is the share of time in which the loop was blocked.
    """

    def __init__(self, limit_s: float, *, tick_s: float = TICK_S) -> None:
        self.max_lag_s = self.total_lag_s = 0.0
        self._limit_s = limit_s
        self._tick_s = tick_s
        self._look_s = min(MAX_LOOK_S, limit_s / LOOKS)
        self._num_ticks = 0
        self._due = 0.0
        self._recent_lag_s = 0.0
        self._limit = RateLimit(per_s=1.0)
        self._ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._due = time.monotonic()
        self._tick()
        if self._limit_s > 0:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._thread.join()

    def take_max_lag_s(self) -> float:
        """Largest delay of the loop since the last call.

        A block shorter than a tick is seen only when a tick was due during it.
        """
        lag_s, self._recent_lag_s = max(self._recent_lag_s, time.monotonic() - self._due), 0.0
        return lag_s

    def _tick(self) -> None:
        """Run in the loop; `time.monotonic`, as the loop's own time stands still within one turn."""
        now = time.monotonic()
        lag_s = now - self._due
        self._recent_lag_s, self.max_lag_s = max(self._recent_lag_s, lag_s), max(self.max_lag_s, lag_s)
        self.total_lag_s += lag_s
        if lag_s > LAG_LOGGED_S and self._limit.allow("lag"):
            logger.warning("the event loop was blocked for %.1f s: move the work to a thread or process", lag_s)
        self._num_ticks += 1
        self._due = now + self._tick_s
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _watch(self) -> None:
        """Run in the thread: add up the seconds without a tick."""
        blocked_s, last_s, num_ticks = 0.0, time.monotonic(), self._num_ticks
        while not self._ended.wait(self._look_s):
            now_s = time.monotonic()
            lived_s = min(now_s - last_s, 2 * self._look_s)  # a late look: this process did not run
            blocked_s = blocked_s + lived_s if num_ticks == self._num_ticks else 0.0
            last_s, num_ticks = now_s, self._num_ticks
            if blocked_s >= self._limit_s:
                end_stuck_process(blocked_s)


def end_stuck_process(blocked_s: float) -> None:
    """Say what the threads are doing, and end the process at once: nothing of it can be trusted to end in order.

    The log's reader may have stopped: writing to a full pipe waits for ever, with the interpreter lock held. So another
    thread, one of C that needs no lock, ends the process soon in any case.
    """
    with Path(os.devnull).open("wb") as nowhere:
        faulthandler.dump_traceback_later(SAYING_TIMEOUT_S, exit=True, file=nowhere)
        # the stacks first: a thread that is stuck in writing a log holds the lock that our own line waits for
        faulthandler.dump_traceback(sys.stderr.fileno(), all_threads=True)
        logger.critical(
            "the event loop has been blocked for %.1f s: this process ends, so that it is started again; "
            "where it was stuck stands above",
            blocked_s,
        )
        os._exit(EXIT_STUCK)


HEARTBEAT_S = 1.0
WARN_BEFORE_S = 30 * DAY_S
"""A credential that expires is warned of once a day."""


async def send_heartbeats(
    bus: Bus, watchdog: Watchdog, counters: Callable[[], Mapping[str, int]], ours: Live, started_s: float
) -> Never:
    """Send a heartbeat every `HEARTBEAT_S`, until cancelled. One that the bus does not take is left out.

    It is `ours` with the process's `counters`, the bus's own with the prefix `bus_`, how late the event loop ran by the
    watchdog (`loop_lag_ms` since the last heartbeat, `max_loop_lag_ms` in all), and the uptime since `started_s`
    (monotonic).

    Raises:
        PermissionDeniedError: when the broker denies them. Then the login is that of another service or node, and this
            one would take messages from where they belong, unheard.
    """
    denied: asyncio.Future[PermissionDeniedError] = asyncio.get_running_loop().create_future()
    own_subject = subjects.subject_of(ours).lower()

    def note(subject: str, denial: PermissionDeniedError) -> None:
        if subject == own_subject and not denied.done():
            denied.set_result(denial)

    forget, warn_at = bus.when_denied(note), 0.0
    try:
        while True:
            left = bus.seconds_left
            if left is not None and left < WARN_BEFORE_S and time.monotonic() >= warn_at:
                warn_at = time.monotonic() + DAY_S
                fix = "replace its file by a new one of `dynamix keys create`"
                logger.warning("the credential of this %s expires in %.1f days: %s", ours.service, left / DAY_S, fix)
            shown = {f"bus_{name}": value for name, value in bus.counters.items()} | dict(counters())
            shown["loop_lag_ms"] = int(1000 * watchdog.take_max_lag_s())
            shown["max_loop_lag_ms"] = int(1000 * watchdog.max_lag_s)
            uptime_s = time.monotonic() - started_s
            with contextlib.suppress(BusError):
                await bus.publish_live(replace(ours, uptime_s=uptime_s, counters=shown))
            if (await asyncio.wait([denied], timeout=HEARTBEAT_S))[0]:
                limits = {"collector": f" --node {ours.node}", "reward": f" --instance {ours.instance}"}
                raise PermissionDeniedError(
                    f"{denied.result()}; its login is for another service, node or instance: correct DYNAMIX_NODE or "
                    "DYNAMIX_INSTANCE, or give it a key of `dynamix keys create NAME --role "
                    f"{ours.service}{limits.get(ours.service, '')}`"
                )
    finally:
        forget()


MAX_PAYLOAD_BYTES = 4096
MAX_TEXT = 1024
PER_KIND_PER_S = 10.0
UNKNOWN = "unknown"


class DeadLetters:
    """Sets aside the messages that one service cannot use.

    `counters` gets `dead_letters`, and `dead_letters_not_kept` for those over the rate or refused by the bus.
    """

    def __init__(self, bus: Bus, service: str, counters: collections.Counter[str]) -> None:
        self._bus = bus
        self._service = service
        self._counters = counters
        self._limit = RateLimit(PER_KIND_PER_S, burst=int(PER_KIND_PER_S))

    async def set_aside(self, message: BusMessage, reason: str) -> None:
        """Count and log a message, and publish it to `dead` at a limited rate; never raises."""
        self._counters["dead_letters"] += 1
        kind, job = tokens_of(message.subject)
        if not self._limit.allow(kind):
            self._counters["dead_letters_not_kept"] += 1
            return
        dead = Dead(
            service=self._service,
            subject=message.subject[:MAX_TEXT],
            sequence=message.sequence,
            reason=reason[:MAX_TEXT],
            payload=message.payload[:MAX_PAYLOAD_BYTES],
        )
        place = {"subject": dead.subject, "sequence": message.sequence, "job": job}
        logger.warning("dead letter: %s", reason, extra=place | {"suppressed": self._limit.suppressed(kind)})
        digest = hashlib.sha256(message.payload).hexdigest()[:16]
        identity = f"dead:{self._service}:{dead.subject}:{message.sequence}:{digest}"
        try:
            await self._bus.publish_bytes_soon(subjects.of("dead", kind, job), codec.encode(dead), identity)
        except (BusError, ValueError) as error:
            self._counters["dead_letters_not_kept"] += 1
            logger.warning("a dead letter was not kept: %s", error)


def tokens_of(subject: str) -> tuple[str, str]:
    """Kind and job in a subject that may be foreign; `unknown` for what is not ours or cannot be a token."""
    tokens = subject.removeprefix(subjects.ROOT + ".").split(".")
    kind = tokens[0] if subject.startswith(subjects.ROOT + ".") and tokens[0] in BY_NAME else UNKNOWN
    try:
        return kind, subjects.parse(subject).tokens[0]
    except ValueError:
        return kind, UNKNOWN
