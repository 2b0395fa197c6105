"""Where an arbitrator can begin in a capture: at the job's first state, or at the first action that it can go on from.

An action is a checkpoint: what follows its watermark is all that later decisions need. A capture of what was stored
may begin in the middle of a job, and has only the newest specification.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dynamix.recording.capture import CutOffError, Record, records
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Action, Job
from dynamix.schemas.streams import ACTIONS, FEED, JOBS

from .errors import ReplayError
from .position import identity_of, kind_of, place_of
from .recorded import RecordedAction


class Plan(NamedTuple):
    """What is known before the first message is replayed."""

    feed_first: int
    """FEED sequence of the first message: from here on the capture has all of this job's."""
    checkpoint: RecordedAction | None
    """The action to go on from; `None` to begin with nothing."""
    specifications: dict[int, tuple[int, Record]]
    """Specifications that stand behind the first state of their generation, and that state's FEED sequence."""


def plan(path: Path) -> Plan:
    """Look through a capture, as far as it takes to know.

    Raises:
        ReplayError: when it has no states, no specification of any of them, or no action to compare with.
        CaptureError: as `records`.
    """
    looking = _Looking()
    with contextlib.suppress(CutOffError):  # what is there can be replayed
        looking.through(records(path))
    return looking.plan()


class _Looking:
    def __init__(self) -> None:
        self._feed_first = 0
        self._first_states: dict[int, int] = {}
        """FEED sequence by generation."""
        self._specified: set[int] = set()
        """Generations whose specification came before their first state."""
        self._late: dict[int, Record] = {}
        self._begins = False
        self._checkpoint: RecordedAction | None = None
        self._num_actions = 0

    def through(self, found: Iterable[Record]) -> None:
        for record in found:
            if record.stream == JOBS.name:
                self._specification(record)
            elif record.stream == ACTIONS.name:
                self._action(record)
            elif record.stream == FEED.name:
                self._feed(record)
            if self._begins and self._first_states and self._first_states.keys() <= self._specified:
                return

    def plan(self) -> Plan:
        if not self._first_states:
            raise ReplayError("the capture has no states: there is nothing to decide")
        known = self._specified | self._late.keys()
        if not known & self._first_states.keys():
            raise ReplayError("the capture has no specification of the job: begin the next one while the job runs")
        if not self._begins:
            missing = "no action of the job" if not self._num_actions else "no action whose inputs it has, too"
            raise ReplayError(f"the capture has {missing}: there is nothing to compare with")
        late = {g: (self._first_states[g], record) for g, record in self._late.items() if g in self._first_states}
        return Plan(self._feed_first, self._checkpoint, late)

    def _specification(self, record: Record) -> None:
        try:
            generation = decode(Job, record.subject, record.payload).generation
        except MalformedMessageError:
            return
        if generation not in self._first_states:
            self._specified.add(generation)
        elif generation not in self._specified:
            self._late.setdefault(generation, record)

    def _feed(self, record: Record) -> None:
        self._feed_first = self._feed_first or record.sequence
        place = place_of(identity_of(record)) if kind_of(record) == "state" else None
        if place is not None:
            self._first_states.setdefault(place.generation, record.sequence)

    def _action(self, record: Record) -> None:
        """The first action that is the job's very first, or whose watermark the capture reaches back to."""
        self._num_actions += 1
        if self._begins or not self._feed_first:
            return
        try:
            action = decode(Action, record.subject, record.payload)
        except MalformedMessageError:
            self._begins = self._num_actions == 1  # the replay will say what stands there
            return
        self._begins = self._feed_first <= action.watermark + 1
        if self._begins and (action.previous_hash or self._num_actions > 1):
            self._checkpoint = RecordedAction(record, action)
