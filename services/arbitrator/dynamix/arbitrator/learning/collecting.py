"""Which generations of which jobs are over, and what FEED and ACTIONS hold of them."""

import asyncio
from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

from dynamix.arbitrator.families.ends import COMPLETED
from dynamix.runtime.bus import Bus, BusError, BusMessage, FailoverWait, Reader
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Action, Applied, Job, Message, Reward, State
from dynamix.schemas.streams import ACTIONS, FEED

from .rollout import Recording

Refuse = Callable[[BusMessage, str], Awaitable[None]]
"""Called with a message that cannot be used."""

STALL_TIMEOUT_S = 60.0
"""A broker that restarts is waited for as long as a request waits."""


class Finished(NamedTuple):
    """A generation that is over."""

    job: Job
    """Its specification."""
    terminated: bool
    """It did all it meant to do: nothing comes after. Otherwise it was cut off."""

    @property
    def name(self) -> str:
        """`<job>:<generation>`, which no other has."""
        return f"{self.job.job}:{self.job.generation}"


class Generations:
    """Follows the jobs that a policy explores in."""

    def __init__(self, policy: str, pattern: str) -> None:
        self._policy = policy
        self._pattern = pattern
        self._running: dict[str, Job] = {}

    def observe_job(self, job: Job) -> list[Finished]:
        """Take in a specification; the generations that are known to be over by it, oldest first.

        A specification of a generation not after the newest one seen changes nothing, unless it ends that one.
        """
        before = self._running.get(job.job)
        if before is not None and job.generation < before.generation:
            return []
        finished = []
        if before is not None and job.generation > before.generation:
            finished.append(Finished(before, terminated=False))
        if job.phase == "running":
            self._running[job.job] = job
        else:
            self._running.pop(job.job, None)
            finished.append(Finished(job, terminated=job.end_reason == COMPLETED))
        return [generation for generation in finished if self._wanted(generation.job)]

    def _wanted(self, job: Job) -> bool:
        explores = job.policy_options.get("explore", 0) == 1
        return explores and job.policy == self._policy and fnmatchcase(job.job, self._pattern)


class Collected(NamedTuple):
    """The stored messages of a generation."""

    recording: Recording
    num_unrewarded: int
    """States of nodes whose reward did not come in time."""


async def collect(bus: Bus, job: Job, *, grace_s: float, refuse: Refuse) -> Collected | None:
    """The recorded messages of a generation that is over; `None` when the intake was stopped meanwhile.

    All that is stored is read, however long that takes. Rewards travel one service further than states: for the last
    ones this then waits at most `grace_s`. What FEED no longer holds is missing.

    Raises:
        BusError: when the streams cannot be read.
    """
    reader = _Reader(bus, job, refuse)
    try:
        await reader.read(FEED.name, subjects.of("state", job.job, subjects.ANY), 0.0)
        await reader.read(FEED.name, subjects.of("applied", job.job), 0.0)
        await reader.read(FEED.name, subjects.of("reward", job.job, subjects.ANY), grace_s)
        wait, decisions = FailoverWait(bus.stream_state, ACTIONS.name), subjects.of("action", job.job)
        await reader.read(ACTIONS.name, decisions, 0.0)
        while reader.lacks_actions and await wait.pause():  # of several servers one that was cut off may know less
            reader.actions.clear()
            await reader.read(ACTIONS.name, decisions, 0.0)
    except _IntakeStoppedError:
        return None
    recording = Recording(job, reader.states, reader.actions, reader.applied, reader.rewards)
    return Collected(recording, reader.num_unrewarded)


class _IntakeStoppedError(Exception):
    """The process stops."""


class _Reader:
    """Reads the messages of one generation, by kind."""

    def __init__(self, bus: Bus, job: Job, refuse: Refuse) -> None:
        self._bus = bus
        self._job = job
        self._refuse = refuse
        self.states: list[tuple[int, State]] = []
        self.rewards: list[Reward] = []
        self.applied: list[Applied] = []
        self.actions: list[Action] = []

    @property
    def num_unrewarded(self) -> int:
        """Windows of nodes with a state and without its reward."""
        rewarded = {(reward.window, reward.node) for reward in self.rewards}
        return len({(state.window, state.node) for _, state in self.states} - rewarded)

    @property
    def lacks_actions(self) -> bool:
        """Whether the ranks applied a later action than there is."""
        last = max((action.window for action in self.actions), default=-1)
        return any(receipt.decided_window > last for receipt in self.applied)

    async def read(self, stream: str, wanted: str, grace_s: float) -> None:
        """Read all stored messages of a filter, then more until each state has its reward or time is over."""
        newest = await self._bus.last(stream, wanted)
        async with self._bus.consume(stream, [wanted], start="all") as consumer:
            position = 0
            while newest is not None and position < newest.sequence:
                try:
                    position = await self._read_batch(consumer, STALL_TIMEOUT_S)
                except TimeoutError:
                    raise BusError(f"nothing more of {stream} came within {STALL_TIMEOUT_S:g} s") from None
            deadline_s = asyncio.get_running_loop().time() + grace_s
            while self.num_unrewarded and (left_s := deadline_s - asyncio.get_running_loop().time()) > 0:
                try:
                    await self._read_batch(consumer, left_s)
                except TimeoutError:
                    return

    async def _read_batch(self, consumer: Reader, timeout_s: float) -> int:
        """Record the next batch, which has to come within the time-out; returns its last sequence."""
        async with asyncio.timeout(timeout_s):
            batch = await anext(consumer, None)
        if batch is None:
            raise _IntakeStoppedError
        for message in batch:
            try:
                self._record(message.sequence, decode_any(message.subject, message.payload))
            except MalformedMessageError as error:
                await self._refuse(message, str(error))
        return batch[-1].sequence

    def _record(self, sequence: int, content: Message) -> None:
        """Take in a stored message; another generation's is not ours."""
        if getattr(content, "generation", None) != self._job.generation:
            return
        match content:
            case State():
                self.states.append((sequence, content))
            case Reward():
                self.rewards.append(content)
            case Applied():
                self.applied.append(content)
            case Action():
                self.actions.append(content)
