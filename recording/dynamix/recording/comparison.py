"""Comparison of outputs: recorded and replayed messages in, counts and the first difference by field out. Pure.

`agree` defines what counts as the same decision or the same number.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from dynamix.recording.capture import Record, WindowKey, kind_of
from dynamix.schemas import codec
from dynamix.schemas.codec import MalformedMessageError
from dynamix.schemas.features import GLOBAL_FEATURES, RANK_FEATURES, unpack_global, unpack_ranks
from dynamix.schemas.messages import Action, Message, State

Reason = Literal["other bytes", "only recorded", "only replayed"]

MAX_LISTED = 100
"""Differing windows that are listed; further ones are only counted."""
EDGE_WINDOWS = 2
"""Windows at the end of a capture whose outputs may not have been recorded yet."""
REL_TOLERANCE = 1e-6
"""Numbers that differ by less are the same number from another processor: float32 has 1.2e-7 between neighbours."""
MAX_SHOWN_BYTES = 16
_DECISION_FIELDS = ("generation", "window", "allocation", "gap")
_PACKED_FIELDS = ("features", "global_features")
_ABSENT = "-"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One output that differs from the recorded one."""

    kind: str
    subject: str
    generation: int
    window: int
    reason: Reason
    agrees: bool
    """Only the bytes differ: decisions are the same, or numbers are the same to six digits."""
    sequence: int | None = None
    """Sequence of the recorded message in its stream."""
    fields: dict[str, tuple[str, str]] = {}
    """What differs, recorded and replayed, by path."""

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
    num_uncompared: int = 0
    """Recorded outputs that were not compared: what they follow from is not in the capture, or cannot be decoded."""
    num_outside: int = 0
    """Replayed outputs at the edges of the capture, whose counterparts it may have been ended before."""
    differences: list[Difference] = []
    """The first `MAX_LISTED`, and in any case the first that is more than a difference of bytes."""
    notes: list[str] = []

    def count_pair(self, record: Record, key: WindowKey, replayed: bytes) -> bool:
        """Count a recorded output and the payload of the replayed one; returns whether their bytes are equal."""
        self.num_compared += 1
        if record.payload == replayed:
            self.num_equal += 1
            return True
        sides: list[Message | str] = []
        for payload in (record.payload, replayed):
            try:
                sides.append(codec.decode_any(record.subject, payload))
            except MalformedMessageError as error:
                sides.append(str(error))
        fields = {path: (_shown(left), _shown(right)) for path, (left, right) in _differing(*sides).items()}
        where = {"kind": record.kind, "subject": record.subject, "sequence": record.sequence, **key._asdict()}
        self._add_difference(Difference(**where, reason="other bytes", agrees=agree(*sides), fields=fields))
        return False

    def count_missing(self, reason: Reason, subject: str, key: WindowKey, sequence: int | None = None) -> None:
        """Count an output that is on one side only; `sequence` is that of a recorded one."""
        where = {"kind": kind_of(subject), "subject": subject, **key._asdict()}
        self._add_difference(Difference(**where, reason=reason, agrees=False, sequence=sequence))

    def add_note(self, text: str) -> None:
        """Add a remark about the capture, unless it is there already."""
        if text not in self.notes:
            self.notes.append(text)

    def _add_difference(self, difference: Difference) -> None:
        self.num_agreeing += difference.agrees
        self.num_different += not difference.agrees
        is_first = self.num_different == 1 and not difference.agrees
        if is_first or len(self.differences) < MAX_LISTED:
            self.differences.append(difference)


def agree(recorded: Message | str, replayed: Message | str) -> bool:
    """Whether two messages of different bytes agree: equal decisions, or numbers within `REL_TOLERANCE`."""
    if isinstance(recorded, str) or isinstance(replayed, str) or type(recorded) is not type(replayed):
        return False
    if isinstance(recorded, Action):
        return all(getattr(recorded, name) == getattr(replayed, name) for name in _DECISION_FIELDS)
    return all(
        isinstance(left, float)
        and isinstance(right, float)
        and math.isclose(left, right, rel_tol=REL_TOLERANCE, abs_tol=1e-12)
        for left, right in _differing(recorded, replayed).values()
    )


def _differing(recorded: Message | str, replayed: Message | str) -> dict[str, tuple[Any, Any]]:
    """The fields that differ; a text stands for a message that cannot be decoded, and gives the reason."""
    left, right = _values_of(recorded), _values_of(replayed)
    pairs = {path: (left.get(path, _ABSENT), right.get(path, _ABSENT)) for path in [*left, *right]}
    # a number is unknown on both sides where neither equals itself
    return {path: (one, two) for path, (one, two) in pairs.items() if one != two and (one == one or two == two)}  # noqa: PLR0124


def _values_of(message: Message | str) -> dict[str, Any]:
    """Values of a message by path; those of a state by the names of its features, NaN where unknown."""
    if isinstance(message, str):
        return {"cannot be decoded": message}
    found = dict(_values("", message))
    if isinstance(message, State):
        found = {path: value for path, value in found.items() if path not in _PACKED_FIELDS}
        try:
            for rank, row in zip(message.ranks, unpack_ranks(message).tolist(), strict=True):
                found |= {f"rank {rank}: {name}": value for name, value in zip(RANK_FEATURES, row, strict=True)}
            row = unpack_global(message).tolist()
            found |= {f"job: {name}": value for name, value in zip(GLOBAL_FEATURES, row, strict=True)}
        except MalformedMessageError as error:
            found["features"] = str(error)
    return found


def _values(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        value = {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _values(f"{path}.{name}" if path else name, item)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _values(f"{path}[{index}]", item)
    else:
        yield path, value


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        more = "..." if len(value) > MAX_SHOWN_BYTES else ""
        return f"{value[:MAX_SHOWN_BYTES].hex()}{more} ({len(value)} bytes)"
    if isinstance(value, float):
        return "unknown" if math.isnan(value) else repr(value)
    return "none" if value is None else str(value)
