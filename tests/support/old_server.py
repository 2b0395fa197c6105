"""A bus of which one of several servers answers as it did before: it was cut off and has not heard of its successor."""

from typing import Any

from msgspec.structs import replace

from dynamix.runtime.bus import Bus, BusMessage, StaleWriterError, StreamState
from dynamix.schemas.messages import Action


class OldServer:
    """A real bus, but for the first answers to some questions, which are old.

    Attributes:
        num_asked: how often its old answers, or what is behind them, were asked for, by subject or stream.
    """

    def __init__(self, bus: Bus, num_replicas: int = 3) -> None:
        self.num_asked: dict[str, int] = {}
        self._bus = bus
        self._num_replicas = num_replicas
        self._old: dict[str, tuple[int, Any]] = {}

    def answer_old(self, num_times: int, what: str, answer: Any) -> None:
        """Answer so often with this: the newest message of a subject, or the last sequence of a stream."""
        self._old[what] = (num_times, answer)
        self.num_asked[what] = 0

    async def last(self, stream: str, subject: str) -> BusMessage | None:
        """As of the bus, or old."""
        if self._is_old(subject):
            message: BusMessage | None = self._old[subject][1]
            return message
        return await self._bus.last(stream, subject)

    async def first(self, stream: str, subject: str, *, start: int = 1) -> BusMessage | None:
        """As of the bus; of what was there when the newest message was the old one."""
        found = await self._bus.first(stream, subject, start=start)
        if found is None or not self._is_old(subject):
            return found
        last = self._old[subject][1]
        return found if last is not None and found.sequence <= last.sequence else None

    async def stream_state(self, stream: str) -> StreamState:
        """As of the bus, or old; of as many copies as are wanted."""
        state = replace(await self._bus.stream_state(stream), num_replicas=self._num_replicas)
        return replace(state, last_sequence=self._old[stream][1]) if self._is_old(stream) else state

    async def publish_next(self, action: Action, *, expected_last: int) -> int:
        """As of the bus, or refused for another action than is expected."""
        if self._is_old("publish_next"):
            last = self._old["publish_next"][1]
            raise StaleWriterError(f"wrong last sequence: {last}")
        return await self._bus.publish_next(action, expected_last=expected_last)

    def stored(self, *asked: Any) -> Any:
        """As of the bus, after asking for the newest message here."""
        return Bus.stored(self, *asked)  # type: ignore[arg-type]

    def _is_old(self, what: str) -> bool:
        if what not in self._old:
            return False
        self.num_asked[what] += 1
        return self.num_asked[what] <= self._old[what][0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)
