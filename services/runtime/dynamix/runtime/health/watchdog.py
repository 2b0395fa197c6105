"""The watchdog: measures how late the event loop runs, and ends a process whose loop is stuck.

A loop that waits for ever in a blocking call looks alive from outside: the connection stays open and nothing is logged.
A supervisor can only restart a process that has ended.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Self

from dynamix.runtime.rate_limit import RateLimit

logger = logging.getLogger(__name__)

TICK_S = 0.1
LAG_LOGGED_S = 1.0
LOOKS = 20
"""How often the watching thread looks within the limit."""
MAX_LOOK_S = 0.5
SAYING_TIMEOUT_S = 2.0
"""A log whose reader has stopped must not keep a stuck process alive."""
EXIT_STUCK = 1


class Watchdog:
    """Watches the running event loop between `async with Watchdog(limit_s):` and the end of the block.

    The time is counted in what the watching thread itself lived through: of the time between two of its looks no more
    than two intervals count. A process that was stopped (SIGSTOP, a debugger, a frozen container) or starved of
    processor time, or a machine that slept, therefore never looks stuck: thread and loop go on together.

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
        """How much later than scheduled the loop ran, at most, since the last call.

        A block shorter than a tick is seen only when a tick was due during it.
        """
        lag_s, self._recent_lag_s = max(self._recent_lag_s, time.monotonic() - self._due), 0.0
        return lag_s

    def _tick(self) -> None:
        """Run in the loop; `time.monotonic`, as the loop's own time stands still within one turn."""
        now = time.monotonic()
        self._record_lag(now - self._due)
        self._num_ticks += 1
        self._due = now + self._tick_s
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _record_lag(self, lag_s: float) -> None:
        self._recent_lag_s, self.max_lag_s = max(self._recent_lag_s, lag_s), max(self.max_lag_s, lag_s)
        self.total_lag_s += lag_s
        if lag_s > LAG_LOGGED_S and self._limit.allow("lag"):
            logger.warning("the event loop was blocked for %.1f s: move the work to a thread or process", lag_s)

    def _watch(self) -> None:
        """Runs in the thread."""
        blocked = Blocked(self._look_s, time.monotonic())
        while not self._ended.wait(self._look_s):
            blocked_s = blocked.look(self._num_ticks, time.monotonic())
            if blocked_s >= self._limit_s:
                end_stuck_process(blocked_s)


class Blocked:
    """For how long a loop has not ticked, in the time of a thread that looks every `look_s`. Pure: told the time."""

    def __init__(self, look_s: float, now_s: float) -> None:
        self._look_s = look_s
        self._last_s = now_s
        self._num_ticks = 0
        self._blocked_s = 0.0

    def look(self, num_ticks: int, now_s: float) -> float:
        """Seconds without a tick. A late look, because the process did not run, counts as two intervals at most."""
        lived_s = min(now_s - self._last_s, 2 * self._look_s)
        self._blocked_s = self._blocked_s + lived_s if num_ticks == self._num_ticks else 0.0
        self._last_s, self._num_ticks = now_s, num_ticks
        return self._blocked_s


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
