"""The arbitrator's service: reads specifications and states, and gives each state to its job's log."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import msgspec
from msgspec import Meta

from dynamix.runtime.bus import BatchConsumer, BusError, BusMessage, FailoverWait
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Job, State
from dynamix.schemas.messages.fields import MAX_GENERATION
from dynamix.schemas.streams import ACTIONS, FEED, JOBS

from .deciding.action_store import ActionsEndEarlyError, ActionStoreError, Stored
from .deciding.family_ends import FamilyEnds, ProfileStore
from .deciding.halted_jobs import HALTING_ERRORS, HaltedJobs, reason_of, refused_log
from .deciding.held_jobs import HeldJobs, WaitingJobs, Wanted, note_state
from .deciding.job_log import JobLog, Surroundings
from .deciding.own_states import own_states
from .families.source import ProfileSource
from .learned.policy_source import PolicyAbsentError, PolicySource
from .learned.policy_store import PolicyBucket, PolicyReader
from .shown import ShownDecisions
from .state_queues import StateQueues


class ArbitratorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the process, `DYNAMIX_ARBITRATOR_<FIELD>` or `--field`; a job's specification says by which policy."""

    max_jobs: Annotated[int, Meta(ge=1)] = 10_000
    """Jobs held in memory at once; the least recently used are dropped first, and read again when needed."""
    max_ranks: Annotated[int, Meta(ge=1)] = 1_000_000
    """Ranks of all jobs held in memory at once, some 0.4 kB each; as for `max_jobs`."""
    forget_after_s: Annotated[float, Meta(gt=0)] = 3600.0
    """A job without a state for so long is dropped from memory, and read again when its next one comes."""
    policy_cache: str = ""
    """Directory that keeps the learned policies that were read, by digest; empty: none. With it a restart can continue
    with a version that the bus has lost."""
    broker_log: str = ""
    """The log file of nats-server on this machine, in which refused operations are counted; empty: they are not."""


class ArbitratorBus(ProfileStore, Protocol):
    """What the arbitrator uses of the bus."""

    @property
    def objects(self) -> PolicyBucket:
        """Whole files in buckets."""

    async def count_requests(self) -> int:
        """Requests of all users that JetStream's API has had."""


async def serve(context: Context[ArbitratorSettings, ArbitratorBus], *, in_step: bool = False) -> None:
    """Decide for every job until the context stops.

    `in_step` is for a replay: a job is opened before more is read, not beside it.
    """
    shown = ShownDecisions(context.metrics)
    followed = {
        "how jobs end": partial(shown.follow_ends, context.bus),
        "which actions are refused": partial(shown.follow_receipts, context.bus, context.dead_letter),
        "what streams hold": partial(shown.follow_streams, context.bus.stream_state),
        "how many requests there are": partial(shown.follow_requests, context.bus.count_requests),
    }
    if context.settings.broker_log:
        log = Path(context.settings.broker_log)
        followed["which operations the broker refuses"] = partial(shown.follow_violations, log)
    following = [asyncio.create_task(_follow(context, *one), name=one[0]) for one in followed.items()]
    if not in_step:
        following.append(asyncio.create_task(_keep_profiles(context), name="what runs taught"))
    try:
        await _Arbitrator(context, shown, in_step=in_step).run()
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


async def _follow(
    context: Context[ArbitratorSettings, ArbitratorBus], what: str, follow: Callable[[], Awaitable[None]]
) -> None:
    """Follow what only metrics need: what goes wrong here ends no decisions."""
    if not context.metrics.is_served:
        return
    try:
        await follow()
    except BusError as error:
        context.log.warning("the metrics are incomplete", missing=what, reason=str(error))


async def _keep_profiles(context: Context[ArbitratorSettings, ArbitratorBus]) -> None:
    """Store what runs taught: what goes wrong here ends no decisions."""
    try:
        await FamilyEnds(context.bus, context.log, context.count).follow()
    except BusError as error:
        context.log.warning("what runs teach is not stored until this service is started again", reason=str(error))


MAX_OPENING = 16
"""Jobs that are opened at once, beside the states of those that are open: 4 requests to the broker each, or more."""
SWEEP_S = 60.0
"""Idle jobs are looked for at least so often."""

M = TypeVar("M", Job, State)


