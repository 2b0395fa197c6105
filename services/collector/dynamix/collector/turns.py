"""Reports that were read and not handled yet, in the order in which jobs take turns.

Fair by bytes, after self-clocked fair queueing (Golestani 1994): a report is due when its job has had as many bytes as
every other job that waits. So a report of 2 kB waits for none of 450 kB, however many these are. A job that is new here
is due a little later than one that is known, so that a crowd of new jobs does not delay those that train. A job's own
reports keep their order.
"""

import collections
import heapq
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from dynamix.runtime.bus import BusMessage
from dynamix.schemas import subjects

MAX_TURN = 128
"""Reports handled without a pause, 0.2 ms each for 8 ranks: only after an interruption do so many wait."""
TURN_BYTES = 256 << 10
"""Bytes handled without a pause, at least one report: 4,096 ranks take 45 ms."""
MAX_WAITING_BYTES = 256 << 20
"""No more is read while so much waits; what the broker still holds is in no order but its own."""
MAX_UNFINISHED = 32_768
"""The same in reports, half of what the broker lets a reader leave unacknowledged."""
OVERHEAD_BYTES = 1024
"""What a report costs beside its bytes."""
NEW_JOB_BYTES = 256 << 10
"""A new job is due as if it had had so many bytes already: some 25 ms of work."""
MAX_KNOWN = 65_536
"""Jobs that are known, those handled last; some 8 MB."""
_NO_JOB = ""
"""Stands for subjects that name no job: their messages become dead letters, and take their turns as one job."""


class WaitingReport(NamedTuple):
    """A report whose turn has come."""

    message: BusMessage
    is_newest: bool
    """Whether no later one of its job was read yet."""


class _Waiting(NamedTuple):
    due: int
    number: int
    """In the order of the stream."""
    message: BusMessage


class WaitingReports:
    """Adds messages in the order of the stream, hands them out in turns, and says what can be acknowledged."""

    def __init__(self) -> None:
        self._queues: dict[str, collections.deque[_Waiting]] = {}
        """What waits, by job; no queue is empty."""
        self._heads: list[tuple[int, int, str]] = []
        """A heap of the first of each queue: when it is due, its number, its job."""
        self._known: dict[str, None] = {}
        """Jobs that had a turn, the last one at the end."""
        self._clock = 0
        self._numbers = itertools.count()
        self._unfinished: collections.deque[BusMessage] = collections.deque()
        """In the order of the stream, without payloads."""
        self._finished: set[int] = set()
        self._num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._heads)

    @property
    def has_room(self) -> bool:
        """Whether more may be read."""
        return self._num_bytes < MAX_WAITING_BYTES and len(self._unfinished) < MAX_UNFINISHED

    def add_messages(self, batch: Iterable[BusMessage]) -> None:
        """Let messages wait for their turn."""
        for message in batch:
            job, number = _job_of(message), next(self._numbers)
            queue = self._queues.setdefault(job, collections.deque())
            begins = queue[-1].due if queue else self._clock
            queue.append(_Waiting(begins + len(message.payload) + OVERHEAD_BYTES, number, message))
            if len(queue) == 1:
                self._push_head(job)
            self._unfinished.append(message._replace(payload=b"", headers=b""))
            self._num_bytes += len(message.payload)

    def take_turn(self) -> list[WaitingReport]:
        """The reports that are due first, at most `MAX_TURN` and, but for a single one, `TURN_BYTES`."""
        turn: list[WaitingReport] = []
        num_bytes = 0
        while self._heads and len(turn) < MAX_TURN:
            size = len(self._queues[self._heads[0][2]][0].message.payload)
            if turn and num_bytes + size > TURN_BYTES:
                break
            turn.append(self._take())
            num_bytes += size
        return turn

    def finish(self, turn: Iterable[WaitingReport]) -> BusMessage | None:
        """Note that reports were handled; returns the last one that can be acknowledged with all before it, if any."""
        self._finished.update(report.message.sequence for report in turn)
        last = None
        while self._unfinished and self._unfinished[0].sequence in self._finished:
            last = self._unfinished.popleft()
            self._finished.discard(last.sequence)
        return last

    def _push_head(self, job: str) -> None:
        first = self._queues[job][0]
        handicap = 0 if job in self._known else NEW_JOB_BYTES
        heapq.heappush(self._heads, (first.due + handicap, first.number, job))

    def _take(self) -> WaitingReport:
        _, _, job = heapq.heappop(self._heads)
        queue = self._queues[job]
        taken = queue.popleft()
        self._clock = max(
            self._clock, taken.due
        )  # without the handicap: known jobs stay ahead of all that wait with it
        self._num_bytes -= len(taken.message.payload)
        self._known.pop(job, None)
        self._known[job] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        if queue:
            self._push_head(job)
        else:
            del self._queues[job]
        return WaitingReport(taken.message, is_newest=not queue)


def _job_of(message: BusMessage) -> str:
    try:
        return subjects.parse(message.subject).tokens[0]
    except ValueError:
        return _NO_JOB
