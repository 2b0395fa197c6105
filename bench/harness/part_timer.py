"""Times named parts of a running program: each less the parts inside it, and apart for the thread that is watched.

By one of two clocks: the wall's, and the CPU time of the thread, which leaves out waiting for a core.
"""

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}


class _TimeInside(threading.local):
    """What the parts inside of the running one took so far, in one thread."""

    seconds = 0.0


class PartTimer:
    """Sums seconds by part. The timers' own cost, about a microsecond a call, is in the part and the one around."""

    def __init__(self) -> None:
        self.clock: str | None = None
        """One of `CLOCKS`; while it is nothing, a timed call costs some 0.1 us more than an untimed one."""
        self.here = {clock: defaultdict[str, float](float) for clock in CLOCKS}
        """By clock and part, in the thread that made the timer."""
        self.elsewhere = {clock: defaultdict[str, float](float) for clock in CLOCKS}
        """The same in all other threads."""
        self._thread = threading.get_ident()
        self._inside = _TimeInside()
        self._lock = threading.Lock()

    def wrap(self, owner: Any, function: Callable[..., Any], part: str) -> None:
        """Time every call of a class's method, or of a module's function."""
        setattr(owner, function.__name__, self.timed(function, part))

    def wrap_iteration(self, owner: Any, part: str) -> None:
        """Time what iterating over the objects of a class takes; not what is done with the items."""
        begin = owner.__iter__

        @functools.wraps(begin)
        def iterate(iterable: Any) -> Iterator[Any]:
            advance = self.timed(self.timed(begin, part)(iterable).__next__, part)
            while True:
                try:
                    item = advance()
                except StopIteration:
                    return
                yield item

        owner.__iter__ = iterate

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The function with its calls timed; it keeps its signature, which DDP looks at."""
        inside = self._inside

        @functools.wraps(function, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            clock = self.clock
            if clock is None:
                return function(*args, **kwargs)
            now = CLOCKS[clock]
            outer, inside.seconds = inside.seconds, 0.0
            began = now()
            try:
                return function(*args, **kwargs)
            finally:
                took = now() - began
                self._record_time(clock, part, took - inside.seconds)
                inside.seconds = outer + took

        return call

    def _record_time(self, clock: str, part: str, seconds: float) -> None:
        if threading.get_ident() == self._thread:
            self.here[clock][part] += seconds
        else:
            with self._lock:
                self.elsewhere[clock][part] += seconds
