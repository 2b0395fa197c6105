"""Profiles: what a run of a job family taught, kept for the next one of its family. Pure.

In: a run's last action, whose carry is all that its policy knows, and how the run ended. Out: the next version of the
family's profile, which the next job of the family begins with. A generation's first action holds the profile that it
began with, so that nothing else is needed to decide it again.
"""

import re
from itertools import zip_longest

from msgspec.structs import replace

from dynamix.arbitrator.policies.rule import Rule
from dynamix.schemas.messages import MAX_ARMS, Action, ArmRecord, Job, JobProfile

FEWEST_WINDOWS = 5
"""Runs with fewer decided windows teach nothing."""

COMPLETED, LEFT = "completed", "left"
STOPPED, TIMEOUT, ERROR = "stopped", "timeout", "error"
ENDS = (COMPLETED, LEFT, STOPPED, TIMEOUT, ERROR)
_STOPPED = ("KeyboardInterrupt", "SignalException")
_TIMED_OUT = re.compile(r"\btim(ed|e)[ -]?out\b", re.IGNORECASE)
"""gloo: `Timed out waiting 1800000ms for recv operation`; NCCL: `Watchdog caught collective operation timeout`."""


def class_of_end(reason: str) -> str:
    """The class in `ENDS` of a `Job.end_reason`."""
    if reason in {COMPLETED, LEFT}:
        return reason
    if reason.startswith(_STOPPED):
        return STOPPED
    return TIMEOUT if _TIMED_OUT.search(reason) else ERROR


def profile_after(
    job: Job, last: Action, policy: Rule, earlier: JobProfile | None, *, ended_sequence: int = 0
) -> JobProfile | None:
    """The family's profile after a run with this last action; `None` if the run has nothing to store.

    What the run could not measure is kept of the earlier profile.
    """
    if last.window + 1 < FEWEST_WINDOWS:
        return None
    memory, result, is_changed = policy.knowledge(job, last.carry)
    known = earlier if earlier is not None and earlier.policy == policy.name else None
    if not memory and result is None:
        return None
    is_again = earlier is not None and earlier.job == job.job  # a restarted run has ended once more
    has_times = bool(memory) or known is None
    # Runs on another cluster took other times: none of them says anything of an arm on this one.
    is_other = known is None or is_changed or known.world_size != job.world_size
    arms = () if known is None or is_other else known.arms
    tried = None if is_again else judged(result, job.end_reason)
    return JobProfile(
        family=job.family,
        run=1 if earlier is None else earlier.run + (not is_again),
        job=job.job,
        generation=job.generation,
        ended_sequence=ended_sequence,
        policy=policy.name,
        policy_version=policy.version,
        world_size=job.world_size if has_times or known is None else known.world_size,
        num_windows=last.window + 1,
        allocation=replace(last.allocation, rate_factor=1.0),
        memory=memory if has_times or known is None else known.memory,
        arms=with_record(arms, tried),
    )


def judged(newest: ArmRecord | None, end_reason: str) -> ArmRecord | None:
    """The result of a run's arm, by how it ended; `None` for no result.

    One that somebody stopped, or that waited in vain for a rank, might have gone either way. One that failed counts
    against its arm, which may be why, and says nothing of a run without one.
    """
    end = class_of_end(end_reason) if end_reason else COMPLETED  # virtual runs give none
    if newest is None or end in {COMPLETED, LEFT}:
        return newest
    return replace(newest, num_stopped=1) if end == ERROR and newest.rate_factor != 1.0 else None


def with_record(records: tuple[ArmRecord, ...], newest: ArmRecord | None) -> tuple[ArmRecord, ...]:
    """The records after one more run: means of what both took to what both reached."""
    if newest is None:
        return records
    for index, record in enumerate(records):
        if record.rate_factor == newest.rate_factor:
            count, means = record.num_runs, []
            for before, now in zip_longest(record.milestones, newest.milestones, fillvalue=0.0):
                means.append((count * before + now) / (count + 1) if before and now else before or now)
            num_stopped = record.num_stopped + newest.num_stopped
            merged = ArmRecord(record.rate_factor, count + 1, num_stopped, tuple(means))
            return (*records[:index], merged, *records[index + 1 :])
    return (*records, newest)[:MAX_ARMS]
