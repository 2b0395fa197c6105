"""Stores the profile of a run at its end: once per end, whichever arbitrator is first, also after a restart.

A profile names the sequence in JOBS of the end that it was made for; an end behind it is not in it yet. So the newest
specifications are all that a restarted arbitrator looks at, and two arbitrators write by compare-and-set.
"""

from collections.abc import Callable

from structlog.stdlib import BoundLogger

from dynamix.arbitrator.families.profile import UnusableProfileError, profile_after, read_profile
from dynamix.arbitrator.policies.policy import MISTAKES, RecurringPolicy
from dynamix.arbitrator.policies.registry import POLICIES
from dynamix.runtime.bus import (
    Bus,
    BusMessage,
    FailoverWait,
    PermissionDeniedError,
    StaleWriterError,
    StreamMissingError,
)
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode, encode
from dynamix.schemas.messages import Action, Job, JobProfile
from dynamix.schemas.messages.decisions import MAX_PROFILE_BYTES
from dynamix.schemas.streams import JOBS, PROFILES

from .action_store import ActionsEndEarlyError, ActionStoreError, checked_action

MAX_TRIES = 5
"""Other arbitrators that may store another run's profile meanwhile."""
MAX_KNOWN = 10_000


class FamilyEnds:
    """Follows the ends of jobs that have a family."""

    def __init__(self, bus: Bus, log: BoundLogger, count: Callable[[str], None]) -> None:
        self._bus = bus
        self._log = log
        self._count = count
        self._stored: dict[str, int] = {}
        """The newest end in JOBS of each family's profile, which saves requests for older ones."""

    async def follow(self) -> None:
        """Store a profile after every end, those of the past first, until the intake ends."""
        last = 0
        async with self._bus.consume(
            JOBS.name, [subjects.of("job", subjects.ANY)], start="last_per_subject"
        ) as consumer:
            async for batch in consumer:
                for message in batch:
                    if message.sequence <= last:
                        self._stored.clear()  # of a JOBS that was there before this one
                    last = message.sequence
                    if (job := _ended(message)) is not None and message.sequence > self._stored.get(job.family, 0):
                        await self._record(job, message.sequence)

    async def _record(self, job: Job, sequence: int) -> None:
        log = self._log.bind(job=job.job, family=job.family)
        try:
            reason = await self._store(job, sequence)
        except (ActionStoreError, UnusableProfileError, PermissionDeniedError, StreamMissingError) as error:
            log.warning("what the run taught is not stored", reason=str(error))
        except MISTAKES as error:
            log.error("what the run taught is not stored", reason=repr(error), exc_info=error)
        else:
            if reason:
                log.info("the run taught nothing for its family", reason=reason)
        self._stored[job.family] = max(sequence, self._stored.get(job.family, 0))
        if len(self._stored) > MAX_KNOWN:
            self._stored.pop(next(iter(self._stored)))

    async def _store(self, job: Job, sequence: int) -> str:
        """Store the profile after a run, unless there is one; why there is nothing to store, if there is not.

        Of several servers one that was cut off may show older actions and profiles; then everything is read again.
        """
        wait, num_refused = FailoverWait(self._bus.stream_state, JOBS.name), 0
        while num_refused < MAX_TRIES:
            try:
                return await self._store_once(job, sequence, wait)
            except ActionsEndEarlyError:
                if not await wait.pause():
                    raise
            except StaleWriterError:
                num_refused += not await wait.pause()
        raise UnusableProfileError(f"others stored {MAX_TRIES} profiles of the family meanwhile")

    async def _store_once(self, job: Job, sequence: int, wait: FailoverWait) -> str:
        stored = await self._bus.last(PROFILES.name, subjects.of("profile", job.family))
        earlier = await self._earlier(job.family, stored)
        if earlier is not None and earlier.ended_sequence >= sequence and await self._is_of_these_jobs(earlier, wait):
            self._stored[job.family] = earlier.ended_sequence
            return ""
        newest = (await checked_action(self._bus, job)).newest
        if newest is None or newest.action.generation != job.generation:
            return "nothing was decided in its last start"
        policy = _recurring(newest.action)
        if policy is None:
            return f"policy {newest.action.policy!r} keeps nothing for later runs"
        known = None if earlier is None or earlier.is_forgotten else earlier
        profile = profile_after(job, newest.action, policy, known, ended_sequence=sequence)
        if profile is None:
            return f"{newest.action.window + 1} windows, and nothing measured in them"
        if (num_bytes := len(encode(profile))) > MAX_PROFILE_BYTES:
            raise UnusableProfileError(f"{num_bytes} bytes are over the limit of {MAX_PROFILE_BYTES}")
        await self._bus.publish_profile(profile, expected_last=0 if stored is None else stored.sequence)
        self._count("profiles_stored")
        self._log.info("stored what the run taught", job=job.job, family=job.family, run=profile.run)
        return ""

    async def _earlier(self, family: str, stored: BusMessage | None) -> JobProfile | None:
        """The newest profile; a broken one is replaced, one of a newer program never.

        Raises:
            UnusableProfileError: when a newer program wrote it.
        """
        if stored is None:
            return None
        try:
            return read_profile(family, stored.payload)
        except UnusableProfileError as error:
            if isinstance(error.__cause__, MalformedMessageError):
                self._log.warning("a broken profile is replaced", family=family, reason=str(error))
                return None
            raise

    async def _is_of_these_jobs(self, profile: JobProfile, wait: FailoverWait) -> bool:
        """Whether its sequence is of this JOBS, which may have been made again."""
        last = (await self._bus.stream_state(JOBS.name)).last_sequence
        while profile.ended_sequence > last and await wait.pause():
            last = (await self._bus.stream_state(JOBS.name)).last_sequence
        return profile.ended_sequence <= last


def _ended(message: BusMessage) -> Job | None:
    """The specification of a job with a family, if the job has ended."""
    try:
        job = decode(Job, message.subject, message.payload)
    except MalformedMessageError:
        return None  # set aside where it is read for decisions
    return job if job.phase == "ended" and job.family else None


def _recurring(action: Action) -> RecurringPolicy | None:
    """The policy that decided, if this program has it in this version, and it keeps anything."""
    policy = POLICIES.get(action.policy)
    is_same = policy is not None and policy.version == action.policy_version
    return policy if is_same and isinstance(policy, RecurringPolicy) else None
