"""A bystander that counts what a broker acknowledges, and compares it with what is stored."""

import asyncio

from bench.messages.stored import stored_messages

from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.streams import FEED

NUM_WRITERS = 4
PAUSE_S = 0.01
"""A writer waits so long between two messages."""
MESSAGES_PER_SUBJECT = 4000
"""A writer then goes on with another subject: FEED gives the oldest of one away that has more than 4,096."""


class Bystander:
    """Publishes numbered messages as they are acknowledged, and compares what FEED has of them."""

    def __init__(self, bus: Bus, number: int, *, pause_s: float = PAUSE_S) -> None:
        """Begin to publish; `number` is another one for each bystander of a broker."""
        self._bus = bus
        self._pause_s = pause_s
        self._job = f"bystander-{number:08d}"
        self._stop = asyncio.Event()
        self._acknowledged: dict[int, bytes] = {}
        """Payload by sequence."""
        self._num_twice = 0
        self._writers = [asyncio.create_task(self._write(writer)) for writer in range(NUM_WRITERS)]

    @property
    def num_acknowledged(self) -> int:
        """Messages that the broker said it has."""
        return len(self._acknowledged) + self._num_twice

    async def num_lost(self) -> int:
        """Stop, and count the acknowledged messages that are not in FEED as they were."""
        self._stop.set()
        await asyncio.gather(*self._writers)
        found = await stored_messages(self._bus, FEED.name, subjects.of("reward", self._job, subjects.ANY))
        kept = {message.sequence: message.payload for message in found}
        return self._num_twice + sum(kept.get(at) != payload for at, payload in self._acknowledged.items())

    async def _write(self, writer: int) -> None:
        number = 0
        while not self._stop.is_set():
            payload = b"%d/%d" % (writer, number)
            subject = subjects.of("reward", self._job, f"node-{writer}-{number // MESSAGES_PER_SUBJECT}")
            sequence = await self._bus.publish_bytes(subject, payload, f"{subject}:{number}")
            self._num_twice += sequence in self._acknowledged  # a place that was given away twice has lost one
            self._acknowledged[sequence] = payload
            number += 1
            await asyncio.sleep(self._pause_s)
