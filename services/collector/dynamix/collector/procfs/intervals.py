"""The previous reading of each cumulative counter, and whether it is the one of the window before.

The only memory of the collector. Losing it costs one window's differences: they are unknown until there are two
readings.
"""

import time
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

FORGET_AFTER_S = 3600.0
"""A counter not read for so long belongs to a job that ended; no window may last longer."""

MAX_KEYS = 65_536
"""Ranks and jobs of one node: reports could name any number."""

V = TypeVar("V")


class WindowId(NamedTuple):
    """Which window of which run; windows count from 0 in each generation."""

    job: str
    generation: int
    window: int


class _Reading(NamedTuple, Generic[V]):
    at_s: float
    window: WindowId
    value: V


class Intervals(Generic[V]):
    """Remembers the newest reading of each key; 3 us an exchange, however many keys there are."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[Hashable, _Reading[V]] = {}
        """Readings in order of age."""

    def exchange(self, key: Hashable, value: V, window: WindowId) -> tuple[V, float] | None:
        """Store a reading; returns that of the window before and the seconds since, or `None` if there is none.

        A window that was read already, or an older one, is a message delivered again: it changes nothing, since the
        first reading is the one made nearest to the window's end.
        """
        now_s = self._clock()
        self._forget(now_s)
        last = self._last.get(key)
        if last is not None and window.job == last.window.job and window[1:] <= last.window[1:]:
            return None
        self._last.pop(key, None)
        self._last[key] = _Reading(now_s, window, value)
        if last is None or last.window != window._replace(window=window.window - 1) or now_s <= last.at_s:
            return None
        return last.value, now_s - last.at_s

    def _forget(self, now_s: float) -> None:
        """Drop what is too old or too much, from the oldest on: each reading is looked at once when it is due."""
        while self._last:
            key = next(iter(self._last))
            if now_s - self._last[key].at_s <= FORGET_AFTER_S and len(self._last) < MAX_KEYS:
                return
            del self._last[key]
