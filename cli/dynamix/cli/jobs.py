"""The jobs on the broker, and which of them a person means."""

from collections.abc import Container, Mapping

from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode_or_none
from dynamix.schemas.messages import Job
from dynamix.schemas.streams import JOBS

from .errors import CommandError, MisuseError

MAX_NAMED = 12
"""Jobs that an error lists."""
NO_JOB = "no job has run on this broker yet"


def check_job(wanted: str, *, or_file: bool = False) -> str:
    """Check an argument that names a job, by id or part of it; `or_file`: a file is accepted too.

    Raises:
        MisuseError: for what no id can hold.
    """
    if not subjects.is_token(wanted):
        no_file = f"; nor is there a file {wanted[:64]}" if or_file else ""
        raise MisuseError(f"{wanted[:64]!r} names no job: use 1 to 63 of the characters a-z, 0-9 and '-'{no_file}")
    return wanted


async def known_jobs(bus: Bus) -> dict[str, Job]:
    """The newest specification of every job on the broker, oldest first; what cannot be decoded is left out."""
    jobs: dict[str, Job] = {}
    async for message in bus.stored(JOBS.name, [subjects.of("job", subjects.ANY)], "last_per_subject"):
        if (job := decode_or_none(Job, message.subject, message.payload)) is not None:
            jobs[job.job] = job
    return jobs


def chosen(jobs: Mapping[str, Job], wanted: str) -> Job:
    """The only matching job, or of several the only running one.

    Raises CommandError when there is none, or there are several, with the ids that fit.
    """
    fitting = [job for name, job in jobs.items() if is_called(name, wanted)]
    only = [jobs[wanted]] if wanted in jobs else [job for job in fitting if job.phase == "running"] or fitting
    if not only:
        raise CommandError(none_called(wanted, jobs))
    if len(only) > 1:
        raise MisuseError(f"{wanted!r} may be any of {_listed([job.job for job in only])}: name one of them")
    return only[0]


def newest_job(jobs: dict[str, Job], wanted: str | None, silent: Container[str] = ()) -> str | None:
    """The id to watch, of those that `wanted` means (`None`: all): the newest that runs, else the newest.

    `jobs` are by id, oldest first. `silent` are those that published no end, and send nothing any more.
    """
    if wanted in jobs:
        return wanted
    fitting = [name for name in reversed(jobs) if wanted is None or is_called(name, wanted)]
    running = (name for name in fitting if jobs[name].phase == "running" and name not in silent)
    return next(running, fitting[0] if fitting else None)


def is_called(name: str, wanted: str) -> bool:
    """Whether a job is meant by its id, the beginning of it, or its run id."""
    return name.startswith(wanted) or name.endswith(f"-{wanted}")


def none_called(wanted: str, jobs: Mapping[str, Job]) -> str:
    """The sentence that there is no such job, and which ones there are."""
    return f"no job is called {wanted!r}; jobs on this broker: {_listed(list(jobs)) or 'none'}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} older ones" if len(names) > MAX_NAMED else ""
    return ", ".join(reversed(names[-MAX_NAMED:])) + more
