"""How long an answer that is older than what is known may still be followed by a newer one."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from .message import StreamState

OLD_ANSWERS_S, PAUSE_S = 10.0, 0.5
"""One of several servers that was cut off may lead a stream, as it believes, and say what that held before, until it
hears of its successor; it gives up by itself after 10 s. A single server is believed at once: within seconds new
messages would hide what it lost."""


class FailoverWait:
    """Pauses between the tries of one question: `while is_old(answer) and await wait.pause(): answer = await ask()`.

    It costs nothing until an answer is too old, and one request then.
    """

    def __init__(self, stream_state: Callable[[str], Awaitable[StreamState]], stream: str) -> None:
        """`stream` is one whose state we may ask for; all streams have as many copies (`provision`)."""
        self._stream_state = stream_state
        self._stream = stream
        self._until_s: float | None = None

    async def pause(self) -> bool:
        """Wait a moment before asking again. False, at once, with one copy, or 10 s after the first call."""
        if self._until_s is None:
            num_replicas = (await self._stream_state(self._stream)).num_replicas
            self._until_s = time.monotonic() + (OLD_ANSWERS_S if num_replicas > 1 else 0.0)
        if time.monotonic() >= self._until_s:
            return False
        await asyncio.sleep(PAUSE_S)
        return True
