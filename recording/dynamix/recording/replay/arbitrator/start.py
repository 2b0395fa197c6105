"""Where an arbitrator can start in a capture: at the job's first state, or after an action whose inputs are there.

An action is a checkpoint: the states after its watermark are all that later decisions need. A capture of what was
stored may begin in the middle of a job, and has only the newest specification.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dynamix.recording.capture import CutOffError, Record, records
from dynamix.recording.capture.record import identity_of, kind_of, window_key_of
from dynamix.recording.playback import ReplayError
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Job
from dynamix.schemas.streams import ACTIONS, FEED, JOBS

from .action_store import RecordedAction


class StartPoint(NamedTuple):
    """What is known of a capture before the first record is played."""

    feed_first: int
    """FEED sequence of the first message; from here on the capture has all messages of the job."""
    checkpoint: RecordedAction | None
    """The action to continue from; `None` to start without one."""
    specifications: dict[int, tuple[int, Record]]
    """By generation: specifications recorded after their first state, and the FEED sequence of that state."""


def find_start(path: Path) -> StartPoint:
    """Search a capture, as far as needed.

    Raises:
        ReplayError: when it has no states, no specification for any of them, or no action to compare with.
        CaptureError: as `records`.
    """
    search = _StartSearch()
    with contextlib.suppress(CutOffError):  # the part before can be replayed
        search.read(records(path))
    return search.result()


class _StartSearch:
    def __init__(self) -> None:
        self._feed_first = 0
        self._first_states: dict[int, int] = {}
        """FEED sequence by generation."""
        self._specified: set[int] = set()
        """Generations whose specification came before their first state."""
        self._late: dict[int, Record] = {}
        self._has_start = False
        self._checkpoint: RecordedAction | None = None
        self._num_actions = 0

    def read(self, found: Iterable[Record]) -> None:
        for record in found:
            if record.stream == JOBS.name:
                self._read_specification(record)
            elif record.stream == ACTIONS.name:
                self._read_action(record)
            elif record.stream == FEED.name:
                self._read_feed(record)
            if self._has_start and self._first_states and self._first_states.keys() <= self._specified:
                return

    def result(self) -> StartPoint:
        if not self._first_states:
            raise ReplayError("the capture has no states: there is nothing to decide")
        if not (self._specified | self._late.keys()) & self._first_states.keys():
            raise ReplayError("the capture has no specification of the job: begin the next one while the job runs")
        if not self._has_start:
            missing = "no action of the job" if not self._num_actions else "no action whose inputs it has, too"
            raise ReplayError(f"the capture has {missing}: there is nothing to compare with")
        late = {g: (self._first_states[g], record) for g, record in self._late.items() if g in self._first_states}
        return StartPoint(self._feed_first, self._checkpoint, late)

    def _read_specification(self, record: Record) -> None:
        try:
            generation = decode(Job, record.subject, record.payload).generation
        except MalformedMessageError:
            return
        if generation not in self._first_states:
            self._specified.add(generation)
        elif generation not in self._specified:
            self._late.setdefault(generation, record)

    def _read_feed(self, record: Record) -> None:
        self._feed_first = self._feed_first or record.sequence
        key = window_key_of(identity_of(record)) if kind_of(record) == "state" else None
        if key is not None:
            self._first_states.setdefault(key.generation, record.sequence)

    def _read_action(self, record: Record) -> None:
        """Find the first action that is the job's very first, or whose watermark the capture reaches back to."""
        self._num_actions += 1
        if self._has_start or not self._feed_first:
            return
        found = RecordedAction.of(record)
        if found.action is None:
            self._has_start = self._num_actions == 1  # the replay compares what is stored there
            return
        self._has_start = self._feed_first <= found.action.watermark + 1
        if self._has_start and (found.action.previous_hash or self._num_actions > 1):
            self._checkpoint = found
