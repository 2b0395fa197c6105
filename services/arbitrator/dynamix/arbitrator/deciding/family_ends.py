"""Stores the profile of a job family on the bus after each end of its jobs.

A profile names the sequence in JOBS of the end that it was made for; an end behind it is not in it yet. So the newest
specifications are all that a restarted arbitrator looks at, and two arbitrators write by compare-and-set.
"""

from typing import Any

from dynamix.arbitrator.policies.policy import MISTAKES, Policy
from dynamix.arbitrator.policies.registry import POLICIES
from dynamix.arbitrator.policies.rule import Rule
from dynamix.runtime.bus import FailoverWait, PermissionDeniedError, StaleWriterError, StreamMissingError
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode, encode
from dynamix.schemas.messages import MAX_PROFILE_BYTES, Job, JobProfile
from dynamix.schemas.streams import JOBS, PROFILES

from .job_log import ActionsEndEarlyError, ActionStoreError, checked_action
from .profiles import profile_after


class ProfileTooLargeError(ValueError):
    """The profile does not fit into an action."""


async def store_profiles(context: Context[Any]) -> None:
    """Store what a run taught after every end, those of the past first, until the intake ends.

    Once per end, whichever arbitrator comes first, and after a restart.
    """
    wanted = [subjects.of("job", subjects.ANY)]
    async with context.bus.consume(JOBS.name, wanted, start="last_per_subject") as consumer:
        async for batch in consumer:
            for message in batch:
                try:
                    job = decode(Job, message.subject, message.payload)
                except MalformedMessageError:
                    continue  # set aside where it is read for decisions
                if job.phase == "ended" and job.family:
                    await _record(context, job, message.sequence)


async def _record(context: Context[Any], job: Job, sequence: int) -> None:
    log = context.log.bind(job=job.job, family=job.family)
    wait = FailoverWait(context.bus.stream_state, JOBS.name)
    try:
        while True:
            try:
                reason = await _store(context, job, sequence, wait)
                break
            except ActionsEndEarlyError:  # of several servers one that was cut off may show older actions
                if not await wait.pause():
                    raise
            except StaleWriterError:  # another arbitrator was first, or that server showed an older profile
                await wait.pause()
    except (ActionStoreError, ProfileTooLargeError, PermissionDeniedError, StreamMissingError) as error:
        log.warning("what the run taught is not stored", reason=str(error))
    except MISTAKES as error:
        log.error("what the run taught is not stored", reason=repr(error), exc_info=error)
    else:
        if reason:
            log.info("the run taught nothing for its family", reason=reason)


async def _store(context: Context[Any], job: Job, sequence: int, wait: FailoverWait) -> str:
    """Store the profile after a run, unless there is one; why there is nothing to store, if there is not."""
    bus, subject = context.bus, subjects.of("profile", job.family)
    stored, earlier = await bus.last(PROFILES.name, subject), None
    if stored is not None:
        try:
            earlier = decode(JobProfile, subject, stored.payload)
        except MalformedMessageError as error:
            context.log.warning("a broken profile is replaced", family=job.family, reason=str(error))
    if earlier is not None and earlier.ended_sequence >= sequence:
        last = (await bus.stream_state(JOBS.name)).last_sequence
        while earlier.ended_sequence > last and await wait.pause():
            last = (await bus.stream_state(JOBS.name)).last_sequence
        if earlier.ended_sequence <= last:  # else its sequence is of another JOBS: the stream was made again
            return ""
    newest, _ = await checked_action(bus, job)
    if newest is None or newest.action.generation != job.generation:
        return "nothing was decided in its last start"
    policy: Policy | None = POLICIES.get(newest.action.policy)
    if not isinstance(policy, Rule) or policy.version != newest.action.policy_version:
        return f"policy {newest.action.policy!r} keeps nothing for later runs"
    known = None if earlier is None or earlier.is_forgotten else earlier
    profile = profile_after(job, newest.action, policy, known, ended_sequence=sequence)
    if profile is None:
        return f"{newest.action.window + 1} windows, and nothing measured in them"
    if (num_bytes := len(encode(profile))) > MAX_PROFILE_BYTES:
        raise ProfileTooLargeError(f"{num_bytes} bytes are over the limit of {MAX_PROFILE_BYTES}")
    await bus.publish_next(profile, expected_last=0 if stored is None else stored.sequence)
    context.count("profiles_stored")
    context.log.info("stored what the run taught", job=job.job, family=job.family, run=profile.run)
    return ""
