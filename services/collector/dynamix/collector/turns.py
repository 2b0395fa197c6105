"""Reports that were read and not handled yet, in turns of jobs. Pure.

All runs of a name are one job here, since one key is for all of them. Jobs that train here and other jobs take turns,
and so do the jobs of each kind: a job that trains waits for one report of each other one that does, and as many of
strangers, whatever they send. A job's own reports keep their order. A report may be added early, before what the broker
delivers first: it is handled once, and acknowledged in the order of the stream.
"""

import collections
from collections.abc import Iterable

from dynamix.runtime.bus import BusMessage

MAX_READ = 16_384
"""Unacknowledged messages at which reading pauses, a quarter of what the broker permits."""
MAX_WAITING_BYTES = 128 << 20
NAME_TOKEN = 3
"""Place of a job's name in a subject."""
MAX_RUNS, MAX_NAMES = 4, 200
"""Runs of a job's name that are known to train here, and names."""

Queue = collections.deque[BusMessage]


class WaitingReports:
    """Takes messages in the order of the stream, hands them out in turns, and tracks what can be acknowledged."""

    def __init__(self) -> None:
        self._training: dict[str, dict[str, None]] = {}
        """Subjects of good reports, by name of their jobs; both the newest last."""
        self._queues: tuple[dict[str, Queue], dict[str, Queue]] = ({}, {})
        """Waiting messages by name: those that train here, and the others; the next turn comes first."""
        self._last_turn = 1
        self._unfinished: Queue = collections.deque()
        """Unfinished messages in the order of the stream, without payloads."""
        self._finished: set[int] = set()
        self._newest: dict[str, int] = {}
        """The newest sequence that waits, by subject."""
        self._last_read = 0
        self._early: set[int] = set()
        """Later ones that were added before."""
        self._num_bytes = 0

    def __bool__(self) -> bool:
        return any(self._queues)

    @property
    def has_room(self) -> bool:
        """Whether more may be read."""
        return self._num_bytes < MAX_WAITING_BYTES and len(self._unfinished) < MAX_READ

    def note_training(self, subject: str) -> None:
        """Remember the subject of a good report: its job trains here. Of each name, and of all, the newest are kept."""
        name = subject.split(".")[NAME_TOKEN]
        runs = self._training.pop(name, {})
        runs.pop(subject, None)
        runs[subject] = None
        self._training[name] = runs
        if len(runs) > MAX_RUNS:
            del runs[next(iter(runs))]
        if len(self._training) > MAX_NAMES:
            del self._training[next(iter(self._training))]

    def training_with_less_than(self, num_waiting: int) -> list[str]:
        """Subjects of the jobs that train here of which fewer reports wait."""
        waiting = {name: sum(len(queues.get(name, ())) for queues in self._queues) for name in self._training}
        return [one for name, runs in self._training.items() if waiting[name] < num_waiting for one in runs]

    def add_early(self, message: BusMessage) -> None:
        """Add a message ahead of the stream's order."""
        if message.sequence > self._last_read and message.sequence not in self._early:
            self._early.add(message.sequence)
            self._add(message)

    def add(self, batch: Iterable[BusMessage]) -> None:
        """Add the next messages of the stream."""
        for message in batch:
            self._last_read = message.sequence
            self._unfinished.append(message._replace(payload=b"", headers=b""))
            if message.sequence in self._early:
                self._early.discard(message.sequence)
            else:
                self._add(message)

    def _add(self, message: BusMessage) -> None:
        name = message.subject.split(".")[NAME_TOKEN]
        queue = next((queues[name] for queues in self._queues if name in queues), None)
        if queue is None:
            queue = self._queues[name not in self._training][name] = collections.deque()
        queue.append(message)
        self._newest[message.subject] = max(message.sequence, self._newest.get(message.subject, 0))
        self._num_bytes += len(message.payload)

    def take(self) -> tuple[BusMessage, bool]:
        """The report whose turn it is, and whether no later one of its subject was read yet; only while one waits."""
        self._last_turn = 1 - self._last_turn if self._queues[1 - self._last_turn] else self._last_turn
        queues = self._queues[self._last_turn]
        name = next(iter(queues))
        queue = queues.pop(name)
        message = queue.popleft()
        if queue:
            self._queues[name not in self._training][name] = queue
        self._num_bytes -= len(message.payload)
        if is_newest := self._newest.get(message.subject) == message.sequence:
            del self._newest[message.subject]
        return message, is_newest

    def finish(self, message: BusMessage) -> None:
        """Note that a report was handled."""
        self._finished.add(message.sequence)

    def acknowledge(self) -> BusMessage | None:
        """The last report that can be acknowledged with all before it, if any since the last call."""
        last = None
        while self._unfinished and self._unfinished[0].sequence in self._finished:
            last = self._unfinished.popleft()
            self._finished.discard(last.sequence)
        return last
