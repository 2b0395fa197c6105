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


class PartTimer:
    """Sums seconds by part. The timers' own cost is in the part and in the one around.

    It is a microsecond a call in a loop, but some ten where a long step before it has emptied the caches: a call only
    notes its times, sums are made at the end.
    """

    def __init__(self) -> None:
        self.clock: str | None = None
        """One of `CLOCKS`; while it is nothing, a timed call costs some 0.1 us more than an untimed one."""
        self._calls: list[tuple[str, int, str, float, float]] = []
        """Clock, thread, part, begin and end of every call that ended: those inside of a call before it."""
        self._thread = threading.get_ident()

    def seconds(self, *, here: bool) -> dict[str, dict[str, float]]:
        """Seconds by clock and part: in the thread that made the timer, or in all other threads."""
        sums = {clock: defaultdict[str, float](float) for clock in CLOCKS}
        ended: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        for clock, thread, part, began, end in self._calls:
            if (thread == self._thread) != here:
                continue
            before, inside = ended[clock, thread], 0.0
            while before and before[-1][0] >= began:
                began_inside, end_inside = before.pop()
                inside += end_inside - began_inside
            before.append((began, end))
            sums[clock][part] += end - began - inside
        return {clock: dict(by_part) for clock, by_part in sums.items()}

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
        calls, thread_of = self._calls, threading.get_ident

        @functools.wraps(function, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            clock = self.clock
            if clock is None:
                return function(*args, **kwargs)
            now = CLOCKS[clock]
            began = now()
            try:
                return function(*args, **kwargs)
            finally:
                calls.append((clock, thread_of(), part, began, now()))

        return call
