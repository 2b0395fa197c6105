"""The bus of a replayed service: recorded messages in, its own outputs held against the recorded ones.

Of `dynamix.runtime.bus.Bus` it has what the services call; nothing is sent anywhere.
"""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from dynamix.recording.capture import Record
from dynamix.runtime.bus import BusMessage, Start
from dynamix.runtime.bus.streams.statistics import StatisticsByKind
from dynamix.schemas import codec, subjects
from dynamix.schemas.messages import Message
from dynamix.schemas.subjects import ROOT

from .pairing import Pairing
from .player import Tape

_DEAD = f"{ROOT}.dead."


class Batches(Protocol):
    """Where a consumer's messages come from."""

    async def next_batch(self) -> list[BusMessage]:
        """At least one message, or none when there are no more."""


class ReplayedConsumer:
    """`async with bus.consume(...) as consumer: async for batch in consumer: ...`, as the services write it."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[BusMessage]:
        batch = await self._batches.next_batch()
        if not batch:
            raise StopAsyncIteration
        return batch

    async def ack(self, message: BusMessage) -> None:
        """Nothing is ever delivered again."""


class Inputs(Protocol):
    """Chooses from the tape what a service consumes and what it has published."""

    def take(self, record: Record) -> list[BusMessage]:
        """The messages to be delivered now that this record is known."""

    def outputs(self, record: Record) -> list[Record]:
        """What the recorded service has published, to be held against the replay once `take` was handled."""


class ReplayBus:
    """For services whose outputs each follow from one message: the collector and the reward service."""

    def __init__(self, tape: Tape, inputs: Inputs, pairing: Pairing) -> None:
        self.handled = StatisticsByKind()
        self._tape = tape
        self._inputs = inputs
        self._pairing = pairing
        self._outputs: list[Record] = []
        """Recorded ones that were read beside the batch that is being handled."""
        self._acknowledged: asyncio.Future[int] | None = None

    def consume(
        self,
        stream: str,  # noqa: ARG002 - the arguments of `Bus.consume`; which stream and subjects, `inputs` knows
        subjects: Sequence[str],  # noqa: ARG002
        *,
        start: Start,  # noqa: ARG002
        durable: str | None = None,  # noqa: ARG002
        max_batch: int = 512,  # noqa: ARG002
    ) -> ReplayedConsumer:
        """The service's inputs, from the beginning of the capture."""
        return ReplayedConsumer(self)

    async def next_batch(self) -> list[BusMessage]:
        """Inputs until something was read; what they gave was published before, so the outputs beside them are due."""
        self._settle()
        batch: list[BusMessage] = []
        while not batch and (records := await self._tape.read()):
            for record in records:
                self._outputs += self._inputs.outputs(record)
                batch += self._inputs.take(record)
            if not batch:
                self._settle()
        return batch

    async def publish(self, message: Message) -> int:
        """Take an output; returns no sequence, since nothing is stored."""
        payload, identity = codec.encode(message), codec.message_id(message)
        return await (await self.publish_bytes_soon(subjects.subject_of(message), payload, identity))

    async def publish_bytes_soon(self, subject: str, payload: bytes, message_id: str) -> asyncio.Future[int]:
        """Take an output; a dead letter is counted by the service, and is none."""
        if not subject.startswith(_DEAD):
            self._pairing.replayed(message_id, subject, payload)
        if self._acknowledged is None:
            self._acknowledged = done(0)
        return self._acknowledged

    def _settle(self) -> None:
        for record in self._outputs:
            self._pairing.recorded(record)
        self._outputs.clear()


def done(sequence: int) -> asyncio.Future[int]:
    """The acknowledgement of something that needs none."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_result(sequence)
    return future


def message_of(record: Record) -> BusMessage:
    """A record as a consumer delivers it."""
    return BusMessage(record.subject, record.payload, record.sequence, record.timestamp_ns, 0)
