"""The recorded actions, read ahead of the playback by a second reader of the capture."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from dynamix.recording.capture import CutOffError, Record, WindowKey, records
from dynamix.schemas.codec import MalformedMessageError, decode
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
            return cls(record, decode(Action, record.subject, record.payload))
        except MalformedMessageError:
            return cls(record, None)


class RecordedActions:
    """The actions of a capture one after the other; memory holds one."""

    def __init__(self, path: Path, *, after: int = 0) -> None:
        """Begin with the first action after a sequence."""
        self._found = (RecordedAction.of(record) for record in _actions(path) if record.sequence > after)
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
