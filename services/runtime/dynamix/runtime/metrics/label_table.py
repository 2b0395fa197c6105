"""The newest of something by job: as many as fit, for as long as there is news of them. Pure: the clock is injected."""

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

MAX_ENTRIES = 100
FORGET_AFTER_S = 3600.0
"""Longer than a collective that hangs waits by default (30 minutes)."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TableEntry(NamedTuple, Generic[K, V]):
    """An entry, and how long ago it was recorded."""

    key: K
    value: V
    age_s: float


class LabelTable(Generic[K, V]):
    """Keeps what is shown with the label of a job, bounded: names of jobs are made up by users, without an end.

    The entry recorded longest ago goes first; none is shown without news for `FORGET_AFTER_S`. Recording takes 0.3 us.
    The loop records while the thread that writes a scrape reads.

    Args:
        max_entries: most entries kept.
        clock: seconds, monotonic.

    Attributes:
        num_evicted: entries that went because there were too many.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_entries = max_entries
        self._clock = clock
        self._entries: dict[K, tuple[V, float]] = {}
        self._lock = threading.Lock()
        self.num_evicted = 0

    def record(self, key: K, value: V) -> None:
        """Store the newest of a key."""
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = (value, self._clock())
            if len(self._entries) > self._max_entries:
                del self._entries[next(iter(self._entries))]
                self.num_evicted += 1

    def get(self, key: K) -> V | None:
        """What was recorded last, also long ago."""
        found = self._entries.get(key)
        return None if found is None else found[0]

    def drop(self, key: K) -> None:
        """Show a key no longer: its job has ended."""
        with self._lock:
            self._entries.pop(key, None)

    def entries(self) -> list[TableEntry[K, V]]:
        """All that there was news of within `FORGET_AFTER_S`, oldest first."""
        now_s = self._clock()
        with self._lock:
            found = [TableEntry(key, value, now_s - at_s) for key, (value, at_s) in self._entries.items()]
        return [entry for entry in found if entry.age_s <= FORGET_AFTER_S]
