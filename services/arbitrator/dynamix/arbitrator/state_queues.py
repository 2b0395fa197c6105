"""The states of each job, folded one after another; jobs beside each other, so that none waits for another's decisions.

A job that sends states faster than they can be decided falls behind: what waits of it is put off at once, and it reads
them from FEED again by itself.
"""

import asyncio
import collections
from collections.abc import Awaitable, Callable, Iterable

from dynamix.runtime.bus import BusMessage
from dynamix.schemas.messages import State

MAX_BEHIND = 4096
"""States of one job that wait: three windows of 1,250 nodes."""
MAX_BEHIND_BYTES = 32 << 20
"""The same in bytes."""
MAX_QUEUED_BYTES = 256 << 20
"""No more is read while so much waits of all jobs: a decision in each queue hangs, as while the broker is away."""

FoldState = Callable[[BusMessage, State], Awaitable[None]]
PutOff = Callable[[BusMessage, State], None]


class StateQueues:
    """A queue for each job of which something waits, and a task that folds it.

    Attributes:
        num_bytes: what waits, of all jobs.
        changed: set whenever a queue has ended.
    """

    def __init__(self, fold: FoldState, put_off: PutOff, *, may_put_off: bool) -> None:
        """Fold each state; with `may_put_off` hand all that wait of a job over where it has fallen behind."""
        self.num_bytes = 0
        self.changed = asyncio.Event()
        self._fold = fold
        self._put_off = put_off
        self._may_put_off = may_put_off
        self._queues: dict[str, _JobStates] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []

    @property
    def has_room(self) -> bool:
        """Whether more may be read."""
        return self.num_bytes < MAX_QUEUED_BYTES

    def add_states(self, states: Iterable[tuple[BusMessage, State]]) -> None:
        """Let states wait for the earlier ones of their jobs."""
        for message, state in states:
            queue = self._queues.get(state.job)
            if queue is None:
                queue = self._queues[state.job] = _JobStates()
                task = asyncio.create_task(self._drain(state.job, queue), name=f"states of {state.job}")
                self._tasks.add(task)
                task.add_done_callback(self._end)
            queue.states.append((message, state))
            queue.num_bytes += len(message.payload)
            self.num_bytes += len(message.payload)

    async def drained(self) -> None:
        """Wait until nothing waits."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def check(self) -> None:
        """Raise the error that ended a queue: of the bus, or our own."""
        self.changed.clear()
        if self._errors:
            raise self._errors[0]

    async def close(self) -> None:
        """Fold no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _drain(self, job: str, queue: "_JobStates") -> None:
        try:
            while queue.states:
                if self._may_put_off and queue.is_behind:
                    while queue.states:
                        self._put_off(*self._take(queue))
                else:
                    await self._fold(*self._take(queue))
        finally:
            del self._queues[job]
            self.num_bytes -= queue.num_bytes

    def _take(self, queue: "_JobStates") -> tuple[BusMessage, State]:
        message, state = queue.states.popleft()
        queue.num_bytes -= len(message.payload)
        self.num_bytes -= len(message.payload)
        return message, state

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._errors.append(error)
        self.changed.set()


class _JobStates:
    def __init__(self) -> None:
        self.states: collections.deque[tuple[BusMessage, State]] = collections.deque()
        self.num_bytes = 0

    @property
    def is_behind(self) -> bool:
        return len(self.states) > MAX_BEHIND or self.num_bytes > MAX_BEHIND_BYTES
