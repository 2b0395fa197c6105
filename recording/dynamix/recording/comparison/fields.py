"""Two messages side by side: each field by its name, and whether the messages say the same. Pure."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from dynamix.schemas import codec
from dynamix.schemas.codec import MalformedMessageError
from dynamix.schemas.features import GLOBAL_FEATURES, RANK_FEATURES, unpack_global, unpack_ranks
from dynamix.schemas.messages import Action, Message, State

REL_TOLERANCE = 1e-6
"""Numbers that differ by less are the same number from another processor: float32 has 1.2e-7 between neighbours."""
MAX_SHOWN_BYTES = 16
_DECISION_FIELDS = ("generation", "window", "local_batch_sizes", "split", "gap", "levers")
_PACKED_FIELDS = ("features", "known", "global_features", "global_known")
_ABSENT = "-"


class FieldPair(msgspec.Struct, frozen=True, kw_only=True):
    """One field of two messages."""

    field: str
    recorded: str
    replayed: str
    differs: bool


def field_pairs(recorded: Message | str, replayed: Message | str) -> list[FieldPair]:
    """List all fields of two messages; a text stands for a message that cannot be decoded, and gives the reason."""
    left, right = _values_of(recorded), _values_of(replayed)
    return [
        FieldPair(
            field=path,
            recorded=_shown(left, path),
            replayed=_shown(right, path),
            differs=not _is_same(left.get(path, _ABSENT), right.get(path, _ABSENT)),
        )
        for path in dict.fromkeys([*left, *right])
    ]


def agree(recorded: Message | str, replayed: Message | str) -> bool:
    """Whether two messages of different bytes say the same: equal decisions, or numbers within `REL_TOLERANCE`."""
    if isinstance(recorded, str) or isinstance(replayed, str) or type(recorded) is not type(replayed):
        return False
    if isinstance(recorded, Action):
        return all(getattr(recorded, name) == getattr(replayed, name) for name in _DECISION_FIELDS)
    left, right = _values_of(recorded), _values_of(replayed)
    return left.keys() == right.keys() and all(_is_near(left[path], right[path]) for path in left)


def decode_or_reason(subject: str, payload: bytes) -> Message | str:
    """Decode a message; the reason in words when it cannot be decoded."""
    try:
        return codec.decode_any(subject, payload)
    except MalformedMessageError as error:
        return str(error)


def first_different_byte(recorded: bytes, replayed: bytes) -> int | None:
    """Index of the first different byte, `None` when all are equal; the shorter length when one is a prefix."""
    if recorded == replayed:
        return None
    both = enumerate(zip(recorded, replayed, strict=False))
    return next((at for at, (left, right) in both if left != right), min(len(recorded), len(replayed)))


def _values_of(message: Message | str) -> dict[str, Any]:
    if isinstance(message, str):
        return {"cannot be decoded": message}
    return dict(_state_values(message) if isinstance(message, State) else _values("", message))


def _state_values(state: State) -> Iterator[tuple[str, Any]]:
    """Values of a state by the names of its features; unknown ones are NaN."""
    yield from (item for item in _values("", state) if item[0] not in _PACKED_FIELDS)
    try:
        rows, row = unpack_ranks(state), unpack_global(state)
    except MalformedMessageError as error:
        yield "features", str(error)
        return
    for rank, values in zip(state.ranks, rows.tolist(), strict=True):
        yield from ((f"rank {rank}: {f.name}", value) for f, value in zip(RANK_FEATURES, values, strict=True))
    yield from ((f"job: {f.name}", value) for f, value in zip(GLOBAL_FEATURES, row.tolist(), strict=True))


def _values(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _values(f"{path}.{name}" if path else name, getattr(value, name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _values(f"{path}[{index}]", item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _values(f"{path}.{name}", item)
    else:
        yield path, value


def _is_same(left: Any, right: Any) -> bool:
    both_unknown = isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right)
    return both_unknown or bool(left == right)


def _is_near(left: Any, right: Any) -> bool:
    numbers = isinstance(left, float) and isinstance(right, float)
    return _is_same(left, right) or (numbers and math.isclose(left, right, rel_tol=REL_TOLERANCE, abs_tol=1e-12))


def _shown(values: dict[str, Any], path: str) -> str:
    value = values.get(path, _ABSENT)
    if isinstance(value, bytes):
        more = "..." if len(value) > MAX_SHOWN_BYTES else ""
        return f"{value[:MAX_SHOWN_BYTES].hex()}{more} ({len(value)} bytes)"
    if isinstance(value, float):
        return "unknown" if math.isnan(value) else repr(value)
    return "none" if value is None else str(value)
