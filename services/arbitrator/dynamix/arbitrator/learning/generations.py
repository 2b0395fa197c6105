"""Which generations of which jobs are over, from the specifications as they come. Pure."""

from fnmatch import fnmatchcase
from typing import NamedTuple

from dynamix.schemas.messages import Job

COMPLETED = "completed"
"""The reason of a job that did all it meant to do; every other end cut it off."""


class Finished(NamedTuple):
    """A generation that is over."""

    job: Job
    """Its specification."""
    terminated: bool
    """It did all it meant to do: nothing comes after. Otherwise it was cut off."""

    @property
    def name(self) -> str:
        """`<job>:<generation>`, which no other has."""
        return f"{self.job.job}:{self.job.generation}"


class Generations:
    """Follows the jobs that a policy explores in."""

    def __init__(self, policy: str, pattern: str) -> None:
        self._policy = policy
        self._pattern = pattern
        self._running: dict[str, Job] = {}

    def observe_job(self, job: Job) -> list[Finished]:
        """Take in a specification; the generations that are known to be over by it, oldest first.

        A specification of a generation not after the newest one seen changes nothing, unless it ends that one.
        """
        before = self._running.get(job.job)
        if before is not None and job.generation < before.generation:
            return []
        finished = []
        if before is not None and job.generation > before.generation:
            finished.append(Finished(before, terminated=False))
        if job.phase == "running":
            self._running[job.job] = job
        else:
            self._running.pop(job.job, None)
            finished.append(Finished(job, terminated=job.end_reason == COMPLETED))
        return [generation for generation in finished if self._wanted(generation.job)]

    def _wanted(self, job: Job) -> bool:
        explores = job.policy_options.get("explore", 0) == 1
        return explores and job.policy == self._policy and fnmatchcase(job.job, self._pattern)
