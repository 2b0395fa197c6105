"""The arbitrator's service: reads specifications and states, and gives each state to its job's log."""

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import msgspec
from msgspec import Meta

from dynamix.runtime.bus import BusError, BusMessage, StreamState
from dynamix.runtime.bus.service_bus import ServiceBus
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Event, Job, State
from dynamix.schemas.streams import FEED, JOBS

from .deciding.action_store import ActionStore, ActionStoreError
from .deciding.job_log import JobLog, Surroundings
from .learned.policy_source import PolicySource
from .learned.policy_store import PolicyBucket, PolicyReader
from .shown import ShownDecisions


class ArbitratorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the process, `DYNAMIX_ARBITRATOR_<FIELD>` or `--field`; a job's specification says by which policy."""

    max_jobs: Annotated[int, Meta(ge=1)] = 10_000
    """Jobs held in memory at once; the least recently used are dropped first, and read again when needed."""
    policy_cache: str = ""
    """Directory that keeps the learned policies that were read, by digest; empty: none. With it a restart can continue
    with a version that the bus has lost."""


class ArbitratorBus(ServiceBus, ActionStore, Protocol):
    """What the arbitrator uses of the bus."""

    @property
    def objects(self) -> PolicyBucket:
        """Whole files in buckets."""

    async def stream_state(self, stream: str) -> StreamState:
        """First and last sequence of a stream, and how many messages it holds."""


async def serve(context: Context[ArbitratorSettings, ArbitratorBus]) -> None:
    """Decide for every job until the context stops."""
    shown = ShownDecisions(context.metrics)
    following = asyncio.create_task(_follow_ends(context, shown), name="ends of jobs")
    try:
        await _Arbitrator(context, shown).run()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow_ends(context: Context[ArbitratorSettings, ArbitratorBus], shown: ShownDecisions) -> None:
    """Only metrics need the ends of jobs: what goes wrong here ends no decisions."""
    if not context.metrics.is_served:
        return
    try:
        await shown.follow_ends(context.bus)
    except BusError as error:
        context.log.warning("metrics do not show how jobs end", reason=str(error))


_MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
HALTING_ERRORS = (ActionStoreError, *_MISTAKES)
"""Errors of a policy, or of a job's stored actions. They halt one generation of that job and no other job; an error of
the bus ends the process, and a restart fixes it."""

MAX_EXPLANATION = 1024

M = TypeVar("M", Job, State)
T = TypeVar("T")


