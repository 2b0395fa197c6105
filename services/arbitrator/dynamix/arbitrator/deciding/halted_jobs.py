"""Jobs without decisions: one generation of each, because of an error of its policy or of its stored actions."""

from dynamix.arbitrator.policies.policy import MISTAKES
from dynamix.schemas.messages import Event

from .action_store import ActionStoreError

HALTING_ERRORS = (ActionStoreError, *MISTAKES)
"""Errors of a policy, or of a job's stored actions. They halt one generation of that job and no other job; an error of
the bus ends the process, and a restart fixes it."""

MAX_EXPLANATION = 1024


class HaltedJobs:
    """The generation without decisions, by job; the ones of long ago are forgotten when there are too many."""

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._generations: dict[str, int] = {}

    def generation(self, job: str) -> int:
        """The newest generation of a job that is halted, -1 for none."""
        return self._generations.get(job, -1)

    def add_job(self, job: str, generation: int) -> None:
        """Let a generation of a job be halted."""
        self._generations.pop(job, None)
        self._generations[job] = generation
        if len(self._generations) > self._max_jobs:
            self._generations.pop(next(iter(self._generations)))


def reason_of(error: Exception) -> tuple[str, Exception | None]:
    """The text of the error, and the error itself where it is unexpected and its traceback is wanted."""
    is_foreseen = isinstance(error, (ActionStoreError, ValueError))
    return (str(error), None) if is_foreseen else (repr(error), error)


def refused_log(job: str, generation: int, error: ActionStoreError) -> Event:
    """The event about stored actions that are not those that were written: people have to fix what the broker lost."""
    return Event(
        job=job,
        generation=generation,
        window=max(0, error.known_window),
        signature="log-refused",
        service="arbitrator",
        value=error.window,
        limit=error.known_window,
        explanation=str(error)[:MAX_EXPLANATION],
    )
