"""Finds the profile that a generation of a job begins with."""

from collections.abc import Callable

from structlog.stdlib import BoundLogger

from dynamix.arbitrator.policies.policy import Policy, RecurringPolicy
from dynamix.runtime.bus import Bus, PermissionDeniedError, StreamMissingError
from dynamix.schemas import subjects
from dynamix.schemas.messages import Job
from dynamix.schemas.streams import PROFILES

from .profile import UnusableProfileError, check_usable

MAX_WARNED = 1000


class ProfileSource:
    """Reads the newest profile of a family; what cannot be used is ignored, with one warning."""

    def __init__(self, bus: Bus, log: BoundLogger, count: Callable[[str], None]) -> None:
        self._bus = bus
        self._log = log
        self._count = count
        self._warned: dict[tuple[str, int], None] = {}
        """Families with the sequence of the profile that was warned of."""

    async def choose(self, job: Job, policy: Policy) -> bytes:
        """The stored message that a generation without decisions begins with; empty for none."""
        if not job.family or not isinstance(policy, RecurringPolicy):
            return b""
        if job.explores and job.generation > 0:
            self._log.warning(
                "a start again tries nothing out and leaves no record of it: give each run an id of its own",
                job=job.job,
                generation=job.generation,
                family=job.family,
            )
        try:
            stored = await self._bus.last(PROFILES.name, subjects.of("profile", job.family))
        except (StreamMissingError, PermissionDeniedError) as error:
            self._warn("", 0, f"profiles cannot be read, so that no job begins with what earlier runs taught: {error}")
            return b""
        if stored is None:
            return b""
        try:
            profile = check_usable(job, policy, stored.payload)
        except UnusableProfileError as error:
            self._warn(job.family, stored.sequence, f"the profile of family {job.family!r} is not used: {error}")
            return b""
        if profile.is_forgotten:
            return b""
        self._count("begun_with_profile")
        self._log.info(
            "begins with the profile of its family", job=job.job, family=job.family, run=profile.run, of=profile.job
        )
        return stored.payload

    def _warn(self, family: str, sequence: int, text: str) -> None:
        self._count("profiles_ignored")
        if (family, sequence) in self._warned:
            return
        self._warned[family, sequence] = None
        if len(self._warned) > MAX_WARNED:
            self._warned.pop(next(iter(self._warned)))
        self._log.warning(text)
