"""The shell of the arbitrator: reads specifications and states, hands each state to its job's log."""

import asyncio
from collections import defaultdict

from dynamix.runtime.bus import Message
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Job, State
from dynamix.schemas.streams import FEED, JOBS

from .job_log import ActionLogError, JobLog
from .settings import ArbitratorSettings


async def serve(context: Context[ArbitratorSettings]) -> None:
    """Decide for every job until the context stops."""
    await _Arbitrator(context).run()


class _Arbitrator:
    def __init__(self, context: Context[ArbitratorSettings]) -> None:
        self._context = context
        self._bus = context.bus
        self._logs: dict[str, JobLog] = {}
        self._halted: set[str] = set()

    async def run(self) -> None:
        start = await self._load_running_jobs()
        states = subjects.state(subjects.ANY, subjects.ANY)
        async with self._bus.consume(FEED.name, [states], start=start) as consumer:
            self._context.counters["ready"] = 1
            async for batch in consumer:
                await self._fold(batch)

    async def _load_running_jobs(self) -> int:
        """Resume every job that has not ended; returns the FEED sequence from which all of them can go on."""
        feed = await self._bus.stream_state(FEED.name)  # first: what comes later is a later sequence
        for message in await self._newest_specifications():
            job = await self._specification(message)
            if job is not None and job.phase == "running":
                await self._open(job, feed.first_sequence)
        needed = min((log.watermark for log in self._logs.values()), default=feed.last_sequence) + 1
        return max(1, feed.first_sequence, needed)

    async def _newest_specifications(self) -> list[Message]:
        if (await self._bus.stream_state(JOBS.name)).num_messages == 0:
            return []
        found: list[Message] = []
        async with self._bus.consume(JOBS.name, [subjects.job(subjects.ANY)], start="last_per_subject") as consumer:
            async for batch in consumer:
                found += batch
                if batch[-1].num_pending == 0:
                    break
        return found

    async def _fold(self, batch: list[Message]) -> None:
        """Jobs beside each other, the states of one job in order."""
        by_job: dict[str, list[tuple[Message, State]]] = defaultdict(list)
        for message in batch:
            try:
                state = decode(State, message.subject, message.payload)
                by_job[state.job].append((message, state))
            except MalformedMessageError as error:
                await self._context.dead_letter(message, str(error))
        await asyncio.gather(*[self._fold_job(job, items) for job, items in by_job.items()])
        self._context.counters["jobs"] = len(self._logs)

    async def _fold_job(self, job: str, items: list[tuple[Message, State]]) -> None:
        for message, state in items:
            try:
                log = await self._log_of(job, state.generation)
                if log is not None:
                    await log.add(message.sequence, state)
            except MalformedMessageError as error:
                await self._context.dead_letter(message, str(error))
            except ActionLogError as error:
                self._halted.add(job)
                self._context.log.error("decisions stopped", job=job, reason=str(error))

    async def _log_of(self, job: str, generation: int) -> JobLog | None:
        """The log for a generation of a job; `None` when it is over, or nothing may be decided for it."""
        if job in self._halted:
            return None
        log = self._logs.get(job)
        if log is None or log.job.generation < generation:
            log = await self._look_up(job)
        if log is None or log.job.generation < generation:
            raise MalformedMessageError(f"generation {generation} of job {job!r} has no specification")
        return log if log.job.generation == generation else None

    async def _look_up(self, job: str) -> JobLog | None:
        """Read a job's newest specification; rank 0 publishes it before its ranks' first report."""
        message = await self._bus.last(JOBS.name, subjects.job(job))
        specification = None if message is None else await self._specification(message)
        if specification is None:
            return None
        return await self._open(specification, (await self._bus.stream_state(FEED.name)).first_sequence)

    async def _specification(self, message: Message) -> Job | None:
        try:
            return decode(Job, message.subject, message.payload)
        except MalformedMessageError as error:
            await self._context.dead_letter(message, str(error))
            return None

    async def _open(self, job: Job, first_feed_sequence: int) -> JobLog | None:
        try:
            log = JobLog(self._bus, job, self._context.log, self._context.count)
        except ValueError as error:  # an unknown policy
            self._halted.add(job.job)
            self._context.log.error("no decisions for this job", job=job.job, reason=str(error))
            return None
        await log.resume(first_feed_sequence)
        self._logs.pop(job.job, None)
        self._logs[job.job] = log
        while len(self._logs) > self._context.settings.max_jobs:
            self._logs.pop(next(iter(self._logs)))
        return log
