"""Pairs what is replayed with what was recorded, by identity: their order differs, their content must not. Pure."""

from typing import NamedTuple

from dynamix.recording.capture import Record

from .counts import Tally
from .position import Place, identity_of, kind_of, place_of

MAX_WAITING = 1 << 16
"""Replayed outputs that wait for their recorded counterparts; of more the oldest count as missing."""
NUM_REMEMBERED = 1 << 16
"""Identities that were paired, to know a repetition."""
EDGE_WINDOWS = 2
"""At the end of a capture the outputs of this many windows may not have been recorded yet."""


class _Waiting(NamedTuple):
    subject: str
    payload: bytes


class Pairing:
    """Takes each output once from both sides; what was replayed comes before what was recorded."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._waiting: dict[str, _Waiting] = {}
        self._paired: dict[str, None] = {}
        self._first: Place | None = None
        self._newest: Place | None = None
        self._last_window = ""
        """Generation and window, as the identities end."""

    def replayed(self, identity: str, subject: str, payload: bytes) -> None:
        """Take an output of the replay."""
        self._waiting[identity] = _Waiting(subject, payload)
        if len(self._waiting) > MAX_WAITING:
            oldest = next(iter(self._waiting))
            self._give_up(oldest, self._waiting.pop(oldest))

    def recorded(self, record: Record) -> None:
        """Take a recorded output, after all that the recorded service had seen by then was replayed."""
        identity = identity_of(record)
        if not self._is_about_a_window(identity):
            self._tally.note(f"{record.subject} at {record.sequence} is no output that a service can have published")
            return
        waiting = self._waiting.pop(identity, None)
        if waiting is None:
            self._unpaired(identity, record)
            return
        self._remember(identity)
        self._tally.compare(
            kind_of(record),
            record.subject,
            lambda: _place(identity),
            recorded=record.payload,
            replayed=waiting.payload,
            sequence=record.sequence,
        )

    def finish(self) -> None:
        """Say of what is left whether it is missing, or before the service's first output, or behind the last."""
        for identity, waiting in self._waiting.items():
            self._give_up(identity, waiting)
        self._waiting.clear()

    def _unpaired(self, identity: str, record: Record) -> None:
        place = _place(identity)
        if identity in self._paired:
            self._tally.num_repeated += 1
        elif place.window > 0 and place == self._first:  # the capture begins in the middle of it, after its input
            self._tally.num_outside += 1
        else:
            self._tally.miss(kind_of(record), record.subject, place, "only recorded", record.sequence)

    def _is_about_a_window(self, identity: str) -> bool:
        """Whether it can be an output; if so its window is remembered as recorded."""
        node, _, _ = identity.rpartition(":")
        window = identity[len(node.rpartition(":")[0]) :]
        if window == self._last_window:  # as nearly always: all nodes send the same window
            return True
        place = place_of(identity)
        if place is None:
            return False
        self._last_window = window
        self._first = min(self._first or place, place)
        self._newest = max(self._newest or place, place)
        return True

    def _give_up(self, identity: str, waiting: _Waiting) -> None:
        place = _place(identity)
        if self._is_at_an_edge(place):
            self._tally.num_outside += 1
        else:
            self._tally.miss(identity.partition(":")[0], waiting.subject, place, "only replayed")

    def _is_at_an_edge(self, place: Place) -> bool:
        if self._first is None or self._newest is None or place <= self._first:
            return True
        return place > self._newest._replace(window=self._newest.window - EDGE_WINDOWS)

    def _remember(self, identity: str) -> None:
        self._paired[identity] = None
        if len(self._paired) > NUM_REMEMBERED:
            self._paired.pop(next(iter(self._paired)))


def _place(identity: str) -> Place:
    place = place_of(identity)
    assert place is not None, "outputs of services are about a window"
    return place
