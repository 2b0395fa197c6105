"""Watches the bus: every action as it is stored, every service's newest heartbeat, what a stream has of a subject."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from dynamix.runtime.bus import Bus, BusMessage
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Job, Live
from dynamix.schemas.streams import ACTIONS


class Seen(NamedTuple):
    """A stored action, and when we saw it by the loop's clock."""

    at_s: float
    action: Action


class BusWatch:
    """Messages seen so far; a test can wait for more."""

    def __init__(self, bus: Bus, job: str) -> None:
        self._bus = bus
        self._job = job
        self._news = asyncio.Condition()
        self.actions: list[Seen] = []
        self.beats: dict[tuple[str, str], Live] = {}
        """The newest of each, by service and instance."""

    async def until(self, condition: Callable[[], bool], timeout_s: float = 180.0) -> None:
        """Wait for a condition on what was seen."""
        async with asyncio.timeout(timeout_s), self._news:
            await self._news.wait_for(condition)

    async def until_decided(self, count: int, timeout_s: float = 180.0) -> None:
        """Wait until the job has so many actions."""
        await self.until(lambda: len(self.actions) >= count, timeout_s)

    async def until_ready(self, *instances: str) -> None:
        """Wait until each of these arbitrators says that it listens to its streams."""
        await self.until(lambda: all(self.counter(instance, "ready") for instance in instances))

    def counter(self, instance: str, name: str, service: str = "arbitrator") -> int:
        """A counter in an instance's newest heartbeat; 0 before the first."""
        beat = self.beats.get((service, instance))
        return 0 if beat is None else beat.counters.get(name, 0)

    async def follow_actions(self) -> None:
        """Read actions until cancelled."""
        loop = asyncio.get_running_loop()
        async with self._bus.consume(ACTIONS.name, [subjects.of("action", self._job)], start="all") as consumer:
            async for batch in consumer:
                async with self._news:
                    self.actions += [Seen(loop.time(), decode(Action, one.subject, one.payload)) for one in batch]
                    self._news.notify_all()

    async def follow_beats(self) -> None:
        """Listen to heartbeats until cancelled."""
        async with self._bus.subscribe(subjects.of("live", subjects.ANY, subjects.ANY)) as beats:
            async for message in beats:
                beat = decode(Live, message.subject, message.payload)
                async with self._news:
                    self.beats[beat.service, beat.instance] = beat
                    self._news.notify_all()


@contextlib.asynccontextmanager
async def watching(bus: Bus, job: str) -> AsyncIterator[BusWatch]:
    """BusWatch a job until the end of the block; the block fails when watching fails."""
    watch = BusWatch(bus, job)
    async with asyncio.TaskGroup() as tasks:
        following = [tasks.create_task(watch.follow_actions()), tasks.create_task(watch.follow_beats())]
        yield watch
        for task in following:
            task.cancel()


async def stored_job(bus: Bus, job: str) -> Job:
    """The newest specification of a job."""
    message = await bus.last("JOBS", subjects.of("job", job))
    assert message is not None
    return decode(Job, message.subject, message.payload)


async def stored_messages(bus: Bus, stream: str, subject: str) -> list[BusMessage]:
    """All messages of a subject or filter, up to the newest one now."""
    newest, found = await bus.last(stream, subject), list[BusMessage]()
    if newest is None:
        return found
    async with bus.consume(stream, [subject], start="all") as consumer:
        async for batch in consumer:
            found += batch
            if batch[-1].sequence >= newest.sequence:
                break
    return found
