"""Reads what FEED and ACTIONS hold of one generation."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from dynamix.runtime.bus import Bus, BusError, BusMessage, Consumer
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Action, Applied, Job, Reward, State
from dynamix.schemas.streams import ACTIONS, FEED

from .rollout import Recording

Refuse = Callable[[BusMessage, str], Awaitable[None]]
"""What to do with a message that cannot be used."""


STALL_TIMEOUT_S = 60.0
"""A broker that restarts is waited for as long as a request waits."""


class Collected(NamedTuple):
    """What the streams hold of a generation."""

    recording: Recording
    num_unrewarded: int
    """States of nodes whose reward did not come in time."""


async def collect(bus: Bus, job: Job, *, grace_s: float, refuse: Refuse) -> Collected | None:
    """The recorded messages of a generation that is over; `None` when the intake was stopped meanwhile.

    All that is stored is read, however long that takes. Rewards travel one service further than states: for the last
    ones this then waits at most `grace_s`. What FEED no longer holds is missing, and counted in the trajectory.

    Raises:
        BusError: when the streams cannot be read.
    """
    feed = _GenerationMessages(job, refuse)
    wanted = [
        subjects.state(job.job, subjects.ANY),
        subjects.reward(job.job, subjects.ANY),
        subjects.applied(job.job),
    ]
    actions = _GenerationMessages(job, refuse)
    try:
        await _read(bus, FEED.name, wanted, feed, grace_s)
        await _read(bus, ACTIONS.name, [subjects.action(job.job)], actions, grace_s)
    except _IntakeStoppedError:
        return None
    recording = Recording(job, feed.states, actions.actions, feed.applied, feed.rewards)
    return Collected(recording, feed.num_unrewarded)


async def _read(bus: Bus, stream: str, wanted: list[str], into: "_GenerationMessages", grace_s: float) -> None:
    """Read all stored messages of some subjects, then more until each state has its reward or time is over."""
    newest = [message.sequence for subject in wanted if (message := await bus.last(stream, subject)) is not None]
    if not newest:
        return
    async with bus.consume(stream, wanted, start="all") as consumer:
        position = 0
        while position < max(newest):
            try:
                position = await _read_batch(consumer, into, STALL_TIMEOUT_S)
            except TimeoutError:
                raise BusError(f"nothing more of {stream} came within {STALL_TIMEOUT_S:g} s") from None
        deadline_s = asyncio.get_running_loop().time() + grace_s
        while into.num_unrewarded and (left_s := deadline_s - asyncio.get_running_loop().time()) > 0:
            try:
                await _read_batch(consumer, into, left_s)
            except TimeoutError:
                return


class _IntakeStoppedError(Exception):
    """The process stops."""


async def _read_batch(consumer: Consumer, into: "_GenerationMessages", timeout_s: float) -> int:
    """Record the next batch, which has to come within the time-out; returns its last sequence."""
    async with asyncio.timeout(timeout_s):
        batch = await anext(consumer, None)
    if batch is None:
        raise _IntakeStoppedError
    for message in batch:
        await into.record_message(message)
    return batch[-1].sequence


class _GenerationMessages:
    """The messages of one generation, by kind."""

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
    def num_unrewarded(self) -> int:
        """States without their reward."""
        return len(self._measured - self._rewarded)

    async def record_message(self, message: BusMessage) -> None:
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
