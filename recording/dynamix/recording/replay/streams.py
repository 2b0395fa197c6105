"""The streams of one job as a replayed arbitrator finds them: what was stored up to here on the tape."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from dynamix.recording.capture import Record
from dynamix.runtime.bus import (
    BusMessage,
    ObjectInfo,
    PermissionDeniedError,
    PublishError,
    Start,
    StoredObject,
    StreamState,
)
from dynamix.runtime.bus.streams.statistics import StatisticsByKind
from dynamix.schemas.codec import MalformedMessageError, decode, encode
from dynamix.schemas.messages import Action, Event, Job, Message
from dynamix.schemas.streams import ACTIONS, FEED, JOBS

from .action_store import Book
from .bus import ReplayedConsumer, done, message_of
from .events import Events
from .plan import Plan
from .player import Tape
from .policies import PolicyFiles
from .position import kind_of
from .recorded import RecordedAction

_READ_ONLY = "a replay only reads policies"


class _Once:
    """A consumer's messages that are all there already."""

    def __init__(self, batch: list[BusMessage]) -> None:
        self._batch = batch

    async def next_batch(self) -> list[BusMessage]:
        batch, self._batch = self._batch, []
        return batch


class StreamsBus:
    """What of `dynamix.runtime.bus.Bus` an arbitrator calls, over a tape.

    States are delivered with their recorded sequences. What is read beside them - specification, receipts, actions - is
    as it stood when they were stored: a batch ends wherever one of those changes.
    """

    def __init__(
        self,
        tape: Tape,
        plan: Plan,
        book: Book,
        *,
        policies: PolicyFiles,
        events: Events,
        change: Callable[[Job], Job] | None = None,
    ) -> None:
        """Begin before the first record.

        Args:
            tape: plays the capture.
            plan: of the same capture.
            book: where actions go.
            policies: files at hand.
            events: where events go.
            change: what becomes of each specification; then the trainer's receipts, which are another's, are hidden.
        """
        self.handled = StatisticsByKind()
        self.job: Job | None = None
        self._tape = tape
        self._book = book
        self._policies = policies
        self._events = events
        self._change = change
        self._late = dict(plan.specifications.values())
        self._generations = set(plan.specifications)
        self._ahead: deque[Record] = deque()
        self._first = plan.feed_first
        self._last = plan.feed_first - 1
        self._states: deque[BusMessage] = deque()
        """Those that a restart may read again."""
        self._newest_state: BusMessage | None = None
        self._receipt: BusMessage | None = None
        self._specification: BusMessage | None = None

    async def skip_to(self, checkpoint: int) -> None:
        """Play up to an action, which is the newest one then."""
        while records := await self._tape.read():
            self._ahead.extend(records)
            while self._ahead:
                record = self._ahead.popleft()
                if record.stream != ACTIONS.name:
                    self._apply(record)
                    continue
                self._book.adopt(_action(record))
                if record.sequence >= checkpoint:
                    return

    def forget(self, watermark: int) -> None:
        """Drop the states that no restart needs again."""
        while self._states and self._states[0].sequence <= watermark:
            self._states.popleft()

    def lose(self, until: int) -> None:
        """Say from now on that FEED begins behind a sequence."""
        self._first = until + 1

    def finish(self) -> None:
        """Account for what is left at the end of the capture."""
        self._events.finish()

    def end(self) -> None:
        """Deliver no more."""
        self._ahead.clear()
        self._tape.end()

    def consume(
        self,
        stream: str,
        subjects: Sequence[str],  # noqa: ARG002 - the arguments of `Bus.consume`; the arbitrator asks for nothing else
        *,
        start: Start,
        durable: str | None = None,  # noqa: ARG002
        max_batch: int = 512,  # noqa: ARG002
    ) -> ReplayedConsumer:
        """States: those stored already from a sequence on, or those to come. Of JOBS the specification."""
        if stream == JOBS.name:
            return ReplayedConsumer(_Once([] if self._specification is None else [self._specification]))
        assert isinstance(start, int), "an arbitrator reads FEED from a sequence"
        if start > self._last:
            return ReplayedConsumer(self)
        return ReplayedConsumer(_Once([state for state in self._states if state.sequence >= start]))

    async def next_batch(self) -> list[BusMessage]:
        """States up to the next change of anything else."""
        batch: list[BusMessage] = []
        while True:
            if not self._ahead:
                if batch:
                    return batch
                self._ahead.extend(await self._tape.read())
                if not self._ahead:
                    return []
            if batch and self._is_barrier(self._ahead[0]):
                return batch
            state = self._apply(self._ahead.popleft())
            if state is not None:
                batch.append(state)

    async def stream_state(self, stream: str) -> StreamState:
        """What the job has of a stream."""
        if stream == FEED.name:
            return StreamState(self._first, self._last, len(self._states))
        return StreamState(1, 1, 1) if self._specification is not None else StreamState(1, 0, 0)

    async def last(self, stream: str, subject: str) -> BusMessage | None:
        """The newest specification, receipt, state or action."""
        if stream == ACTIONS.name:
            return self._book.stored[-1] if self._book.stored else None
        if stream == JOBS.name:
            return self._specification
        return self._receipt if ".applied." in subject else self._newest_state

    async def first(self, stream: str, subject: str, *, start: int = 1) -> BusMessage | None:  # noqa: ARG002 - as `Bus.first`
        """The oldest action that is remembered, at or after a sequence."""
        return next((stored for stored in self._book.stored if stored.sequence >= start), None)

    async def publish_action(self, action: Action, *, expected_last: int) -> int:
        """As `Book.publish`."""
        return self._book.publish(action, expected_last)

    async def publish_soon(self, message: Event) -> asyncio.Future[int]:
        """Take an event."""
        self._events.replayed(message)
        return done(0)

    async def publish_bytes_soon(self, subject: str, payload: bytes, message_id: str) -> asyncio.Future[int]:  # noqa: ARG002 - as `Bus` has them
        """Take a dead letter: they are counted by the service."""
        return done(0)

    async def publish(self, message: Message) -> int:  # noqa: ARG002 - as `Bus` has it
        """Refuse: an arbitrator has nothing else to publish."""
        raise PublishError(_READ_ONLY)

    async def put_object(
        self,
        bucket: str,  # noqa: ARG002 - as `Bus` has them
        name: str,  # noqa: ARG002
        data: bytes,  # noqa: ARG002
        *,
        metadata: Mapping[str, str] | None = None,  # noqa: ARG002
        create_only: bool = False,  # noqa: ARG002
    ) -> ObjectInfo:
        """Refuse, as the broker refuses an arbitrator that stores a policy."""
        raise PermissionDeniedError(_READ_ONLY)

    async def delete_object(self, bucket: str, name: str) -> None:  # noqa: ARG002 - as `Bus` has them
        """Refuse, as `put_object`."""
        raise PermissionDeniedError(_READ_ONLY)

    async def list_objects(self, bucket: str) -> list[ObjectInfo]:  # noqa: ARG002 - there is one
        """The policies at hand. Raises ReplayError when the one that decided here is not."""
        return self._policies.listed(self._book.next_recorded())

    async def get_object(self, bucket: str, name: str, *, max_bytes: int = 0) -> StoredObject:  # noqa: ARG002 - as above
        """A policy's file."""
        return self._policies.get(name)

    def _is_barrier(self, record: Record) -> bool:
        return record.stream != FEED.name or record.sequence in self._late or kind_of(record) in ("applied", "event")

    def _apply(self, record: Record) -> BusMessage | None:
        """Store a record; the message when it is a state."""
        if record.stream == JOBS.name:
            self._specify(record)
        elif record.stream == ACTIONS.name:
            found = _action(record)
            generation = None if found.action is None else found.action.generation
            if generation in self._book.halted or generation not in self._generations:
                self._book.adopt(found)  # nobody here decides for it
        else:
            return self._feed(record)
        return None

    def _feed(self, record: Record) -> BusMessage | None:
        self._last = record.sequence
        if (late := self._late.pop(record.sequence, None)) is not None:
            self._specify(late)
        kind = kind_of(record)
        if kind == "state":
            self._newest_state = message_of(record)
            self._states.append(self._newest_state)
            return self._newest_state
        if kind == "applied" and self._change is None:
            self._receipt = message_of(record)
        if kind == "event":
            self._events.recorded(record, self.job, self._book.history)
        return None

    def _specify(self, record: Record) -> None:
        """Make a record the newest specification, as it is or changed."""
        message = message_of(record)
        try:
            self.job = decode(Job, record.subject, record.payload)
        except MalformedMessageError:
            self._specification = message  # the arbitrator sets it aside
            return
        self._generations.add(self.job.generation)
        if self._change is not None:
            self.job = self._change(self.job)
            message = message._replace(payload=encode(self.job))
        self._specification = message


def _action(record: Record) -> RecordedAction:
    try:
        return RecordedAction(record, decode(Action, record.subject, record.payload))
    except MalformedMessageError:
        return RecordedAction(record, None)
