"""The trainers' side of the bus: reads every action, and what the arbitrator says of itself in its heartbeat."""

import asyncio
import contextlib

from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Action, Live
from dynamix.schemas.streams import ACTIONS


class Watch:
    """Notes when each window's action was stored, and that every job's actions follow on each other.

    Attributes:
        decided: when the action of a job's window was stored, in nanoseconds since the Unix epoch.
        counters: the arbitrator's, from its newest heartbeat.
        action_bytes: of the newest action.
    """

    def __init__(self, bus: Bus, num_expected: int) -> None:
        self.decided: dict[tuple[str, int], int] = {}
        self.counters: dict[str, int] = {}
        self.action_bytes = 0
        self.num_out_of_chain = 0
        """Actions that are not the successor of the one before them; 0 when each window was decided once."""
        self.complete = asyncio.Event()
        self.listening = asyncio.Event()
        self._bus = bus
        self._num_expected = num_expected
        self._hashes: dict[str, bytes] = {}

    async def read_actions(self) -> None:
        """Read actions for ever."""
        wanted = [subjects.of("action", subjects.ANY)]
        async with self._bus.consume(ACTIONS.name, wanted, start="new") as consumer:
            self.listening.set()
            async for batch in consumer:
                for message in batch:
                    self.action_bytes = len(message.payload)
                    self._record_action(decode(Action, message.subject, message.payload), message.timestamp_ns)

    async def read_heartbeats(self) -> None:
        """Keep the arbitrator's newest counters."""
        async with self._bus.subscribe(subjects.of("live", "arbitrator", subjects.ANY)) as beats:
            async for message in beats:
                with contextlib.suppress(MalformedMessageError):  # any client may publish anything here
                    self.counters = decode(Live, message.subject, message.payload).counters

    def _record_action(self, action: Action, stored_ns: int) -> None:
        follows = action.previous_hash == self._hashes.get(action.job, b"")
        if not follows or (action.job, action.window) in self.decided:
            self.num_out_of_chain += 1
        self._hashes[action.job] = action.hash
        self.decided[action.job, action.window] = stored_ns
        if len(self.decided) >= self._num_expected:
            self.complete.set()
