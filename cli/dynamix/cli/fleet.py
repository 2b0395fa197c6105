"""Jobs and services as the bus shows them: what is stored of a job now, or all jobs kept up to date."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Literal

from dynamix.recording.job_view import HISTORY_WINDOWS, JobView
from dynamix.runtime.bus import Bus, BusMessage
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Job, Live, Message, MetricWindow
from dynamix.schemas.streams import ACTIONS, FEED, JOBS

from .jobs import is_called, newest_job
from .services import Heartbeats, beside, hear

PAST_MESSAGES = 16384
"""Messages of FEED, of all jobs, among which those of one job are read for its curves: a second at most."""
RECENT_MESSAGES = 2048
"""Messages of FEED before the newest that are read at the start, so that the list of jobs has numbers at once."""
MOST_ASKED = 32
"""Running jobs whose newest window is read at the start: the newest ones."""
MAX_JOBS = 64
"""Jobs that are kept, the newest ones."""
FEED_KINDS = ("window", "reward", "applied", "event")


def fold(view: JobView, message: BusMessage) -> None:
    """Fold a message into a view; what cannot be decoded is left out, since the services report it."""
    with contextlib.suppress(MalformedMessageError):
        view.fold(decode_any(message.subject, message.payload), message.timestamp_ns)


class Fleet:
    """The views of all jobs, by name and oldest first, and the services' heartbeats, kept up to date from the bus."""

    def __init__(self, bus: Bus, wanted: str | None = None) -> None:
        """Follow all jobs, or those called `wanted`: an id, a name or a run id."""
        self.bus = bus
        self._wanted = wanted
        self._opened: dict[str, asyncio.Task[None]] = {}
        self._meanwhile: dict[str, list[tuple[Message, int]]] = {}
        """Messages that came while a job's past is being read, with their times."""
        self.forgotten: set[str] = set()
        """Jobs on the broker that are not kept."""
        self._jobs_known = asyncio.Event()
        self.known = asyncio.Event()
        """Set once all jobs are known, and the newest window of the running ones."""
        self.jobs: dict[str, JobView] = {}
        self.heartbeats = Heartbeats()
        self.news = asyncio.Event()
        """Set when something new is known, and replaced by another one: who waits holds the one that it saw."""

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncGenerator[None, None]:
        """Keep everything up to date for as long as the context lasts.

        Raises BusError, also in the midst of the context, when the streams cannot be read.
        """

        def record_beat(beat: Live) -> None:
            self.heartbeats.record(beat, time.monotonic())
            self._notify()

        jobs, actions = ([subjects.of(kind, subjects.ANY)] for kind in ("job", "action"))
        if await self.bus.last(JOBS.name, *jobs) is None:
            self._jobs_known.set()
        async with beside(
            hear(self.bus, record_beat),
            self._consume(JOBS.name, jobs, "last_per_subject"),
            self._consume(ACTIONS.name, actions, "last_per_subject"),
            self._follow_feed(),
        ):
            yield

    def newest(self, now_ns: int) -> str | None:
        """The job to show now: a job that died without a word gives way to another one that runs."""
        jobs = {name: view.job for name, view in self.jobs.items() if view.job is not None}
        silent = {name for name in jobs if self.jobs[name].phase(now_ns) == "silent"}
        return newest_job(jobs, self._wanted, silent)

    async def open(self, name: str) -> JobView | None:
        """A job with what is stored of it; `None` when there is no such job. Its past is read once.

        From then on it is the same object for every caller. Raises BusError when the past cannot be read.
        """
        if (reading := self._reading(name)) is None:
            return None
        await asyncio.shield(reading)
        return self.jobs.get(name)

    def opened(self, name: str) -> JobView | None:
        """The view from `open`, as soon as there is one: until then reading continues, or starts again."""
        reading = self._reading(name)
        return self.jobs.get(name) if reading is not None and reading.done() else None

    def _reading(self, name: str) -> asyncio.Task[None] | None:
        if name not in self.jobs:
            return None
        reading = self._opened.get(name)
        if reading is None or (reading.done() and (reading.cancelled() or reading.exception() is not None)):
            reading = self._opened[name] = asyncio.create_task(self._read_past(name), name=f"past of {name}")
        return reading

    async def _read_past(self, name: str) -> None:
        """Replace a job's view by one of what is stored: the curves of its newest windows, the newest decisions."""
        meanwhile = self._meanwhile[name] = []
        view = JobView(name)
        per_node = [subjects.of(kind, name, subjects.ANY) for kind in ("window", "reward")]
        of_feed = [*per_node, subjects.of("applied", name), subjects.of("event", name)]
        try:
            for stream, subject in ((JOBS.name, subjects.of("job", name)), (FEED.name, subjects.of("event", name))):
                if (newest := await self.bus.last(stream, subject)) is not None:
                    fold(view, newest)
            for stream, wanted, length in (
                (FEED.name, of_feed, PAST_MESSAGES),
                (ACTIONS.name, [subjects.of("action", name)], HISTORY_WINDOWS * MOST_ASKED),
            ):
                newest_of_each = [await self.bus.last(stream, subject) for subject in wanted]
                end = max((message.sequence for message in newest_of_each if message is not None), default=0)
                async for message in self.bus.stored(stream, wanted, max(1, end - length)):
                    fold(view, message)
        finally:
            del self._meanwhile[name]
        for known, timestamp_ns in meanwhile:
            view.fold(known, timestamp_ns)
        if name in self.jobs:
            self.jobs[name] = view
        self._notify()

    async def _follow_feed(self) -> None:
        await self._jobs_known.wait()
        for view in list(self.jobs.values())[-MOST_ASKED:]:
            if view.job is not None and view.job.phase == "running":
                newest = await self.bus.last(FEED.name, subjects.of("window", view.name, subjects.ANY))
                self._fold([] if newest is None else [newest])
        self.known.set()
        end = (await self.bus.stream_state(FEED.name)).last_sequence
        wanted = [subjects.all_of(kind) for kind in FEED_KINDS]
        await self._consume(FEED.name, wanted, max(1, end - RECENT_MESSAGES))

    async def _consume(self, stream: str, wanted: list[str], start: Literal["last_per_subject"] | int) -> None:
        async with self.bus.consume(stream, wanted, start=start) as consumer:
            async for batch in consumer:
                self._fold(batch)
                if stream == JOBS.name and batch[-1].num_pending == 0:
                    self._jobs_known.set()

    def _fold(self, batch: list[BusMessage]) -> None:
        for received in batch:
            try:
                message = decode_any(received.subject, received.payload)
            except MalformedMessageError:
                continue  # the services report it
            name = str(getattr(message, "job", ""))
            if isinstance(message, (Job, MetricWindow)):  # a window may overtake its job's specification
                self._begin(name, again=isinstance(message, Job))
            if (view := self.jobs.get(name)) is not None:
                view.fold(message, received.timestamp_ns)
                self._meanwhile.get(name, []).append((message, received.timestamp_ns))
        self._notify()

    def _begin(self, name: str, *, again: bool) -> None:
        """Have a view of a job, as the newest one where its specification came `again`."""
        if name in self.forgotten or (name in self.jobs and not again):
            return
        if self._wanted is not None and not is_called(name, self._wanted):
            return
        self.jobs[name] = self.jobs.pop(name) if name in self.jobs else JobView(name)
        while len(self.jobs) > MAX_JOBS:
            oldest = next(iter(self.jobs))
            del self.jobs[oldest]
            self._opened.pop(oldest, None)
            self.forgotten.add(oldest)

    def _notify(self) -> None:
        seen, self.news = self.news, asyncio.Event()
        seen.set()
