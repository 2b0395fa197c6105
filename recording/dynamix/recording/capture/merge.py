"""One order for the messages of several streams. No I/O.

Within a stream the order is the broker's sequence: that of FEED is what decisions depend on. Between streams there is
only the broker's time, so that of two messages the earlier comes first; at the same nanosecond a specification comes
before the feed, and the feed before an action. Where the broker's clock was set back, a stream's later messages count
as stored at the latest time seen in it. The order is a function of what is stored: two captures of a job agree.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from .record import STREAMS, Record

FOREVER_NS = 1 << 63
"""Later than any message."""


class Merge:
    """Takes records stream by stream, gives them in one order."""

    def __init__(self, streams: Sequence[str] = STREAMS) -> None:
        self._rank = {stream: rank for rank, stream in enumerate(streams)}
        self._waiting: dict[str, deque[tuple[int, int, Record]]] = {stream: deque() for stream in streams}
        self._newest_ns = dict.fromkeys(streams, 0)

    def add(self, record: Record) -> None:
        """Take the next record of its stream."""
        newest = max(self._newest_ns[record.stream], record.timestamp_ns)
        self._newest_ns[record.stream] = newest
        self._waiting[record.stream].append((newest, self._rank[record.stream], record))

    def newest_ns(self, stream: str) -> int:
        """Up to when a stream was taken; 0 before its first record."""
        return self._newest_ns[stream]

    def until(self, time_ns: int = FOREVER_NS) -> Iterator[Record]:
        """What is in order up to a time, that time included.

        The caller has taken every record of every stream that the broker stored up to then.
        """
        while waiting := [queue for queue in self._waiting.values() if queue]:
            earliest = min(waiting, key=lambda queue: queue[0][:2])
            if earliest[0][0] > time_ns:
                return
            yield earliest.popleft()[2]
