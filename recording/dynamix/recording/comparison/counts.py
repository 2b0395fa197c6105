"""Result of a comparison: how many outputs were compared, how many differ, and the first difference. Pure."""

from typing import Literal

import msgspec

from dynamix.recording.capture import WindowKey

from . import fields
from .fields import FieldPair

Reason = Literal["other bytes", "only recorded", "only replayed"]

MAX_LISTED = 100
"""Differing windows that are listed; further ones are only counted."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One output that is not as it was recorded."""

    kind: str
    subject: str
    generation: int
    window: int
    reason: Reason
    agrees: bool
    """Only the bytes differ: decisions are the same, or numbers are the same to six digits."""
    sequence: int | None = None
    """Sequence of the recorded message in its stream."""
    first_byte: int | None = None
    fields: list[FieldPair] = []

    @property
    def key(self) -> WindowKey:
        """The window of the output."""
        return WindowKey(self.generation, self.window)


class OutputCounts(msgspec.Struct, kw_only=True):
    """Counts over the outputs of one replay."""

    num_compared: int = 0
    num_equal: int = 0
    """Equal byte for byte."""
    num_agreeing: int = 0
    """Other bytes, but the same decision."""
    num_different: int = 0
    """Another decision, or missing on one side."""
    num_repeated: int = 0
    """Recorded twice: published again after the broker had forgotten the first message id."""
    num_outside: int = 0
    """Not compared: the inputs or the counterparts are not in the capture."""
    first: Difference | None = None
    """The first difference."""
    first_disagreeing: Difference | None = None
    """The first that is more than a difference of bytes."""
    differing: list[tuple[int, int, str]] = []
    """Generation, window and kind of the first `MAX_LISTED` differences."""
    notes: list[str] = []

    def count_pair(
        self, kind: str, subject: str, key: WindowKey, *, recorded: bytes, replayed: bytes, sequence: int
    ) -> bool:
        """Count a recorded and a replayed output; returns whether their bytes are equal."""
        self.num_compared += 1
        if recorded == replayed:
            self.num_equal += 1
            return True
        sides = fields.decode_or_reason(subject, recorded), fields.decode_or_reason(subject, replayed)
        agrees = fields.agree(*sides)
        is_first = self.first is None or (not agrees and self.first_disagreeing is None)
        self._add_difference(
            Difference(
                kind=kind,
                subject=subject,
                generation=key.generation,
                window=key.window,
                reason="other bytes",
                agrees=agrees,
                sequence=sequence,
                first_byte=fields.first_different_byte(recorded, replayed),
                fields=fields.field_pairs(*sides) if is_first else [],
            )
        )
        return False

    def count_missing(
        self, kind: str, subject: str, key: WindowKey, reason: Reason, sequence: int | None = None
    ) -> None:
        """Count an output that is on one side only."""
        generation, window = key
        self._add_difference(
            Difference(
                kind=kind,
                subject=subject,
                generation=generation,
                window=window,
                reason=reason,
                agrees=False,
                sequence=sequence,
            )
        )

    def add_note(self, text: str) -> None:
        """Add a remark about the capture, unless it is there already."""
        if text not in self.notes:
            self.notes.append(text)

    def _add_difference(self, difference: Difference) -> None:
        self.first = self.first or difference
        if difference.agrees:
            self.num_agreeing += 1
        else:
            self.num_different += 1
            self.first_disagreeing = self.first_disagreeing or difference
        if len(self.differing) < MAX_LISTED:
            self.differing.append((difference.generation, difference.window, difference.kind))
