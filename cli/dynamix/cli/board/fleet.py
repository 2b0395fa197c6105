"""Keeps the boards of all jobs and the services' heartbeats up to date from the bus."""

import asyncio
import time

from dynamix.cli.services import hear
from dynamix.runtime.bus import Bus, BusMessage
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Job, Live, Message, MetricWindow
from dynamix.schemas.streams import ACTIONS, FEED, JOBS

from .board import Board
from .heartbeats import Heartbeats
from .past import MOST_ASKED, board_of_past

RECENT_MESSAGES = 2048
"""Messages of FEED before the newest that are read at the start, so that the list of jobs has numbers at once."""
MAX_BOARDS = 64
"""Jobs that are kept, the newest ones."""
FEED_KINDS = ("window", "reward", "applied", "event")


class Fleet:
    """The board of every job, by name and oldest first, and the services' heartbeats."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._opened: dict[str, asyncio.Task[None]] = {}
        self._meanwhile: dict[str, list[tuple[Message, int]]] = {}
        """By job whose past is being read: what came since, with the time of each message."""
        self._forgotten: set[str] = set()
        self._jobs_known = asyncio.Event()
        self.boards: dict[str, Board] = {}
        self.heartbeats = Heartbeats()
        self.news = asyncio.Event()
        """Set when something new is known, and replaced by another one: who waits holds the one that it saw."""

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to the broker now."""
        return self._bus.is_connected

    @property
    def num_older(self) -> int:
        """Jobs on the broker that are not kept."""
        return len(self._forgotten)

    async def follow(self) -> None:
        """Keep everything up to date until cancelled. Raises BusError when the broker has no streams."""
        async with asyncio.TaskGroup() as group:
            group.create_task(hear(self._bus, self._record_beat))
            group.create_task(self._follow_jobs())
            group.create_task(self._follow_actions())
            group.create_task(self._follow_feed())

    async def open(self, name: str) -> Board | None:
        """The board of a job with what is stored of it; `None` when there is no such job. Its past is read once.

        From then on it is the same object for every caller. Raises BusError when the past cannot be read.
        """
        if (reading := self._reading(name)) is None:
            return None
        await asyncio.shield(reading)
        return self.boards.get(name)

    def opened(self, name: str) -> Board | None:
        """The board that `open` gives, as soon as there is one: until then reading goes on, or begins again."""
        reading = self._reading(name)
        return self.boards.get(name) if reading is not None and reading.done() else None

    def _reading(self, name: str) -> asyncio.Task[None] | None:
        if name not in self.boards:
            return None
        reading = self._opened.get(name)
        if reading is None or (reading.done() and (reading.cancelled() or reading.exception() is not None)):
            reading = self._opened[name] = asyncio.create_task(self._read_past(name), name=f"past of {name}")
        return reading

    async def _read_past(self, name: str) -> None:
        meanwhile = self._meanwhile[name] = []
        try:
            board = await board_of_past(self._bus, name)
        finally:
            del self._meanwhile[name]
        for message, timestamp_ns in meanwhile:
            board.fold(message, timestamp_ns)
        if name in self.boards:
            self.boards[name] = board
        self._notify()

    async def _follow_jobs(self) -> None:
        wanted = [subjects.of("job", subjects.ANY)]
        if await self._bus.last(JOBS.name, *wanted) is None:
            self._jobs_known.set()
        async with self._bus.consume(JOBS.name, wanted, start="last_per_subject") as consumer:
            async for batch in consumer:
                self._fold(batch)
                if batch[-1].num_pending == 0:
                    self._jobs_known.set()

    async def _follow_actions(self) -> None:
        wanted = [subjects.of("action", subjects.ANY)]
        async with self._bus.consume(ACTIONS.name, wanted, start="last_per_subject") as consumer:
            async for batch in consumer:
                self._fold(batch)

    async def _follow_feed(self) -> None:
        await self._jobs_known.wait()
        for board in list(self.boards.values())[-MOST_ASKED:]:
            if board.job is not None and board.job.phase == "running":
                newest = await self._bus.last(FEED.name, subjects.of("window", board.name, subjects.ANY))
                self._fold([] if newest is None else [newest])
        end = (await self._bus.stream_state(FEED.name)).last_sequence
        wanted = [subjects.all_of(kind) for kind in FEED_KINDS]
        async with self._bus.consume(FEED.name, wanted, start=max(1, end - RECENT_MESSAGES)) as consumer:
            async for batch in consumer:
                self._fold(batch)

    def _fold(self, batch: list[BusMessage]) -> None:
        for received in batch:
            try:
                message = decode_any(received.subject, received.payload)
            except MalformedMessageError:
                continue  # the service that it was meant for says so
            name = str(getattr(message, "job", ""))
            if isinstance(message, Job):
                self._begin(name, again=True)
            elif isinstance(message, MetricWindow):  # it may overtake its job's specification
                self._begin(name, again=False)
            if (board := self.boards.get(name)) is not None:
                board.fold(message, received.timestamp_ns)
                self._meanwhile.get(name, []).append((message, received.timestamp_ns))
        self._notify()

    def _begin(self, name: str, *, again: bool) -> None:
        """Have a board for a job, as the newest one where its specification came `again`."""
        if name in self._forgotten or (name in self.boards and not again):
            return
        self.boards[name] = self.boards.pop(name) if name in self.boards else Board(name)
        while len(self.boards) > MAX_BOARDS:
            oldest = next(iter(self.boards))
            del self.boards[oldest]
            self._opened.pop(oldest, None)
            self._forgotten.add(oldest)

    def _record_beat(self, beat: Live) -> bool:
        self.heartbeats.record(beat, time.monotonic())
        self._notify()
        return False  # there is no last one

    def _notify(self) -> None:
        seen, self.news = self.news, asyncio.Event()
        seen.set()
