"""The bus of a replayed arbitrator: the streams of one job as they stood at each recorded message."""

import asyncio
from collections import deque
from collections.abc import Callable

from dynamix.recording.capture import Record
from dynamix.recording.capture.record import kind_of
from dynamix.recording.playback import RecordPlayer, ReplayedConsumer, acknowledgement, bus_message_of
from dynamix.runtime.bus import (
    BusMessage,
    PublishError,
    Start,
    StreamState,
)
from dynamix.runtime.bus.streams.statistics import StatisticsByKind
from dynamix.schemas.codec import MalformedMessageError, decode, encode
from dynamix.schemas.messages import Action, Event, Job, JobProfile
from dynamix.schemas.streams import ACTIONS, FEED, JOBS, POLICIES, PROFILES
from dynamix.schemas.subjects import covers

from .action_store import RecordedAction, ReplayedActions
from .events import EventComparer
from .policy_files import ReplayPolicyFiles
from .start import StartPoint


class ArbitratorReplayBus:
    """Delivers states with their recorded sequences, and compares what the arbitrator publishes.

    What an arbitrator reads beside the states - specification, receipts, actions - is as it was when they were stored:
    a batch of states ends wherever one of those changes.
    """

    def __init__(
        self,
        player: RecordPlayer,
        start: StartPoint,
        actions: ReplayedActions,
        *,
        policies: ReplayPolicyFiles,
        events: EventComparer,
        change: Callable[[Job], Job] | None = None,
    ) -> None:
        """Begin before the first record.

        `change` replaces each specification; then the recorded receipts, for other actions, are hidden.
        """
        self.statistics = StatisticsByKind()
        self.job: Job | None = None
        self._policies = policies
        self._player = player
        self._actions = actions
        self._events = events
        self._change = change
        self._late = dict(start.specifications.values())
        self._generations = set(start.specifications)
        self._ahead: deque[Record] = deque()
        self._feed_first = start.feed_first
        self._feed_last = start.feed_first - 1
        self._states: deque[BusMessage] = deque()
        """States that a restarted arbitrator may read again."""
        self._newest_state: BusMessage | None = None
        self._receipt: BusMessage | None = None
        self._specification: BusMessage | None = None

    async def play_to_action(self, sequence: int) -> None:
        """Play up to the action at a sequence, which is then the newest one."""
        while records := await self._player.next_records():
            self._ahead.extend(records)
            while self._ahead:
                record = self._ahead.popleft()
                if record.stream != ACTIONS.name:
                    self._apply(record)
                    continue
                self._actions.adopt(RecordedAction.of(record))
                if record.sequence >= sequence:
                    return

    def forget_states(self, watermark: int) -> None:
        """Drop the states up to a watermark: no restart needs them."""
        while self._states and self._states[0].sequence <= watermark:
            self._states.popleft()

    def lose_feed(self, until: int) -> None:
        """Let FEED begin after a sequence from now on."""
        self._feed_first = until + 1

    def end(self) -> None:
        """Deliver no more states."""
        self._ahead.clear()
        self._player.end()

    def consume(self, stream: str, *_: object, start: Start, **__: object) -> ReplayedConsumer:
        """Consume the specification from JOBS, or states: those already stored from a sequence on, or the next ones."""
        if stream == JOBS.name:
            return ReplayedConsumer.of_stored([] if self._specification is None else [self._specification])
        assert isinstance(start, int), "an arbitrator reads FEED from a sequence"
        if start > self._feed_last:
            return ReplayedConsumer(self._next_batch)
        return ReplayedConsumer.of_stored([state for state in self._states if state.sequence >= start])

    async def _next_batch(self) -> list[BusMessage]:
        """Return the states up to the next change of anything else."""
        batch: list[BusMessage] = []
        while True:
            if not self._ahead:
                if batch:
                    return batch
                self._ahead.extend(await self._player.next_records())
                if not self._ahead:
                    return []
            if batch and self._ends_batch(self._ahead[0]):
                return batch
            state = self._apply(self._ahead.popleft())
            if state is not None:
                batch.append(state)

    async def stream_state(self, stream: str) -> StreamState:
        """Sequences of this job's messages in a stream."""
        if stream == FEED.name:
            return StreamState(self._feed_first, self._feed_last, len(self._states))
        return StreamState(1, 1, 1) if self._specification is not None else StreamState(1, 0, 0)

    async def count_requests(self) -> int:
        """None: there is no broker."""
        return 0

    async def last(self, stream: str, subject: str) -> BusMessage | None:
        """The newest specification, receipt, state or action; the profile that the next recorded action began with."""
        if stream == POLICIES.name:
            found = [one for one in await self._policies.stored() if covers(subject, one.subject)]
            return found[-1] if found else None
        if stream == PROFILES.name:
            recorded = self._actions.next_recorded()
            return BusMessage(subject, recorded.profile, 1, 0, 0) if recorded and recorded.profile else None
        if stream == ACTIONS.name:
            return self._actions.stored[-1] if self._actions.stored else None
        if stream == JOBS.name:
            return self._specification
        return self._receipt if ".applied." in subject else self._newest_state

    async def first(self, stream: str, subject: str, *, start: int = 1) -> BusMessage | None:
        """The oldest stored state, action or policy at or after a sequence."""
        if stream == POLICIES.name:
            policies = await self._policies.stored()
            return next((one for one in policies if one.sequence >= start and covers(subject, one.subject)), None)
        found = self._states if stream == FEED.name else self._actions.stored
        return next((stored for stored in found if stored.sequence >= start), None)

    async def publish_action(self, action: Action, *, expected_last: int) -> int:
        """Store an action, as `ReplayedActions.publish`."""
        return self._actions.publish(action, expected_last)

    async def publish_profile(self, profile: JobProfile, *, expected_last: int) -> int:  # noqa: ARG002 - as `Bus.publish_profile`
        """Refuse: a replay stores nothing of what a run taught."""
        raise PublishError("a replay stores no profile")

    async def publish_soon(self, message: Event) -> asyncio.Future[int]:
        """Add an event to the comparison."""
        self._events.add_replayed(message)
        return acknowledgement(0)

    async def publish_bytes_soon(self, *_: object, **__: object) -> asyncio.Future[int]:
        """Drop a dead letter: the service counts them."""
        return acknowledgement(0)

    async def publish(self, *_: object, **__: object) -> int:
        """Refuse: an arbitrator publishes nothing else."""
        raise PublishError("a replay publishes nothing but actions and events")

    def _ends_batch(self, record: Record) -> bool:
        return record.stream != FEED.name or record.sequence in self._late or kind_of(record) in ("applied", "event")

    def _apply(self, record: Record) -> BusMessage | None:
        """Store a record; returns the message when it is a state."""
        if record.stream == FEED.name:
            return self._apply_feed(record)
        if record.stream == JOBS.name:
            self._specify(record)
        else:
            found = RecordedAction.of(record)
            generation = None if found.action is None else found.action.generation
            if generation in self._actions.halted or generation not in self._generations:
                self._actions.adopt(found)  # the replayed arbitrator does not decide for it
        return None

    def _apply_feed(self, record: Record) -> BusMessage | None:
        self._feed_last = record.sequence
        if (late := self._late.pop(record.sequence, None)) is not None:
            self._specify(late)
        kind = kind_of(record)
        if kind == "state":
            self._newest_state = bus_message_of(record)
            self._states.append(self._newest_state)
            return self._newest_state
        if kind == "applied" and self._change is None:
            self._receipt = bus_message_of(record)
        if kind == "event":
            self._events.add_recorded(record, self.job, self._actions.history)
        return None

    def _specify(self, record: Record) -> None:
        """Make a record the newest specification, changed if requested."""
        self._specification = bus_message_of(record)
        try:
            self.job = decode(Job, record.subject, record.payload)
        except MalformedMessageError:
            return  # the arbitrator sets it aside
        self._generations.add(self.job.generation)
        if self._change is not None:
            self.job = self._change(self.job)
            self._specification = self._specification._replace(payload=encode(self.job))
