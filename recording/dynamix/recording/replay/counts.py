"""What a replay found: how much was compared, how much differs, and the first difference. Pure."""

from collections.abc import Callable
from typing import Literal

import msgspec

from . import fields
from .fields import FieldPair
from .position import Place

Reason = Literal["other bytes", "only recorded", "only replayed"]

MAX_LISTED = 100
"""Differing windows that are named; the others are counted."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One output that is not as it was recorded."""

    kind: str
    subject: str
    generation: int
    window: int
    reason: Reason
    agrees: bool
    """Only the bytes differ: decisions, or numbers to six digits, are the same."""
    sequence: int | None = None
    """Of the recorded message in its stream."""
    first_byte: int | None = None
    fields: list[FieldPair] = []

    @property
    def place(self) -> Place:
        """The window that it is about."""
        return Place(self.generation, self.window)


class Tally(msgspec.Struct, kw_only=True):
    """Counts over the outputs of one replay."""

    num_compared: int = 0
    num_equal: int = 0
    """Byte for byte."""
    num_agreeing: int = 0
    """Of other bytes, but with the same decision."""
    num_different: int = 0
    """Of other decisions, or missing on one side."""
    num_repeated: int = 0
    """Recorded twice: the same output, published again when the broker had forgotten the first."""
    num_outside: int = 0
    """Not compared: their inputs, or their counterparts, are not in the capture."""
    first: Difference | None = None
    """The first of all."""
    first_disagreeing: Difference | None = None
    """The first that is more than a difference of bytes."""
    differing: list[tuple[int, int, str]] = []
    """Generation, window and kind of the first `MAX_LISTED` that differ."""
    notes: list[str] = []

    def compare(
        self, kind: str, subject: str, where: Callable[[], Place], *, recorded: bytes, replayed: bytes, sequence: int
    ) -> bool:
        """Count a pair; whether its bytes are equal. Where it is is asked only when they are not."""
        self.num_compared += 1
        if recorded == replayed:
            self.num_equal += 1
            return True
        sides = fields.decoded(subject, recorded), fields.decoded(subject, replayed)
        agrees, place = fields.agree(*sides), where()
        self._add(
            Difference(
                kind=kind,
                subject=subject,
                generation=place.generation,
                window=place.window,
                reason="other bytes",
                agrees=agrees,
                sequence=sequence,
                first_byte=fields.first_different_byte(recorded, replayed),
                fields=fields.pairs(*sides) if self._is_first(agrees=agrees) else [],
            )
        )
        return False

    def miss(self, kind: str, subject: str, place: Place, reason: Reason, sequence: int | None = None) -> None:
        """Count an output that only one side has."""
        self._add(
            Difference(
                kind=kind,
                subject=subject,
                generation=place.generation,
                window=place.window,
                reason=reason,
                agrees=False,
                sequence=sequence,
            )
        )

    def note(self, text: str) -> None:
        """Say something about the capture, once."""
        if text not in self.notes:
            self.notes.append(text)

    def _add(self, difference: Difference) -> None:
        self.first = self.first or difference
        if difference.agrees:
            self.num_agreeing += 1
        else:
            self.num_different += 1
            self.first_disagreeing = self.first_disagreeing or difference
        if len(self.differing) < MAX_LISTED:
            self.differing.append((difference.generation, difference.window, difference.kind))

    def _is_first(self, *, agrees: bool) -> bool:
        return self.first is None or (not agrees and self.first_disagreeing is None)
