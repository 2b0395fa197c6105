"""The recorded actions, read ahead of the tape by a reader of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dynamix.recording.capture import CutOffError, Record, records
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Action
from dynamix.schemas.streams import ACTIONS


class RecordedAction(NamedTuple):
    """A recorded action."""

    record: Record
    action: Action | None
    """`None` when it cannot be decoded."""


class RecordedActions:
    """The actions of a capture, one after the other; memory holds one."""

    def __init__(self, path: Path, *, behind: int = 0) -> None:
        """Begin with the first action behind a sequence."""
        self._found = (_decoded(record) for record in _actions(path) if record.sequence > behind)
        self._next: RecordedAction | None = None

    def peek(self) -> RecordedAction | None:
        """The next one, `None` at the end."""
        if self._next is None:
            self._next = next(self._found, None)
        return self._next

    def take(self) -> RecordedAction:
        """The next one, which is not the next any more."""
        taken = self.peek()
        assert taken is not None, "looked before"
        self._next = None
        return taken


def _actions(path: Path) -> Iterator[Record]:
    try:
        yield from (record for record in records(path) if record.stream == ACTIONS.name)
    except CutOffError:
        return  # the tape says so


def _decoded(record: Record) -> RecordedAction:
    try:
        return RecordedAction(record, decode(Action, record.subject, record.payload))
    except MalformedMessageError:
        return RecordedAction(record, None)
