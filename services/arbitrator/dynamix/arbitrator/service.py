"""The arbitrator's service: a task for each job opens it, gives its states to its `JobLog`, and ends.

`deciding/job_log.py` folds the states and publishes the decisions by compare-and-set.
"""

import asyncio
import collections
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dynamix.runtime.bus import BusError, BusMessage, FailoverWait
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError
from dynamix.schemas.messages import Job, State
from dynamix.schemas.messages.allocation import MAX_GENERATION
from dynamix.schemas.streams import ACTIONS, FEED, JOBS

from .deciding.job_log import (
    HALTING_ERRORS,
    ActionsEndEarlyError,
    ActionStoreError,
    JobLog,
    Stored,
    reason_of,
    store_profiles,
)
from .deciding.signatures import Finding
from .learned.policy_store import PolicyAbsentError, PolicyStore
from .shown import ShownDecisions


class ArbitratorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the process: `DYNAMIX_ARBITRATOR_<FIELD>` or `--field`. The policy is in a job's specification."""

    max_jobs: Annotated[int, Meta(ge=1)] = 10_000
    """Jobs held in memory at once; the least recently used are dropped first, and read again when needed."""
    max_ranks: Annotated[int, Meta(ge=1)] = 1_000_000
    """Ranks of all jobs held in memory at once, some 0.4 kB each; as for `max_jobs`."""
    forget_after_s: Annotated[float, Meta(gt=0)] = 3600.0
    """A job without a state for so long is dropped from memory, and read again when its next one comes."""
    broker_log: str = ""
    """The log file of nats-server on this machine, in which refused operations are counted; empty: they are not."""


async def serve(context: Context[ArbitratorSettings]) -> None:
    """Decide for every job until the context stops."""
    shown = ShownDecisions(context.metrics)
    followed: dict[str, Callable[[], Awaitable[None]]] = {"profiles of job families": partial(store_profiles, context)}
    if context.metrics.is_served:
        followed |= {
            "metrics of ended jobs": partial(shown.follow_ends, context.bus),
            "metrics of refused actions": partial(shown.follow_receipts, context),
            "metrics of the broker": partial(shown.follow_broker, context.bus.stream_state, context.bus.count_requests),
        }
        if context.settings.broker_log:
            log = Path(context.settings.broker_log)
            followed["metrics of violations"] = partial(shown.follow_violations, log)

    async def follow(what: str) -> None:  # no decision needs it: an error here ends none
        try:
            await followed[what]()
        except BusError as error:
            context.log.warning("missing until this service is started again", what=what, reason=str(error))

    following = [asyncio.create_task(follow(what), name=what) for what in followed]
    try:
        await _Arbitrator(context, shown).run()
    except BaseExceptionGroup as group:  # one error ends the process, as the bus or the job's task raised it
        raise group.exceptions[0] from None
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


MAX_OPENING = 16
"""Jobs that are opened at once, beside the states of those that are open: 4 requests to the broker each, or more."""
MAX_BEHIND = 4096
"""States of one job that wait: three windows of 1,250 nodes. A job with more reads them from FEED again by itself."""
MAX_BEHIND_BYTES = 32 << 20
"""The same in bytes."""
MAX_QUEUED_BYTES = 256 << 20
"""Bytes of all jobs in memory above which no more is read: decisions wait, as without a broker."""

MAX_EXPLANATION = 1024
KEPT_BYTES = 4096
"""Bytes that are kept of a message that may become a dead letter."""


@dataclass(slots=True)
class _Wanted:
    """A job that is to be opened, and what was read of its states, which are not held."""

    newest: int
    """FEED sequence up to which its states were read."""
    generation: int = -1
    """The highest one among those states; -1 without any."""
    example: BusMessage | None = None
    """The first of those states, cut off."""
    first: float = math.inf
    """FEED sequence of the first of those states; infinite without any."""

    def note_state(self, message: BusMessage, generation: int) -> None:
        """Note that a state of the job was read."""
        self.newest, self.first = max(self.newest, message.sequence), min(self.first, message.sequence)
        if generation > self.generation:
            self.generation, self.example = generation, message._replace(payload=message.payload[:KEPT_BYTES])


