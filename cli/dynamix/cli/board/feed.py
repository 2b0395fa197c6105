"""Keeps a board up to date from the bus: finds the job, follows its messages and the heartbeats."""

import asyncio
import contextlib
import time

from dynamix.cli.jobs import NO_JOB, known_jobs, newest_job, none_called
from dynamix.cli.services import hear
from dynamix.runtime.bus import Bus, BusError, BusMessage, Reader
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Job, Live
from dynamix.schemas.streams import ACTIONS, FEED, JOBS

from .board import Board
from .heartbeats import Heartbeats
from .past import feed_subjects, fold_all, silent_jobs

HISTORY_MESSAGES = 4096
"""Messages of FEED that are read before the job's newest window, for the curves: a second at most."""
HEARTBEAT_WAIT_S = 1.5
"""A service beats every second."""
SILENCE_EVERY_S = 10.0
"""How often it is asked whether a job that is silent is still the one to show."""


class Feed:
    """One job's board (`None` while there is no job) and the services' heartbeats, kept up to date from the bus."""

    def __init__(self, bus: Bus, wanted: str | None) -> None:
        """Follow the job `wanted` (an id, its name or its run id), else the newest one that runs."""
        self._bus = bus
        self._wanted = wanted
        self._jobs: dict[str, Job] = {}  # oldest first
        self._silent: set[str] = set()
        self._following: asyncio.Task[None] | None = None
        self.board: Board | None = None
        self.heartbeats = Heartbeats()
        self.changed = asyncio.Event()  # set whenever something new is known

    @property
    def missing(self) -> str:
        """Why there is no board."""
        return NO_JOB if self._wanted is None else none_called(self._wanted, self._jobs)

    async def follow(self) -> None:
        """Keep the board up to date until cancelled; switches to a newer job when that is the one wanted."""
        async with asyncio.TaskGroup() as group:
            group.create_task(hear(self._bus, self._record_beat))
            group.create_task(self._follow_jobs(group))
            group.create_task(self._watch_silence(group))

    async def catch_up(self) -> None:
        """Read what is stored now, and listen for one round of heartbeats."""
        self._jobs = await known_jobs(self._bus)
        await self._find_silent()
        self._choose()
        if self.board is not None:
            await self._read_stored(self.board)
        with contextlib.suppress(BusError):  # the job is shown also to a user who may not hear the services
            await listen(self._bus, self.heartbeats, HEARTBEAT_WAIT_S)

    def _record_beat(self, beat: Live) -> bool:
        self.heartbeats.record(beat, time.monotonic())
        self.changed.set()
        return False  # there is no last one

    async def _follow_jobs(self, group: asyncio.TaskGroup) -> None:
        async with self._bus.consume(
            JOBS.name, [subjects.of("job", subjects.ANY)], start="last_per_subject"
        ) as consumer:
            async for batch in consumer:
                for message in batch:
                    self._record_job(message)
                if batch[-1].num_pending == 0:
                    await self._find_silent()
                    self._switch_job(group)

    async def _watch_silence(self, group: asyncio.TaskGroup) -> None:
        """Leave a job that died without a word for another one that runs."""
        while True:
            await asyncio.sleep(SILENCE_EVERY_S)
            if self.board is not None and self.board.phase(time.time_ns()) == "silent":
                await self._find_silent()
                self._switch_job(group)

    async def _find_silent(self) -> None:
        self._silent = await silent_jobs(self._bus, self._jobs, time.time_ns())

    def _switch_job(self, group: asyncio.TaskGroup) -> None:
        """Follow the chosen job from now on, when it is another one than before."""
        if self._choose() and self.board is not None:
            if self._following is not None:
                self._following.cancel()
            self._following = group.create_task(self._follow_job(self.board))

    async def _follow_job(self, board: Board) -> None:
        await self._read_newest(board)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_actions(board))
            async with await self._consume_feed(board) as consumer:
                async for batch in consumer:
                    self._fold(board, batch)

    async def _follow_actions(self, board: Board) -> None:
        subject = subjects.of("action", board.name)
        async with self._bus.consume(ACTIONS.name, [subject], start="last_per_subject") as consumer:
            async for batch in consumer:
                self._fold(board, batch)

    async def _read_stored(self, board: Board) -> None:
        """Fold what FEED and ACTIONS hold of the job now."""
        await self._read_newest(board)
        newest = [await self._bus.last(FEED.name, subject) for subject in feed_subjects(board.name)]
        end = max((message.sequence for message in newest if message is not None), default=0)
        if end == 0:
            return
        async with await self._consume_feed(board) as consumer:
            async for batch in consumer:
                self._fold(board, batch)
                if batch[-1].sequence >= end:
                    return

    async def _read_newest(self, board: Board) -> None:
        """Read the newest action and failure signature: these are rare, and may lie far before what is read of FEED."""
        for stream, subject in ((ACTIONS, subjects.of("action", board.name)), (FEED, subjects.of("event", board.name))):
            if (message := await self._bus.last(stream.name, subject)) is not None:
                self._fold(board, [message])

    async def _consume_feed(self, board: Board) -> Reader:
        """Read FEED from `HISTORY_MESSAGES` before the job's newest window on, else before the end."""
        newest = await self._bus.last(FEED.name, subjects.of("window", board.name, subjects.ANY))
        last = newest.sequence if newest is not None else (await self._bus.stream_state(FEED.name)).last_sequence
        return self._bus.consume(FEED.name, feed_subjects(board.name), start=max(1, last - HISTORY_MESSAGES))

    def _record_job(self, message: BusMessage) -> None:
        try:
            job = decode(Job, message.subject, message.payload)
        except MalformedMessageError:
            return
        self._jobs.pop(job.job, None)
        self._jobs[job.job] = job
        if self.board is not None:
            self.board.fold(job, message.timestamp_ns)
        self.changed.set()

    def _fold(self, board: Board, batch: list[BusMessage]) -> None:
        fold_all(board, batch)
        self.changed.set()

    def _choose(self) -> bool:
        """Choose the job and begin its board; False when it is the one that is shown already."""
        name = newest_job(self._jobs, self._wanted, self._silent)
        if name is None or (self.board is not None and self.board.name == name):
            return False
        self.board = Board(name)
        self.board.fold(self._jobs[name])
        self.changed.set()
        return True


async def listen(bus: Bus, heartbeats: Heartbeats, timeout_s: float) -> None:
    """Record heartbeats for so long: also once all services were heard, since training processes beat, too."""

    def record(beat: Live) -> bool:
        heartbeats.record(beat, time.monotonic())
        return False

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await hear(bus, record)
