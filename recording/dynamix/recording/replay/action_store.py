"""The job's subject in ACTIONS as a replayed arbitrator finds it: compare-and-set as the broker has it. No I/O.

The recorded log is the truth. An action that is byte for byte the recorded one is stored in its place. Another one is a
difference, and is refused as the broker would refuse it, since the recorded one stands there: the arbitrator adopts
that and goes on from it, so that each window is judged by itself.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from dynamix.arbitrator.deciding.signatures import STUCK_WINDOWS
from dynamix.runtime.bus import BusMessage, StaleWriterError
from dynamix.schemas import codec, subjects
from dynamix.schemas.chain import is_intact
from dynamix.schemas.messages import Action

from .bus import message_of
from .counts import Tally
from .errors import RecordedRestartError
from .position import Place
from .recorded import RecordedAction, RecordedActions


class Book(Protocol):
    """The actions of one job."""

    stored: deque[BusMessage]
    """The newest ones, oldest first; as many as a signature looks back."""
    history: deque[Action]
    """The same of the newest one's generation."""
    halted: set[int]
    """Generations for which the replayed arbitrator refuses to decide."""

    def publish(self, action: Action, expected_last: int) -> int:
        """Store an action if the newest one has the sequence `expected_last`. Raises StaleWriterError otherwise."""

    def adopt(self, found: RecordedAction) -> None:
        """Store a recorded action that nobody here could have decided."""

    def next_recorded(self) -> Action | None:
        """The recorded action that is due next, when it can be decoded."""


class _Log:
    """What both books do: remember, and compare the sequence."""

    def __init__(self) -> None:
        self.stored: deque[BusMessage] = deque(maxlen=STUCK_WINDOWS)
        self.history: deque[Action] = deque(maxlen=STUCK_WINDOWS)
        self.halted: set[int] = set()

    def _check(self, action: Action, expected_last: int) -> None:
        last = self.stored[-1].sequence if self.stored else 0
        if last != expected_last:
            raise StaleWriterError(f"{subjects.subject_of(action)} ends at {last}, not at {expected_last}", last)

    def _store(self, message: BusMessage, action: Action) -> None:
        self.stored.append(message)
        if self.history and self.history[-1].generation != action.generation:
            self.history.clear()
        self.history.append(action)


class ComparedBook(_Log):
    """Holds each action against the recorded one.

    Attributes:
        lost_until: FEED sequence up to which a restarted arbitrator found nothing any more; set before a restart.
    """

    def __init__(self, recorded: RecordedActions, tally: Tally, on_stored: Callable[[Action], None]) -> None:
        super().__init__()
        self.lost_until = 0
        self._recorded = recorded
        self._tally = tally
        self._on_stored = on_stored
        self._restarted_before = 0

    def publish(self, action: Action, expected_last: int) -> int:
        """As `Book`.

        Raises:
            StaleWriterError: when another action stands there; it is the newest one then.
            RecordedRestartError: when the recorded arbitrator had lost inputs here: ours is to begin anew without them.
        """
        self._check(action, expected_last)
        payload = codec.encode(action)
        found = self._recorded.peek()
        if found is None:
            return self._store_unrecorded(action, payload)
        self._restart_where_recorded(action, found)
        self._recorded.take()
        if self._is_equal(action, payload, found) or found.action is None or not is_intact(found.record.payload):
            self._accept(message_of(found.record)._replace(payload=payload), action)
            return found.record.sequence
        self._accept(message_of(found.record), found.action)
        raise StaleWriterError(f"{found.record.subject} has another action", found.record.sequence)

    def adopt(self, found: RecordedAction) -> None:
        """As `Book`; it is not compared, and is missing where our arbitrator has refused to decide."""
        while (due := self._recorded.peek()) is not None and due.record.sequence <= found.record.sequence:
            self._recorded.take()
            if due.action is not None and due.action.generation in self.halted:
                self._miss(due, due.action)
            else:
                self._tally.num_outside += 1
        if found.action is not None:
            self._accept(message_of(found.record), found.action)

    def next_recorded(self) -> Action | None:
        """As `Book`."""
        found = self._recorded.peek()
        return None if found is None else found.action

    def finish(self, until: Place | None = None) -> None:
        """Count the recorded actions that were not reached, up to a window, as missing: also where ours refused."""
        while (found := self._recorded.peek()) is not None:
            self._recorded.take()
            if found.action is None:
                self._tally.num_outside += 1
                continue
            if until is None or (found.action.generation, found.action.window) <= until:
                self._miss(found, found.action)

    def _miss(self, found: RecordedAction, action: Action) -> None:
        place = Place(action.generation, action.window)
        self._tally.miss("action", found.record.subject, place, "only recorded", found.record.sequence)

    def _is_equal(self, action: Action, payload: bytes, found: RecordedAction) -> bool:
        """Compare with the recorded action, or with none where that is for another window."""
        place = Place(action.generation, action.window)
        record = found.record
        if found.action is not None and place != (found.action.generation, found.action.window):
            self._tally.miss("action", record.subject, place, "only replayed")
            self._tally.num_outside += 1
            return False
        return self._tally.compare(
            "action", record.subject, lambda: place, recorded=record.payload, replayed=payload, sequence=record.sequence
        )

    def _restart_where_recorded(self, action: Action, found: RecordedAction) -> None:
        recorded = found.action
        if recorded is None or not recorded.gap or action.gap or recorded.generation != action.generation:
            return
        if self._restarted_before != found.record.sequence:  # once: if it does not help, it is a difference
            self._restarted_before = found.record.sequence
            self.lost_until = recorded.watermark
            raise RecordedRestartError(f"began anew behind a gap, before window {recorded.window}")

    def _store_unrecorded(self, action: Action, payload: bytes) -> int:
        """The capture was ended before the action was stored."""
        self._tally.num_outside += 1
        sequence = (self.stored[-1].sequence if self.stored else 0) + 1
        self._accept(BusMessage(subjects.subject_of(action), payload, sequence, 0, 0), action)
        return sequence

    def _accept(self, message: BusMessage, action: Action) -> None:
        self._store(message, action)
        self._on_stored(action)


class FreeBook(_Log):
    """Takes what is decided as it comes: another policy's actions follow each other, whatever was recorded."""

    def __init__(self, on_stored: Callable[[Action], None]) -> None:
        super().__init__()
        self._on_stored = on_stored

    def publish(self, action: Action, expected_last: int) -> int:
        """As `Book`."""
        self._check(action, expected_last)
        sequence = expected_last + 1
        self._store(BusMessage(subjects.subject_of(action), codec.encode(action), sequence, 0, 0), action)
        self._on_stored(action)
        return sequence

    def adopt(self, found: RecordedAction) -> None:
        """Nothing: it is another policy's."""

    def next_recorded(self) -> Action | None:
        """None: who decides is not who decided."""
        return None
