"""Which jobs wait to be opened, with what of them. Pure."""

import math
from dataclasses import dataclass
from typing import Self

from dynamix.runtime.bus import BusMessage

KEPT_BYTES = 4096
"""Bytes that are kept of a message that may become a dead letter."""


@dataclass(slots=True)
class Wanted:
    """A job that is to be opened."""

    newest: int
    """FEED sequence up to which its states were read."""
    generation: int
    """The highest one among those states; -1 without any."""
    example: BusMessage | None
    """The first of those states, cut off."""
    num_states: int = 0
    first: float = math.inf
    """FEED sequence of the first of those states; infinite without any."""

    @classmethod
    def of(cls, message: BusMessage, generation: int) -> Self:
        """A job for which one state came."""
        wanted = cls(message.sequence, -1, None)
        wanted.note_state(message, generation)
        return wanted

    def note_state(self, message: BusMessage, generation: int) -> None:
        """Note that one more state of the job was read, which is not held."""
        self.newest = max(self.newest, message.sequence)
        self.first = min(self.first, message.sequence)
        self.num_states += 1
        if generation > self.generation:
            self.generation = generation
            self.example = message._replace(payload=message.payload[:KEPT_BYTES])


class WaitingJobs:
    """Jobs that wait to be opened: those with the most states first, so that a crowd of made-up jobs comes last.

    Among those with as many, in the order in which they got there. Taking one costs the same however many wait.
    """

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._waiting: dict[str, Wanted] = {}
        self._by_num_states: dict[int, dict[str, None]] = {}
        """The same jobs by the number of their states, in their order; none is empty."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, job: str) -> bool:
        return job in self._waiting

    def add_job(self, job: str, newest: int) -> bool:
        """Add a job whose states up to a sequence are in FEED. False when too many wait."""
        if len(self._waiting) >= self._max_jobs:
            return False
        if job not in self._waiting:
            self._put(job, Wanted(newest, -1, None))
        return True

    def add_state(self, job: str, message: BusMessage, generation: int) -> bool:
        """Add a job for which a state came. False when too many wait; its next state tries again."""
        if job not in self._waiting and not self.add_job(job, message.sequence):
            return False
        wanted = self._remove(job)
        wanted.note_state(message, generation)
        self._put(job, wanted)
        return True

    def clear(self) -> None:
        """Remove all waiting jobs."""
        self._waiting.clear()
        self._by_num_states.clear()

    def take(self, num_jobs: int) -> list[tuple[str, Wanted]]:
        """Up to so many jobs, which no longer wait."""
        taken: list[tuple[str, Wanted]] = []
        while self._waiting and len(taken) < num_jobs:
            job = next(iter(self._by_num_states[max(self._by_num_states)]))
            taken.append((job, self._remove(job)))
        return taken

    def _put(self, job: str, wanted: Wanted) -> None:
        self._waiting[job] = wanted
        self._by_num_states.setdefault(wanted.num_states, {})[job] = None

    def _remove(self, job: str) -> Wanted:
        wanted = self._waiting.pop(job)
        of_as_many = self._by_num_states[wanted.num_states]
        del of_as_many[job]
        if not of_as_many:
            del self._by_num_states[wanted.num_states]
        return wanted
