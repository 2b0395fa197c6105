"""Which job a person means."""

from collections.abc import Mapping

from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Job
from dynamix.schemas.streams import JOBS

from .errors import CommandError

MAX_NAMED = 12
"""Jobs that an error lists."""


async def find_job(bus: Bus, wanted: str) -> Job:
    """The newest specification of the job that is wanted. Raises as `chosen`."""
    return chosen(await known_jobs(bus), wanted)


async def known_jobs(bus: Bus) -> dict[str, Job]:
    """The newest specification of every job on the broker, oldest first; what cannot be decoded is left out."""
    jobs: dict[str, Job] = {}
    if (await bus.stream_state(JOBS.name)).num_messages == 0:
        return jobs
    async with bus.consume(JOBS.name, [subjects.job(subjects.ANY)], start="last_per_subject") as consumer:
        async for batch in consumer:
            for message in batch:
                try:
                    job = decode(Job, message.subject, message.payload)
                except MalformedMessageError:
                    continue  # of another version perhaps; if it is the one that is asked for, it is missed by name
                jobs[job.job] = job
            if batch[-1].num_pending == 0:
                break
    return jobs


def chosen(jobs: Mapping[str, Job], wanted: str) -> Job:
    """The job of that id; else the only one whose id begins so, or the only one of those that runs.

    Raises:
        CommandError: when there is none, or there are several; the text lists the ids that would do.
    """
    if wanted in jobs:
        return jobs[wanted]
    fitting = [job for name, job in jobs.items() if name.startswith(wanted)]
    running = [job for job in fitting if job.phase == "running"]
    if len(only := running or fitting) == 1:
        return only[0]
    if only:
        raise CommandError(f"{wanted!r} may be any of {_listed([job.job for job in only])}: say which", exit_code=2)
    raise CommandError(f"no job is called {wanted!r}; jobs on this broker: {_listed(list(jobs)) or 'none'}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} older ones" if len(names) > MAX_NAMED else ""
    return ", ".join(reversed(names[-MAX_NAMED:])) + more
