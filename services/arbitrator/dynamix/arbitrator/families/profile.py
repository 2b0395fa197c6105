"""Profiles of job families: made of a run's last action, read at the next run's start. Pure."""

from itertools import zip_longest

from msgspec.structs import replace

from dynamix.arbitrator.families.ends import COMPLETED, ERROR, LEFT, class_of_end
from dynamix.arbitrator.policies.policy import MISTAKES, RecurringPolicy
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Action, ArmRecord, ExploredArm, Job, JobProfile
from dynamix.schemas.messages.decisions import MAX_ARMS, MAX_PROFILE_BYTES, PROFILE_FORMAT

FEWEST_WINDOWS = 5
"""Runs with fewer decided windows teach nothing."""


class UnusableProfileError(ValueError):
    """This program cannot use the profile; the message has the reason."""


def read_profile(family: str, payload: bytes) -> JobProfile:
    """The profile in a stored message.

    Raises:
        UnusableProfileError: when it cannot be read, or a newer program wrote it.
    """
    try:
        profile = decode(JobProfile, subjects.of("profile", family), payload)
    except MalformedMessageError as error:
        raise UnusableProfileError(f"it cannot be read: {error}") from error
    if profile.format > PROFILE_FORMAT:
        raise UnusableProfileError(
            f"a newer program wrote it, in format {profile.format}; this one reads formats up to {PROFILE_FORMAT}: "
            "update it"
        )
    return profile


def check_usable(job: Job, policy: RecurringPolicy, payload: bytes) -> JobProfile:
    """The profile in a message, once it is certain that a generation can begin with it.

    Raises:
        UnusableProfileError: when it cannot.
    """
    if len(payload) > MAX_PROFILE_BYTES:
        raise UnusableProfileError(f"it has {len(payload)} bytes, at most {MAX_PROFILE_BYTES} go into an action")
    profile = read_profile(job.family, payload)
    try:
        policy.begin(job, profile)
    except MISTAKES as error:
        raise UnusableProfileError(f"policy {policy.name!r} cannot read its memory: {error!r}") from error
    return profile


def profile_after(
    job: Job, last: Action, policy: RecurringPolicy, earlier: JobProfile | None, *, ended_sequence: int = 0
) -> JobProfile | None:
    """The family's profile after a run with this last action; `None` if the run has nothing to store.

    What the run could not measure is kept of the earlier profile.
    """
    if last.window + 1 < FEWEST_WINDOWS:
        return None
    knowledge = policy.knowledge(job, last.carry)
    known = earlier if earlier is not None and earlier.policy == policy.name else None
    if not (knowledge.memory or knowledge.noise):
        return None
    is_again = earlier is not None and earlier.job == job.job  # a restarted run has ended once more
    has_times = bool(knowledge.memory) or known is None
    # Runs on another cluster took other times: none of them says anything of an arm on this one.
    is_other = known is None or knowledge.is_changed or known.world_size != job.world_size
    by_time, by_energy = ((), ()) if known is None or is_other else (known.arms, known.energy_arms)
    tried = None if is_again else judged(knowledge.tried, job.end_reason)
    return JobProfile(
        family=job.family,
        format=PROFILE_FORMAT,
        run=1 if earlier is None else earlier.run + (not is_again),
        job=job.job,
        generation=job.generation,
        ended_sequence=ended_sequence,
        policy=policy.name,
        policy_version=policy.version,
        world_size=job.world_size if has_times or known is None else known.world_size,
        num_windows=last.window + 1,
        local_batch_sizes=last.local_batch_sizes,
        split=last.split,
        exchange=last.exchange,
        memory=knowledge.memory if has_times or known is None else known.memory,
        noise=knowledge.noise or (() if known is None else known.noise),
        arms=with_record(by_time, tried if job.objective == "time" else None),
        energy_arms=with_record(by_energy, tried if job.objective == "energy" else None),
    )


def judged(newest: ArmRecord | None, end_reason: str) -> ArmRecord | None:
    """The result of a run's arm, by how it ended; `None` for no result.

    One that somebody stopped, or that waited in vain for a rank, might have gone either way. One that failed counts
    against its arm, which may be why, and says nothing of a run without one.
    """
    end = class_of_end(end_reason) if end_reason else COMPLETED  # virtual runs give none
    if newest is None or end in {COMPLETED, LEFT}:
        return newest
    return replace(newest, num_stopped=1) if end == ERROR and newest.arm != ExploredArm() else None


def with_record(records: tuple[ArmRecord, ...], newest: ArmRecord | None) -> tuple[ArmRecord, ...]:
    """The records after one more run: means of what both took to what both reached."""
    if newest is None:
        return records
    for index, record in enumerate(records):
        if record.arm == newest.arm:
            return (*records[:index], _merged(record, newest), *records[index + 1 :])
    return (*records, newest)[:MAX_ARMS]


def _merged(record: ArmRecord, newest: ArmRecord) -> ArmRecord:
    count, means = record.num_runs, []
    for before, now in zip_longest(record.milestones, newest.milestones, fillvalue=0.0):
        means.append((count * before + now) / (count + 1) if before and now else before or now)
    num_stopped = record.num_stopped + newest.num_stopped
    return ArmRecord(record.arm, count + 1, num_stopped, tuple(means))
