"""The job's subject in ACTIONS for a replayed arbitrator: compare-and-set as on the broker. No I/O.

The recorded log is authoritative. An action that equals the recorded one byte for byte is stored. Another one is a
difference and is refused as the broker would refuse it, since the recorded action is stored there: the arbitrator
adopts the recorded action and continues from it, so that each window is compared by itself.
"""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from dynamix.arbitrator.deciding.signatures import STUCK_WINDOWS
from dynamix.recording.capture import CutOffError, Record, WindowKey, records
from dynamix.recording.comparison import EDGE_WINDOWS, OutputCounts
from dynamix.recording.playback import bus_message_of
from dynamix.runtime.bus import BusError, BusMessage, StaleWriterError
from dynamix.schemas import codec, subjects
from dynamix.schemas.chain import is_intact
from dynamix.schemas.codec import MalformedMessageError
from dynamix.schemas.messages import Action
from dynamix.schemas.streams import ACTIONS


class RecordedAction(NamedTuple):
    """A record of ACTIONS and its content."""

    record: Record
    action: Action | None
    """`None` when the record cannot be decoded."""

    @classmethod
    def of(cls, record: Record) -> Self:
        """Decode a record, if it can be decoded."""
        try:
            return cls(record, codec.decode(Action, record.subject, record.payload))
        except MalformedMessageError:
            return cls(record, None)


class RecordedActions:
    """The actions of a capture one after the other, read ahead of the playback; memory holds one."""

    def __init__(self, path: Path) -> None:
        self._found = (RecordedAction.of(record) for record in _actions(path))
        self._next: RecordedAction | None = None

    def peek(self) -> RecordedAction | None:
        """Return the next action and keep it; `None` at the end."""
        if self._next is None:
            self._next = next(self._found, None)
        return self._next

    def skip(self) -> None:
        """Go on to the action after the next one."""
        self._next = None


def window_of(action: Action) -> WindowKey:
    """The window that an action was decided on."""
    return WindowKey(action.generation, action.window)


def _actions(path: Path) -> Iterator[Record]:
    try:
        yield from (record for record in records(path) if record.stream == ACTIONS.name)
    except CutOffError:
        return  # the player reports it


class RecordedRestartError(BusError):
    """The recorded arbitrator was restarted here and continued after a gap; the replayed one has to do so, too."""


class ReplayedActions:
    """The actions of one job: every one is stored, so that those of another policy follow each other.

    Attributes:
        stored: the newest ones, oldest first; as many as a failure signature needs.
        history: those of `stored` that belong to the newest generation, decoded.
        halted: generations for which the replayed arbitrator refuses to decide.
        lost_until: FEED sequence up to which the restarted arbitrator found no messages; set before a restart.
    """

    def __init__(self, on_stored: Callable[[Action], None]) -> None:
        self.stored: deque[BusMessage] = deque(maxlen=STUCK_WINDOWS)
        self.history: deque[Action] = deque(maxlen=STUCK_WINDOWS)
        self.halted: set[int] = set()
        self.lost_until = 0
        self._on_stored = on_stored

    def publish(self, action: Action, expected_last: int) -> int:
        """Store an action if the newest one has the sequence `expected_last`. Raises StaleWriterError otherwise."""
        last = self.stored[-1].sequence if self.stored else 0
        if last != expected_last:
            raise StaleWriterError(f"{subjects.subject_of(action)} ends at {last}, not at {expected_last}", last)
        return self._publish_next(action, last + 1)

    def adopt(self, found: RecordedAction) -> None:
        """Do nothing: the action was decided by the recorded policy."""

    def next_recorded(self) -> Action | None:
        """None: the recorded policy does not decide here."""
        return None

    def _publish_next(self, action: Action, sequence: int) -> int:
        """Store an action after the newest one; `sequence` is free where the recording has no action."""
        self._store(BusMessage(subjects.subject_of(action), codec.encode(action), sequence, 0, 0), action)
        return sequence

    def _store(self, message: BusMessage, action: Action) -> None:
        self.stored.append(message)
        if self.history and self.history[-1].generation != action.generation:
            self.history.clear()
        self.history.append(action)
        self._on_stored(action)


class ComparedActions(ReplayedActions):
    """Compares each action with the recorded one."""

    def __init__(self, recorded: RecordedActions, counts: OutputCounts, on_stored: Callable[[Action], None]) -> None:
        super().__init__(on_stored)
        self._recorded = recorded
        self._counts = counts
        self._restarted_before = 0
        self._num_after_last = 0

    def _publish_next(self, action: Action, sequence: int) -> int:
        """Compare and store an action.

        Raises:
            StaleWriterError: when another action was recorded; that one is stored.
            RecordedRestartError: when the recorded arbitrator had lost inputs here: restart without them.
        """
        found = self._recorded.peek()
        if found is None:  # the capture was ended before the action was stored
            self._num_after_last += 1
            if self._num_after_last > EDGE_WINDOWS:
                self._counts.count_missing("only replayed", subjects.subject_of(action), window_of(action))
            else:
                self._counts.num_outside += 1
            return super()._publish_next(action, sequence)
        self._restart_where_recorded(action, found)
        self._recorded.skip()
        payload = codec.encode(action)
        if self._is_equal(action, payload, found) or found.action is None or not is_intact(found.record.payload):
            self._store(bus_message_of(found.record)._replace(payload=payload), action)
            return found.record.sequence
        self._store(bus_message_of(found.record), found.action)
        raise StaleWriterError(f"{found.record.subject} has another action", found.record.sequence)

    def adopt(self, found: RecordedAction) -> None:
        """Store a recorded action uncompared; it counts as missing where the arbitrator refused to decide."""
        while (due := self._recorded.peek()) is not None and due.record.sequence <= found.record.sequence:
            self._recorded.skip()
            if due.action is not None and due.action.generation in self.halted:
                self._count_missing(due, due.action)
            else:
                self._counts.num_uncompared += 1
        if found.action is not None:
            self._store(bus_message_of(found.record), found.action)

    def next_recorded(self) -> Action | None:
        """The recorded action that is due next, when it can be decoded."""
        found = self._recorded.peek()
        return None if found is None else found.action

    def finish(self, until: WindowKey | None = None) -> None:
        """Count the recorded actions that the replay did not reach as missing, up to a window."""
        while (found := self._recorded.peek()) is not None:
            self._recorded.skip()
            if found.action is None:
                self._counts.num_uncompared += 1
            elif until is not None and window_of(found.action) > until:
                return
            else:
                self._count_missing(found, found.action)

    def _count_missing(self, found: RecordedAction, action: Action) -> None:
        record = found.record
        self._counts.count_missing("only recorded", record.subject, window_of(action), record.sequence)

    def _is_equal(self, action: Action, payload: bytes, found: RecordedAction) -> bool:
        """Compare with the recorded action; an action for another window has no counterpart."""
        key, record = window_of(action), found.record
        if found.action is not None and key != window_of(found.action):
            self._counts.count_missing("only replayed", record.subject, key)
            self._counts.num_uncompared += 1
            return False
        return self._counts.count_pair(record, key, payload)

    def _restart_where_recorded(self, action: Action, found: RecordedAction) -> None:
        recorded = found.action
        if recorded is None or not recorded.gap or action.gap or recorded.generation != action.generation:
            return
        if self._restarted_before != found.record.sequence:  # once: if that does not help, it is a difference
            self._restarted_before = found.record.sequence
            self.lost_until = recorded.watermark
            raise RecordedRestartError(f"restarted after a gap, before window {recorded.window}")
