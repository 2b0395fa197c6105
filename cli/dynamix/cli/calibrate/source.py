"""A job's metric windows and specification, as the bus has kept them."""

from dynamix.cli.errors import CommandError
from dynamix.cli.top.feed import chosen_job
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Job
from dynamix.schemas.streams import FEED, JOBS

from .recording import Record


async def recorded(bus: Bus, wanted: str) -> list[Record]:
    """The job's specification, then its windows in the order of the stream, up to now.

    Args:
        bus: connected.
        wanted: the job's id, or the name in front of the run id.

    Raises:
        CommandError: when there is no such job, or none of its windows are kept.
    """
    specifications = await _stored(bus, JOBS.name, subjects.job(subjects.ANY))
    jobs: dict[str, tuple[int, Job]] = {}
    for sequence, record in enumerate(specifications):
        try:
            job = decode(Job, record.subject, record.payload)
        except MalformedMessageError:
            continue  # of another version perhaps; the one that is asked for is missed below
        jobs[job.job] = (sequence, job)
    name = chosen_job(jobs, wanted)
    if name is None:
        known = ", ".join(sorted(jobs)) or "none"
        raise CommandError(f"no job and no file is called {wanted!r}; jobs on this broker: {known}")
    windows = await _stored(bus, FEED.name, subjects.window(name, subjects.ANY))
    if not windows:
        raise CommandError(
            f"no metric window of {name} is kept: a collector must run beside the job (`dynamix up`), and FEED keeps "
            f"{FEED.max_age_s / 3600:g} hours"
        )
    return [*(record for record in specifications if record.subject == subjects.job(name)), *windows]


async def _stored(bus: Bus, stream: str, subject: str) -> list[Record]:
    """What a stream has on a subject now."""
    if await bus.last(stream, subject) is None:
        return []
    records = []
    async with bus.consume(stream, [subject], start="all") as consumer:
        async for batch in consumer:
            records += [Record(message.subject, message.payload) for message in batch]
            if batch[-1].num_pending == 0:
                break
    return records