class _Arbitrator:
    def __init__(
        self, context: Context[ArbitratorSettings, ArbitratorBus], shown: ShownDecisions | None = None
    ) -> None:
        self._context = context
        self._shown = shown or ShownDecisions(context.metrics)
        self._bus = context.bus
        cache = context.settings.policy_cache
        policies = PolicySource(PolicyReader(context.bus.objects, Path(cache) if cache else None))
        self._surroundings = Surroundings(context.bus, policies, context.log, context.count)
        self._logs: dict[str, JobLog] = {}
        self._halted: dict[str, int] = {}
        """The generation without decisions, by job."""

    async def run(self) -> None:
        last = (await self._bus.stream_state(FEED.name)).last_sequence  # first: later states are read below
        for message in await self._newest_specifications():
            job = await self._decoded(Job, message)
            if job is not None and job.phase == "running":
                await self._open(job, until=last)
        states = subjects.of("state", subjects.ANY, subjects.ANY)
        async with self._bus.consume(FEED.name, [states], start=last + 1) as consumer:
            self._context.counters["ready"] = 1
            async for batch in consumer:
                await self._fold(batch)

    async def _newest_specifications(self) -> list[BusMessage]:
        if (await self._bus.stream_state(JOBS.name)).num_messages == 0:
            return []
        found: list[BusMessage] = []
        async with self._bus.consume(
            JOBS.name, [subjects.of("job", subjects.ANY)], start="last_per_subject"
        ) as consumer:
            async for batch in consumer:
                found += batch
                if batch[-1].num_pending == 0:
                    break
        return found

    async def _fold(self, batch: list[BusMessage]) -> None:
        """Fold a batch: jobs concurrently, the states of one job in order."""
        by_job: dict[str, list[tuple[BusMessage, State]]] = defaultdict(list)
        for message in batch:
            if (state := await self._decoded(State, message)) is not None:
                by_job[state.job].append((message, state))
        await asyncio.gather(*[self._fold_job(job, items) for job, items in by_job.items()])

    async def _fold_job(self, job: str, items: list[tuple[BusMessage, State]]) -> None:
        for message, state in items:
            self._shown.record_state(state)
            try:
                log = await self._log_of(job, state.generation, before=message.sequence)
                if log is not None:
                    await log.add_state(message.sequence, state)
                    self._shown.record_folded(state, log)
            except MalformedMessageError as error:
                await self._context.dead_letter(message, str(error))
            except HALTING_ERRORS as error:
                await self._halt(job, state.generation, error)

    async def _log_of(self, job: str, generation: int, *, before: int) -> JobLog | None:
        """The log for a generation of a job; `None` when the generation is over or halted."""
        if generation <= self._halted.get(job, -1):
            return None
        if (log := self._logs.pop(job, None)) is not None:
            self._logs[job] = log  # the newest, which is dropped last
        if log is None or log.job.generation < generation:
            log = await self._read_and_open(job, before)
        if generation <= self._halted.get(job, -1):
            return None
        if log is None or log.job.generation < generation:
            raise MalformedMessageError(f"generation {generation} of job {job!r} has no specification")
        return log if log.job.generation == generation else None

    async def _read_and_open(self, job: str, before: int) -> JobLog | None:
        """Read a job's newest specification; rank 0 publishes it before its ranks' first report."""
        message = await self._bus.last(JOBS.name, subjects.of("job", job))
        specification = None if message is None else await self._decoded(Job, message)
        return None if specification is None else await self._open(specification, until=before - 1)

    async def _decoded(self, kind: type[M], message: BusMessage) -> M | None:
        try:
            return decode(kind, message.subject, message.payload)
        except MalformedMessageError as error:
            await self._context.dead_letter(message, str(error))
            return None

    async def _open(self, job: Job, *, until: int) -> JobLog | None:
        """Resume a job and fold its states in FEED up to a sequence; `None` when that halts it."""
        try:
            earlier = self._logs.get(job.job)
            log = await JobLog.open(job, self._surroundings, None if earlier is None else earlier.known)
            log.check_inputs(await self._bus.stream_state(FEED.name))
            await self._catch_up(log, until)
        except HALTING_ERRORS as error:
            await self._halt(job.job, job.generation, error)
            return None
        self._keep_newest(self._logs, job.job, log)
        self._context.counters["jobs"] = len(self._logs)
        return log

    def _keep_newest(self, table: dict[str, T], job: str, value: T) -> None:
        table.pop(job, None)
        table[job] = value
        while len(table) > self._context.settings.max_jobs:
            table.pop(next(iter(table)))

    async def _catch_up(self, log: JobLog, until: int) -> None:
        """Fold a job's own states from its checkpoint to `until`; a job that ended long ago costs nothing."""
        states = subjects.of("state", log.job.job, subjects.ANY)
        newest = await self._bus.last(FEED.name, states)
        if newest is None or newest.sequence <= log.watermark:
            return
        async with self._bus.consume(FEED.name, [states], start=log.watermark + 1) as consumer:
            async for batch in consumer:
                for message in batch:
                    if message.sequence > until:
                        return
                    await self._fold_one(log, message)
                if batch[-1].sequence >= newest.sequence:
                    return

    async def _fold_one(self, log: JobLog, message: BusMessage) -> None:
        try:
            state = decode(State, message.subject, message.payload)
            if state.generation == log.job.generation:
                await log.add_state(message.sequence, state)
        except MalformedMessageError as error:
            await self._context.dead_letter(message, str(error))

    async def _halt(self, job: str, generation: int, error: Exception) -> None:
        """Decide nothing for this generation of a job: its training continues with the sizes that it has."""
        is_foreseen = isinstance(error, (ActionStoreError, ValueError))
        self._logs.pop(job, None)
        self._keep_newest(self._halted, job, generation)
        self._shown.record_halt(job, generation)
        self._context.count("halted")
        self._context.log.error(
            "no decisions for this job",
            job=job,
            generation=generation,
            reason=str(error) if is_foreseen else repr(error),
            exc_info=None if is_foreseen else error,
        )
        if not isinstance(error, ActionStoreError):
            return
        self._context.count("refused_logs")
        event = Event(  # people have to fix what the broker lost
            job=job,
            generation=generation,
            window=max(0, error.known_window),
            signature="log-refused",
            service="arbitrator",
            value=error.window,
            limit=error.known_window,
            explanation=str(error)[:MAX_EXPLANATION],
        )
        await self._bus.publish_soon(event)
