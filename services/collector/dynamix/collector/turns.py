"""Reports that were read and not handled yet, in the order in which jobs take turns.

Fair by bytes, after self-clocked fair queueing (Golestani 1994): a report is due when its job has had as many bytes as
every other job that waits. So a report of 2 kB waits for none of 450 kB, however many these are. All runs of a name
count as one job, since one key is for all of them. A job that is new here is due a little later than one that is known,
so that a crowd of new jobs does not delay those that train. A job's own reports keep their order. Where more waits than
there is room for, those jobs lose their oldest that have the most. A report may be added early, before what the broker
delivers first: it is handled once, and acknowledged in the order of the stream.
"""

import collections
import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dynamix.runtime.bus import BusMessage
from dynamix.schemas import subjects

MAX_WAITING_BYTES = 256 << 20
"""More does not wait: reading goes on, since the broker holds what is not read in no order but its own. Old ones go."""
MAX_WAITING = 16_384
"""The same in reports, beside one of each job."""
MAX_UNFINISHED = 32_768
"""No more is read while so many are not acknowledged, half of what the broker lets a reader leave so."""
OVERHEAD_BYTES = 1024
"""What a report costs beside its bytes."""
LARGE_BYTES = 16 << 10
"""A report above it, some 200 ranks of a node, is not pressing: it takes longer to handle than to read many others."""
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
    """Whether no later one of its subject was read yet."""


class _Waiting(NamedTuple):
    due: int
    number: int
    """In the order of the stream."""
    message: BusMessage


class WaitingReports:
    """Adds messages in the order of the stream, hands them out in turns, and says what can be acknowledged.

    Attributes:
        num_passed_over: reports that had no turn, since their job sent more than there is room for.
        crowding_job: the job of the newest of them.
    """

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
        self._newest: dict[str, int] = {}
        """The newest sequence that waits, by subject."""
        self._last_read = 0
        """The last sequence that was read in the order of the stream."""
        self._early: set[int] = set()
        """Later ones that were added before."""
        self._num_waiting = 0
        self._num_bytes = 0
        self.num_passed_over = 0
        self.crowding_job = _NO_JOB

    def __bool__(self) -> bool:
        return bool(self._heads)

    @property
    def has_room(self) -> bool:
        """Whether more may be read."""
        return self._num_bytes < MAX_WAITING_BYTES and len(self._unfinished) < MAX_UNFINISHED

    @property
    def next_bytes(self) -> int:
        """The size of the report that is due first; 0 when none waits."""
        return len(self._queues[self._heads[0][2]][0].message.payload) if self._heads else 0

    def add_early(self, message: BusMessage) -> None:
        """Let a message wait that the stream's order has not brought yet."""
        if message.sequence > self._last_read and message.sequence not in self._early:
            self._early.add(message.sequence)
            self._add(message)

    def add_messages(self, batch: Iterable[BusMessage]) -> bool:
        """Let messages wait for their turn; whether one is pressing: small, of a known job of which nothing waited."""
        is_pressing = False
        for message in batch:
            self._last_read = message.sequence
            self._unfinished.append(message._replace(payload=b"", headers=b""))
            if message.sequence in self._early:
                self._early.discard(message.sequence)
            else:
                is_pressing = self._add(message) or is_pressing
        if self._num_waiting - len(self._queues) > MAX_WAITING or self._num_bytes > MAX_WAITING_BYTES:
            self._make_room()
        return is_pressing

    def _add(self, message: BusMessage) -> bool:
        job = _job_of(message)
        queue = self._queues.setdefault(job, collections.deque())
        begins = queue[-1].due if queue else self._clock
        queue.append(_Waiting(begins + len(message.payload) + OVERHEAD_BYTES, next(self._numbers), message))
        self._newest[message.subject] = max(message.sequence, self._newest.get(message.subject, 0))
        self._num_waiting += 1
        self._num_bytes += len(message.payload)
        if len(queue) > 1:
            return False
        self._push_head(job)
        return job in self._known and len(message.payload) <= LARGE_BYTES

    def _no_longer_waits(self, message: BusMessage) -> bool:
        """Whether it was the newest one of its subject."""
        self._num_waiting -= 1
        self._num_bytes -= len(message.payload)
        if is_newest := self._newest.get(message.subject) == message.sequence:
            del self._newest[message.subject]
        return is_newest

    def take(self) -> WaitingReport:
        """The report that is due first; only while one waits."""
        _, _, job = heapq.heappop(self._heads)
        queue = self._queues[job]
        taken = queue.popleft()
        self._clock = max(
            self._clock, taken.due
        )  # without the handicap: known jobs stay ahead of all that wait with it
        is_newest = self._no_longer_waits(taken.message)
        self._known.pop(job, None)
        self._known[job] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        if queue:
            self._push_head(job)
        else:
            del self._queues[job]
        return WaitingReport(taken.message, is_newest)

    def finish(self, reports: Iterable[WaitingReport]) -> BusMessage | None:
        """Note that reports were handled; returns the last one that can be acknowledged with all before it, if any."""
        self._finished.update(report.message.sequence for report in reports)
        last = None
        while self._unfinished and self._unfinished[0].sequence in self._finished:
            last = self._unfinished.popleft()
            self._finished.discard(last.sequence)
        return last

    def _push_head(self, job: str) -> None:
        first = self._queues[job][0]
        handicap = 0 if job in self._known else NEW_JOB_BYTES
        heapq.heappush(self._heads, (first.due + handicap, first.number, job))

    def _make_room(self) -> None:
        """Pass over the older half of what waits of a job, of those with the most first, until a quarter is free.

        No job loses its newest. Halves, so that jobs are seldom sorted.
        """
        size_of: Callable[[collections.deque[_Waiting]], int] = (
            len if self._num_bytes <= MAX_WAITING_BYTES else _num_bytes_of
        )
        for job, queue in sorted(self._queues.items(), key=lambda entry: size_of(entry[1]), reverse=True):
            if (
                self._num_waiting - len(self._queues) <= MAX_WAITING * 3 // 4
                and self._num_bytes <= MAX_WAITING_BYTES * 3 // 4
            ):
                break
            for _ in range(len(queue) // 2):
                dropped = queue.popleft().message
                self._finished.add(dropped.sequence)
                self._no_longer_waits(dropped)
                self.num_passed_over += 1
                self.crowding_job = job
        self._heads = []
        for job in self._queues:
            self._push_head(job)


def _num_bytes_of(queue: Iterable[_Waiting]) -> int:
    return sum(len(waiting.message.payload) for waiting in queue)


def _job_of(message: BusMessage) -> str:
    try:
        job = subjects.parse(message.subject).tokens[0]
        return job.rpartition("-")[0] or job
    except ValueError:
        return _NO_JOB
