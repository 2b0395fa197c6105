"""One order for the messages of several streams. No I/O.

Within a stream the order is the broker's sequence; decisions depend on that of FEED. Between streams there is only the
broker's time: the earlier message comes first, and at the same nanosecond JOBS comes before FEED and FEED before
ACTIONS. Where the broker's clock was set back, a stream's later messages count as stored at the latest time seen in
that stream. The order depends only on what is stored, so that two captures of a job agree.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from .record import STREAMS, Record

FOREVER_NS = 1 << 63
"""Later than any message."""


class RecordMerge:
    """Takes records stream by stream and returns them in one order."""

    def __init__(self, streams: Sequence[str] = STREAMS) -> None:
        self._ranks = {stream: rank for rank, stream in enumerate(streams)}
        self._queues: dict[str, deque[tuple[int, int, Record]]] = {stream: deque() for stream in streams}
        self._newest_ns = dict.fromkeys(streams, 0)

    def add_record(self, record: Record) -> None:
        """Queue the next record of its stream."""
        newest = max(self._newest_ns[record.stream], record.timestamp_ns)
        self._newest_ns[record.stream] = newest
        self._queues[record.stream].append((newest, self._ranks[record.stream], record))

    def newest_ns(self, stream: str) -> int:
        """The latest time among the records of a stream; 0 before its first record."""
        return self._newest_ns[stream]

    def pop_until(self, time_ns: int = FOREVER_NS) -> Iterator[Record]:
        """Remove and return the records up to a time, that time included, in order.

        The caller has added every record of every stream that the broker stored up to then.
        """
        while waiting := [queue for queue in self._queues.values() if queue]:
            earliest = min(waiting, key=lambda queue: queue[0][:2])
            if earliest[0][0] > time_ns:
                return
            yield earliest.popleft()[2]