class _Arbitrator:
    def __init__(
        self, context: Context[ArbitratorSettings, ArbitratorBus], shown: ShownDecisions, *, in_step: bool
    ) -> None:
        self._context = context
        self._shown = shown
        self._bus = context.bus
        self._in_step = in_step
        settings = context.settings
        cache = settings.policy_cache
        policies = PolicySource(PolicyReader(context.bus.objects, Path(cache) if cache else None))
        profiles = ProfileSource(context.bus, context.log, context.count)
        self._surroundings = Surroundings(context.bus, policies, profiles, context.log, context.count)
        self._logs = HeldJobs[JobLog](settings.max_jobs, settings.max_ranks, settings.forget_after_s)
        self._waiting = WaitingJobs(settings.max_jobs)
        self._opening: dict[str, Wanted] = {}
        self._pausing: set[str] = set()
        """Those among them that ask again later, because a server that knows less answered."""
        self._queues = StateQueues(self._fold_state, self._put_off, may_put_off=not in_step)
        self._tasks: set[asyncio.Task[None]] = set()
        """Those that open jobs, until their end was looked at."""
        self._halted = HaltedJobs(settings.max_jobs)
        self._last = 0
        """The last sequence of FEED that was read."""
        self._actions_created = ""

    async def run(self) -> None:
        last = (await self._bus.stream_state(FEED.name)).last_sequence  # first: later states are read below
        self._actions_created = (await self._bus.stream_state(ACTIONS.name)).created
        for job in reversed(await self._running_jobs()):  # the newest first, where not all can wait
            self._waiting.add_job(job, newest=last)
        states = subjects.of("state", subjects.ANY, subjects.ANY)
        try:
            await self._open_in_step()
            async with self._bus.consume(FEED.name, [states], start=last + 1) as consumer:
                self._context.counters["ready"] = 1
                await self._take_turns(consumer)
        finally:
            await self._stop_work()

    async def _stop_work(self) -> None:
        await self._queues.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _begin_again(self) -> None:
        """Forget all jobs: what is known of them is of streams that were there before. Their states come again."""
        self._context.log.warning("FEED was made again: all jobs are opened again")
        await self._stop_work()
        self._queues.changed.set()  # or its waiter would never look at the new ones
        self._tasks.clear()
        self._logs.clear()
        self._waiting.clear()
        self._halted = HaltedJobs(self._context.settings.max_jobs)
        self._queues = StateQueues(self._fold_state, self._put_off, may_put_off=not self._in_step)

    async def _take_turns(self, consumer: BatchConsumer) -> None:
        """Fold what comes, and open jobs beside that, so that no crowd of jobs delays those that are open."""
        reading: asyncio.Task[list[BusMessage] | None] | None = None
        changed: asyncio.Task[bool] | None = None
        try:
            while True:
                reading = reading or asyncio.create_task(_next_batch(consumer))
                changed = changed or asyncio.create_task(self._queues.changed.wait())
                self._start_opening()
                self._count_jobs()
                awaited = [reading] if self._queues.has_room else []
                await asyncio.wait(
                    [changed, *awaited, *self._tasks], timeout=SWEEP_S, return_when=asyncio.FIRST_COMPLETED
                )
                self._end_opening()
                if changed.done():
                    changed = None
                    self._queues.check()
                self._logs.drop_idle(_now_s())
                if reading.done() and self._queues.has_room:
                    batch, reading = reading.result(), None
                    if batch is None:
                        await self._queues.drained()
                        self._queues.check()
                        return
                    await self._fold(batch)
                    await self._open_in_step()
        finally:
            unfinished = [task for task in (reading, changed) if task is not None]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    async def _running_jobs(self) -> list[str]:
        """The jobs whose newest specification says that they run, oldest first."""
        if await self._bus.last(JOBS.name, subjects.of("job", subjects.ANY)) is None:
            return []
        found: dict[str, None] = {}
        async with self._bus.consume(
            JOBS.name, [subjects.of("job", subjects.ANY)], start="last_per_subject"
        ) as consumer:
            async for batch in consumer:
                for message in batch:
                    job = await self._decoded(Job, message)
                    if job is not None and job.phase == "running":
                        found[job.job] = None
                if batch[-1].num_pending == 0:
                    break
        return list(found)

    async def _fold(self, batch: list[BusMessage]) -> None:
        """Fold a batch: jobs concurrently, the states of one job in order. In a replay nothing is read meanwhile."""
        if batch[0].sequence <= self._last or batch[-1].sequence < batch[0].sequence:
            await self._begin_again()
        self._last = batch[-1].sequence
        decoded = [(message, await self._decoded(State, message)) for message in batch]
        self._queues.add_states((message, state) for message, state in decoded if state is not None)
        if self._in_step:
            await self._queues.drained()
            self._queues.check()

    async def _fold_state(self, message: BusMessage, state: State) -> None:
        job = state.job
        self._shown.record_state(state)
        if state.generation <= self._halted.generation(job):
            return
        log = self._logs.use(job, _now_s())
        if log is None or log.job.generation < state.generation or self._is_wanted(job):
            self._let_wait(job, message, state.generation)
        elif log.job.generation == state.generation:
            try:
                await log.add_state(message.sequence, state)
                self._shown.record_folded(state, log)
            except MalformedMessageError as error:
                await self._context.dead_letter(message, str(error))
            except HALTING_ERRORS as error:
                await self._halt(job, state.generation, error)

    def _put_off(self, message: BusMessage, state: State) -> None:
        """Let a job that has fallen behind be opened again."""
        self._shown.record_state(state)
        if state.generation > self._halted.generation(state.job):
            self._let_wait(state.job, message, state.generation)
            self._context.count("states_put_off")

    def _is_wanted(self, job: str) -> bool:
        return job in self._opening or job in self._waiting

    def _let_wait(self, job: str, message: BusMessage, generation: int) -> None:
        """Open the job soon: its states are read from FEED again then, so that none is held meanwhile."""
        if (opening := self._opening.get(job)) is not None:
            note_state(opening, message, generation)
        elif not self._waiting.add_state(job, message, generation):
            self._context.count("jobs_put_off")

    def _start_opening(self) -> None:
        num_new = sum(self._logs.get(job) is None for job in self._opening.keys() - self._pausing)
        # those that fell behind keep none out, nor do those that only wait
        for job, wanted in self._waiting.take(MAX_OPENING - num_new):
            self._opening[job] = wanted
            self._tasks.add(asyncio.create_task(self._open(job, wanted), name=f"open {job}"))

    def _end_opening(self) -> None:
        """Raise the error of a task that has failed: of the bus, or our own."""
        done = {task for task in self._tasks if task.done()}
        self._tasks -= done
        if errors := [error for task in done if (error := task.exception()) is not None]:
            raise errors[0]

    async def _open_in_step(self) -> None:
        """Open, in a replay, all that wait before the next batch: what they read is of this moment."""
        while self._in_step and (len(self._waiting) or self._opening):
            self._start_opening()
            await asyncio.wait(self._tasks)
            self._end_opening()

    async def _open(self, job: str, wanted: Wanted) -> None:
        """Read a job's newest specification, which rank 0 publishes before its ranks' first report, and resume it."""
        try:
            states = subjects.of("state", job, subjects.ANY)
            if not wanted.num_states and await self._bus.last(FEED.name, states) is None and not wanted.num_states:
                return  # it never began, or died long ago, and no state of it came meanwhile
            message = await self._bus.last(JOBS.name, subjects.of("job", job))
            specification = None if message is None else await self._decoded(Job, message)
            if message is not None and specification is not None and specification.generation > MAX_GENERATION:
                reason = f"generation {specification.generation} of job {job!r} is one that no job reaches: made up"
                await self._context.dead_letter(message, reason)
                specification = None
            held = self._logs.get(job)
            if held is not None and (specification is None or specification.generation < held.job.generation):
                specification = held.job  # what is open goes on, with the states that came meanwhile
            generation = -1 if specification is None else specification.generation
            looked_for = wanted.generation
            if generation < wanted.generation and wanted.example is not None:
                reason = f"generation {wanted.generation} of job {job!r} has no specification"
                await self._context.dead_letter(wanted.example, reason)
            if specification is not None and generation > self._halted.generation(job):
                await self._resume(specification, held, wanted)  # last: nothing is noted after it
        finally:
            del self._opening[job]
        if wanted.generation > max(looked_for, generation) and wanted.example is not None:  # its state came meanwhile
            self._let_wait(job, wanted.example, wanted.generation)

    async def _resume(self, job: Job, earlier: JobLog | None, wanted: Wanted) -> None:
        """Hold a job's log once it has folded all states of the job that were read so far, unless that halts it."""
        try:
            log = await self._open_log(job, None if earlier is None else earlier.known)
            log.actions_created = self._actions_created
            await self._check_inputs(log)
            wait, done, until = FailoverWait(self._bus.stream_state, FEED.name), 0, 0
            while until < wanted.newest:  # more may have come meanwhile
                until = wanted.newest
                done = await self._catch_up(log, max(done, log.watermark), until, wanted)
                while wanted.first <= until and done < until and await self._pause(job.job, wait):
                    done = await self._catch_up(log, max(done, log.watermark), until, wanted)
        except HALTING_ERRORS as error:
            await self._halt(job.job, job.generation, error)
        else:
            self._logs.hold(job.job, log, _now_s())
            self._count_jobs()

    async def _open_log(self, job: Job, known: Stored | None) -> JobLog:
        """Open a job's log; where one of several servers answers that knows less, for up to 10 s."""
        wait = FailoverWait(self._bus.stream_state, FEED.name)
        while True:
            try:
                return await JobLog.open(job, self._surroundings, known)
            except (ActionsEndEarlyError, PolicyAbsentError):
                if not await self._pause(job.job, wait):
                    raise

    async def _check_inputs(self, log: JobLog) -> None:
        """See that FEED holds what follows the watermark; a server that was cut off may not know of it yet."""
        if not log.has_inputs:
            return
        wait, feed = FailoverWait(self._bus.stream_state, FEED.name), await self._bus.stream_state(FEED.name)
        while log.watermark > feed.last_sequence and await self._pause(log.job.job, wait):
            feed = await self._bus.stream_state(FEED.name)
        log.check_inputs(feed)

    async def _pause(self, job: str, wait: FailoverWait) -> bool:
        """Wait before a job's opening goes on; others are opened in its place."""
        self._pausing.add(job)
        self._queues.changed.set()
        try:
            return await wait.pause()
        finally:
            self._pausing.discard(job)

    def _count_jobs(self) -> None:
        self._context.counters["jobs"] = len(self._logs)
        self._context.counters["jobs_waiting"] = len(self._waiting) + len(self._opening)

    async def _decoded(self, kind: type[M], message: BusMessage) -> M | None:
        try:
            return decode(kind, message.subject, message.payload)
        except MalformedMessageError as error:
            await self._context.dead_letter(message, str(error))
            return None

    async def _catch_up(self, log: JobLog, after: int, until: int, wanted: Wanted) -> int:
        """Fold a job's own states behind a sequence up to another; returns the last one's."""
        async with contextlib.aclosing(own_states(self._bus, log.job.job, after, until)) as messages:
            async for message in messages:
                await self._fold_one(log, message, is_new=message.sequence >= wanted.first)
                after = message.sequence
        return after

    async def _fold_one(self, log: JobLog, message: BusMessage, *, is_new: bool) -> None:
        try:
            state = decode(State, message.subject, message.payload)
            if state.generation == log.job.generation:
                await log.add_state(message.sequence, state)
                if is_new:
                    self._shown.record_folded(state, log)
        except MalformedMessageError as error:
            await self._context.dead_letter(message, str(error))

    async def _is_of_other_actions(self, log: JobLog) -> bool:
        self._actions_created = (await self._bus.stream_state(ACTIONS.name)).created
        return self._actions_created != log.actions_created

    async def _halt(self, job: str, generation: int, error: Exception) -> None:
        """Decide nothing for this generation of a job: its training continues with the sizes that it has."""
        log = self._logs.get(job)
        self._logs.drop(job)
        if isinstance(error, ActionStoreError) and log is not None and await self._is_of_other_actions(log):
            self._context.log.warning("ACTIONS was made again: the job is opened again", job=job, reason=str(error))
            return
        self._halted.add_job(job, generation)
        self._shown.record_halt(job, generation)
        self._context.count("halted")
        reason, exc_info = reason_of(error)
        self._context.log.error(
            "no decisions for this job", job=job, generation=generation, reason=reason, exc_info=exc_info
        )
        if isinstance(error, ActionStoreError):
            self._context.count("refused_logs")
            await self._bus.publish_soon(refused_log(job, generation, error))


async def _next_batch(consumer: BatchConsumer) -> list[BusMessage] | None:
    """The next batch; `None` at the end."""
    return await anext(consumer, None)


def _now_s() -> float:
    """The clock of what is held in memory only: no decision depends on it."""
    return time.monotonic()
