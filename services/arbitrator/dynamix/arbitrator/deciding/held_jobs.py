"""Which jobs an arbitrator holds in memory, and which ones wait to be opened. Pure: told the time.

A job that is not held costs nothing but a reading of its last action when its next state comes, so the bounds here
change no decision.
"""

import math
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from dynamix.runtime.bus import BusMessage
from dynamix.schemas.messages import Job

KEPT_BYTES = 4096
"""What is kept of a message that may become a dead letter, which holds no more."""


class OfJob(Protocol):
    """What is held for a job."""

    @property
    def job(self) -> Job:
        """The job's specification."""


L = TypeVar("L", bound=OfJob)


class HeldJobs(Generic[L]):
    """What is held by job; the least recently used go first when there are too many jobs, or ranks of all jobs."""

    def __init__(self, max_jobs: int, max_ranks: int, idle_s: float) -> None:
        self.num_ranks = 0
        self._max_jobs = max_jobs
        self._max_ranks = max_ranks
        self._idle_s = idle_s
        self._held: dict[str, tuple[float, L]] = {}
        """By job, the least recently used first, with the time of its last use."""

    def __len__(self) -> int:
        return len(self._held)

    def get(self, job: str) -> L | None:
        """What is held for a job."""
        found = self._held.get(job)
        return None if found is None else found[1]

    def use(self, job: str, now_s: float) -> L | None:
        """What is held for a job, which is now the most recently used."""
        found = self._held.pop(job, None)
        if found is None:
            return None
        self._held[job] = (now_s, found[1])
        return found[1]

    def hold(self, job: str, held: L, now_s: float) -> None:
        """Hold this for a job; others go where that is too much. One job alone is always held."""
        self.drop(job)
        self._held[job] = (now_s, held)
        self.num_ranks += held.job.world_size
        while len(self._held) > 1 and (len(self._held) > self._max_jobs or self.num_ranks > self._max_ranks):
            self.drop(next(iter(self._held)))

    def drop(self, job: str) -> None:
        """Hold nothing for a job."""
        if (found := self._held.pop(job, None)) is not None:
            self.num_ranks -= found[1].job.world_size

    def clear(self) -> None:
        """Hold nothing."""
        self._held.clear()
        self.num_ranks = 0

    def drop_idle(self, now_s: float) -> None:
        """Hold nothing for jobs that were not used for `idle_s`: they ended, died, or pause."""
        while self._held:
            job, (used_s, _) = next(iter(self._held.items()))
            if now_s - used_s <= self._idle_s:
                return  # all others were used later
            self.drop(job)


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
        """Let a job wait whose states up to a sequence are in FEED. False when too many wait."""
        if len(self._waiting) >= self._max_jobs:
            return False
        if job not in self._waiting:
            self._put(job, Wanted(newest, -1, None))
        return True

    def add_state(self, job: str, message: BusMessage, generation: int) -> bool:
        """Let a job wait for which a state came. False when too many wait; its next state tries again."""
        if job not in self._waiting and not self.add_job(job, message.sequence):
            return False
        wanted = self._remove(job)
        note_state(wanted, message, generation)
        self._put(job, wanted)
        return True

    def clear(self) -> None:
        """Let none wait."""
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


def note_state(wanted: Wanted, message: BusMessage, generation: int) -> None:
    """Note that one more state of a job was read, which it does not hold yet."""
    wanted.newest = max(wanted.newest, message.sequence)
    wanted.first = min(wanted.first, message.sequence)
    wanted.num_states += 1
    if generation > wanted.generation:
        wanted.generation = generation
        wanted.example = message._replace(payload=message.payload[:KEPT_BYTES])
