"""Reads what FEED and ACTIONS hold of one generation."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from dynamix.arbitrator.rollout import Recording
from dynamix.runtime.bus import Bus, Message
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Action, Applied, Job, Reward, State
from dynamix.schemas.streams import ACTIONS, FEED

Refuse = Callable[[Message, str], Awaitable[None]]
"""What to do with a message that cannot be used."""


async def collect(bus: Bus, job: Job, *, grace_s: float, refuse: Refuse) -> Recording:
    """The recorded messages of a generation that is over.

    Rewards travel one service further than states: until the last ones are there, at most `grace_s` are waited. What
    FEED no longer holds is missing, and counted as such in the trajectory.

    Raises:
        BusError: when the streams cannot be read.
    """
    feed = _Gathering(job, refuse)
    wanted = [
        subjects.state(job.job, subjects.ANY),
        subjects.reward(job.job, subjects.ANY),
        subjects.applied(job.job),
    ]
    await _read(bus, FEED.name, wanted, feed, grace_s)
    actions = _Gathering(job, refuse)
    if await bus.last(ACTIONS.name, subjects.action(job.job)) is not None:
        await _read(bus, ACTIONS.name, [subjects.action(job.job)], actions, grace_s)
    return Recording(job, feed.states, actions.actions, feed.applied, feed.rewards)


async def _read(bus: Bus, stream: str, wanted: list[str], into: "_Gathering", grace_s: float) -> None:
    """All stored messages of some subjects; of states, until each has its reward or the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s), bus.consume(stream, wanted, start="all") as consumer:
            async for batch in consumer:
                for message in batch:
                    await into.add(message)
                if batch[-1].num_pending == 0 and into.is_whole:
                    return


class _Gathering:
    """Messages of one generation, by kind."""

    def __init__(self, job: Job, refuse: Refuse) -> None:
        self._job = job
        self._refuse = refuse
        self._measured: set[tuple[int, str]] = set()
        """Windows of nodes with a state, and below those with a reward."""
        self._rewarded: set[tuple[int, str]] = set()
        self.states: list[tuple[int, State]] = []
        self.rewards: list[Reward] = []
        self.applied: list[Applied] = []
        self.actions: list[Action] = []

    @property
    def is_whole(self) -> bool:
        """Whether every state has its reward."""
        return self._measured <= self._rewarded

    async def add(self, message: Message) -> None:
        """Take in a stored message; another generation's is not ours."""
        try:
            content = decode_any(message.subject, message.payload)
        except MalformedMessageError as error:
            await self._refuse(message, str(error))
            return
        if getattr(content, "generation", None) != self._job.generation:
            return
        match content:
            case State():
                self.states.append((message.sequence, content))
                self._measured.add((content.window, content.node))
            case Reward():
                self.rewards.append(content)
                self._rewarded.add((content.window, content.node))
            case Applied():
                self.applied.append(content)
            case Action():
                self.actions.append(content)
            case _:
                pass