class _Job:
    """One job in memory: its fold, and the states that wait for its task."""

    def __init__(self, name: str, wanted: _Wanted) -> None:
        self.name = name
        self.wanted = wanted
        self.log: JobLog | None = None
        self.generation = -1
        """Generation of the specification that is open, or being opened."""
        self.states: collections.deque[tuple[BusMessage, State]] = collections.deque()
        self.num_bytes = 0
        """Bytes in `states`."""
        self.folded = 0
        """FEED sequence up to which its states are folded."""
        self.put_off_until = 0
        """FEED sequence up to which its states are read from there, since too many waited."""
        self.came = asyncio.Event()
        self.is_over = False
        """Whether its task ends once nothing waits."""
        self.task: asyncio.Task[None] | None = None


class _Arbitrator:
    def __init__(self, context: Context[ArbitratorSettings], shown: ShownDecisions) -> None:
        self._context = context
        self._shown = shown
        self._bus = context.bus
        self._policies = PolicyStore(context.bus)
        self._waiting: OrderedDict[str, _Wanted] = OrderedDict()
        """Jobs that wait to be opened, the next one first: one whose states continue comes before a crowd of others."""
        self._jobs: dict[str, _Job] = {}
        """Jobs with a task."""
        self._held: dict[str, _Job] = {}
        """Open jobs, the least recently used first."""
        self._num_ranks = 0
        """Ranks of all jobs in memory."""
        self._opening: set[_Job] = set()
        """Jobs that are being opened, without those that only wait for a server's correct answer."""
        self._halted: dict[str, int] = {}
        """The newest generation without decisions, by job; those of long ago are forgotten when there are too many."""
        self._num_bytes = 0
        self._room = asyncio.Event()
        self._last = 0
        """The last sequence of FEED that was read."""
        self._actions_created = ""
        self._is_stopping = False

    async def run(self) -> None:
        last = (await self._bus.stream_state(FEED.name)).last_sequence  # first: later states are read below
        self._actions_created = (await self._bus.stream_state(ACTIONS.name)).created
        for name in reversed(await self._running_jobs()):  # the newest first, where not all can wait
            if len(self._waiting) < self._context.settings.max_jobs:
                self._waiting[name] = _Wanted(last)
        states = subjects.of("state", subjects.ANY, subjects.ANY)
        async with asyncio.TaskGroup() as self._group:
            async with self._bus.consume(FEED.name, [states], start=last + 1) as consumer:
                self._context.counters["ready"] = 1
                self._start_opening()
                async for batch in consumer:
                    for message in batch:
                        await self._read(message)
                    await asyncio.sleep(0)  # more may be there already, and jobs must go on meanwhile
                    while self._num_bytes >= MAX_QUEUED_BYTES:
                        self._room.clear()
                        await self._room.wait()
            self._is_stopping = True
            for job in self._jobs.values():
                if job.name in self._held:
                    self._end(job)
                elif job.task is not None:
                    job.task.cancel()

    async def _running_jobs(self) -> list[str]:
        """The running jobs by their newest specifications, oldest first."""
        found = dict[str, None]()
        async for message in self._bus.stored(JOBS.name, [subjects.of("job", subjects.ANY)], "last_per_subject"):
            job = await self._context.decoded(Job, message)
            if job is not None and job.phase == "running":
                found[job.job] = None
        return list(found)

    async def _read(self, message: BusMessage) -> None:
        """Hand a state to its job's task, or let the job wait to be opened."""
        if message.sequence <= self._last:
            await self._begin_again()
        self._last = message.sequence
        state = await self._context.decoded(State, message)
        if state is not None:
            self._shown.record_state(state)
            self._add(message, state)

    async def _begin_again(self) -> None:
        """Forget all jobs, because their streams were made again. Their states come again."""
        self._context.log.warning("FEED was made again: all jobs are opened again")
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._waiting.clear()
        self._halted.clear()
        self._actions_created = (await self._bus.stream_state(ACTIONS.name)).created

    def _add(self, message: BusMessage, state: State) -> None:
        name, num_bytes = state.job, len(message.payload)
        if state.generation <= self._halted.get(name, -1):
            return
        job = self._jobs.get(name)
        if job is None:  # it is read from FEED again once the job is opened, so that none is held meanwhile
            if name in self._waiting:
                self._waiting.move_to_end(name, last=False)
            elif len(self._waiting) < self._context.settings.max_jobs:
                self._waiting[name] = _Wanted(message.sequence)
            else:  # its next state tries again
                self._context.count("jobs_put_off")
                return
            self._waiting[name].note_state(message, state.generation)
            self._start_opening()
            return
        job.states.append((message, state))
        job.num_bytes += num_bytes
        self._num_bytes += num_bytes
        if len(job.states) > MAX_BEHIND or job.num_bytes > MAX_BEHIND_BYTES:
            for _ in job.states:
                self._context.count("states_put_off")
            job.put_off_until = message.sequence
            self._clear(job)
        if job.log is not None:
            self._hold(job)
        job.came.set()

    def _clear(self, job: _Job) -> None:
        self._num_bytes -= job.num_bytes
        job.num_bytes = 0
        job.states.clear()
        self._room.set()

    def _hold(self, job: _Job) -> None:
        """Make a job the most recently used one; end others if there are too many. One job alone is always held."""
        assert job.log is not None, "only open jobs are held"
        job.is_over = False
        if self._held.pop(job.name, None) is None:
            self._num_ranks += job.log.job.world_size
        self._held[job.name] = job
        settings = self._context.settings
        while len(self._held) > 1 and (len(self._held) > settings.max_jobs or self._num_ranks > settings.max_ranks):
            self._end(next(iter(self._held.values())))
        self._count_jobs()

    def _end(self, job: _Job) -> None:
        """End a job's task once nothing waits."""
        self._drop(job)
        job.is_over = True
        job.came.set()

    def _drop(self, job: _Job) -> None:
        if self._held.pop(job.name, None) is not None and job.log is not None:
            self._num_ranks -= job.log.job.world_size
        self._count_jobs()

    def _count_jobs(self) -> None:
        self._context.counters["jobs"] = len(self._held)
        self._context.counters["jobs_waiting"] = len(self._waiting) + len(self._jobs) - len(self._held)

    def _start_opening(self) -> None:
        if not self._is_stopping:
            while self._waiting and len(self._opening) < MAX_OPENING:
                name, wanted = self._waiting.popitem(last=False)
                job = self._jobs[name] = _Job(name, wanted)
                self._opening.add(job)
                job.task = self._group.create_task(self._run_job(job), name=f"job {name}")
        self._count_jobs()

    async def _run_job(self, job: _Job) -> None:
        """Open a job, and fold its states until it is idle, halted, or others need its room."""
        try:
            if await self._open(job):
                self._opening.discard(job)
                self._start_opening()
                await self._fold_states(job)
        except HALTING_ERRORS as error:
            await self._halt(job, error)
        finally:
            self._opening.discard(job)
            self._drop(job)
            del self._jobs[job.name]
            left = list(job.states)
            self._clear(job)
        if not self._is_stopping:
            for message, state in left:  # they came while it ended
                self._add(message, state)
            self._start_opening()

    async def _open(self, job: _Job) -> bool:
        """Open the newest specification, which rank 0 publishes before its ranks' first report; whether it is open.

        A job that is open stays so, unless there is a newer generation.
        """
        wanted, states = job.wanted, subjects.of("state", job.name, subjects.ANY)
        is_known = wanted.example or job.states or await self._bus.last(FEED.name, states) is not None
        if not is_known and not job.states:
            return False  # it never began, or died long ago, and no state of it came meanwhile
        message = await self._bus.last(JOBS.name, subjects.of("job", job.name))
        specification = None if message is None else await self._context.decoded(Job, message)
        if message is not None and specification is not None and specification.generation > MAX_GENERATION:
            reason = f"generation {specification.generation} of job {job.name!r} is one that no job reaches: made up"
            await self._context.dead_letter(message, reason)
            specification = None
        newest = -1 if specification is None else specification.generation
        if max(newest, job.generation) < wanted.generation and wanted.example is not None:
            reason = f"generation {wanted.generation} of job {job.name!r} has no specification"
            await self._context.dead_letter(wanted.example, reason)
        if specification is None or newest <= job.generation:
            return job.log is not None
        if newest <= self._halted.get(job.name, -1):
            return False
        known = None if job.log is None else job.log.known
        self._drop(job)
        job.generation = newest
        log = await self._open_log(job, specification, known)
        log.actions_created = self._actions_created
        if log.has_inputs:  # FEED must hold what follows the watermark; a server that was cut off may not know it yet
            wait, feed = FailoverWait(self._bus.stream_state, FEED.name), await self._bus.stream_state(FEED.name)
            while log.fold.watermark > feed.last_sequence and await self._pause(job, wait):
                feed = await self._bus.stream_state(FEED.name)
            log.check_inputs(feed)
        job.log, job.folded = log, log.fold.watermark
        await self._read_again(job, wanted.newest, wanted.first)
        self._hold(job)
        return True

    async def _open_log(self, job: _Job, specification: Job, known: Stored | None) -> JobLog:
        """Open a job's log; where one of several servers answers that knows less, for up to 10 s."""
        wait = FailoverWait(self._bus.stream_state, FEED.name)
        while True:
            try:
                return await JobLog.open(specification, self._context, self._policies, known)
            except (ActionsEndEarlyError, PolicyAbsentError):
                if not await self._pause(job, wait):
                    raise

    async def _pause(self, job: _Job, wait: FailoverWait) -> bool:
        """Wait before a job continues; others are opened meanwhile."""
        is_opening = job in self._opening
        self._opening.discard(job)
        self._start_opening()
        try:
            return await wait.pause()
        finally:
            if is_opening:
                self._opening.add(job)

    async def _fold_states(self, job: _Job) -> None:
        """Fold what comes, in order, until the job is over or idle."""
        while True:
            if job.put_off_until > job.folded:
                until = job.put_off_until  # more may be put off meanwhile
                await self._read_again(job, until, job.folded + 1)
                job.folded = max(job.folded, until)
            elif job.states:
                message, state = job.states.popleft()
                job.num_bytes -= len(message.payload)
                self._num_bytes -= len(message.payload)
                self._room.set()
                if state.generation > job.generation:
                    job.wanted = _Wanted(message.sequence)
                    job.wanted.note_state(message, state.generation)
                    if not await self._open(job):
                        return
                elif message.sequence > job.folded:
                    await self._fold(job, message, state, is_new=True)
                job.folded = max(job.folded, message.sequence)
            elif job.is_over:
                return
            else:
                job.came.clear()
                try:
                    async with asyncio.timeout(self._context.settings.forget_after_s):
                        await job.came.wait()
                except TimeoutError:
                    return

    async def _fold(self, job: _Job, message: BusMessage, state: State, *, is_new: bool) -> None:
        assert job.log is not None, "it is open"
        if state.generation != job.generation:
            return
        try:
            await job.log.add_state(message.sequence, state)
        except MalformedMessageError as error:
            await self._context.dead_letter(message, str(error))
        else:
            if is_new:
                self._shown.record_folded(state, job.log)

    async def _read_again(self, job: _Job, until: int, first: float) -> None:
        """Fold a job's states from FEED up to a sequence; those from `first` on are known to be there, and new.

        Of several servers one that was cut off may answer, which does not know the last of them.
        """
        wanted, wait = subjects.of("state", job.name, subjects.ANY), FailoverWait(self._bus.stream_state, FEED.name)
        while True:
            newest, position = await self._bus.last(FEED.name, wanted), job.folded
            last = min(until, 0 if newest is None else newest.sequence)
            if position < last:  # a job that ended long ago costs no consumer
                async with self._bus.consume(FEED.name, [wanted], start=position + 1) as consumer:
                    while position < last and (batch := await anext(consumer, None)):
                        position = batch[-1].sequence
                        for message in (one for one in batch if one.sequence <= until):
                            state = await self._context.decoded(State, message)
                            if state is not None:
                                await self._fold(job, message, state, is_new=message.sequence >= first)
                            job.folded = message.sequence
                            await asyncio.sleep(0)  # a long way to catch up must not delay the states of others
            if job.folded >= until or first > until or not await self._pause(job, wait):
                return

    async def _halt(self, job: _Job, error: Exception) -> None:
        """Decide nothing for this generation of a job: its training continues with the sizes that it has."""
        if isinstance(error, ActionStoreError) and job.log is not None:
            self._actions_created = (await self._bus.stream_state(ACTIONS.name)).created
            if self._actions_created != job.log.actions_created:
                warning = "ACTIONS was made again: the job is opened again"
                self._context.log.warning(warning, job=job.name, reason=str(error))
                return
        self._halted.pop(job.name, None)
        self._halted[job.name] = job.generation
        if len(self._halted) > self._context.settings.max_jobs:
            self._halted.pop(next(iter(self._halted)))
        self._shown.record_halt(job.name, job.generation)
        self._context.count("halted")
        reason, exc_info = reason_of(error)
        self._context.log.error(
            "no decisions for this job", job=job.name, generation=job.generation, reason=reason, exc_info=exc_info
        )
        if isinstance(error, ActionStoreError):
            self._context.count("refused_logs")
            finding = Finding("log-refused", error.window, error.known_window, str(error)[:MAX_EXPLANATION])
            event = finding.event(job.name, job.generation, max(0, error.known_window), "arbitrator")
            await self._bus.publish_soon(event)
