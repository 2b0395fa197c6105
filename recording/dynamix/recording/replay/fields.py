"""Two messages beside each other: each field by its name, and whether they mean the same. Pure."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from dynamix.schemas import codec
from dynamix.schemas.codec import MalformedMessageError
from dynamix.schemas.features import GLOBAL_FEATURES, RANK_FEATURES, unpack_global, unpack_ranks
from dynamix.schemas.messages import Action, Message, State

REL_TOLERANCE = 1e-6
"""Numbers that differ by less are the same number from another processor: float32 has 1.2e-7 between neighbours."""
MAX_SHOWN_BYTES = 16
_DECIDED = ("generation", "window", "local_batch_sizes", "split", "gap", "levers")
_PACKED = ("features", "known", "global_features", "global_known")
_ABSENT = "-"


class FieldPair(msgspec.Struct, frozen=True, kw_only=True):
    """One field of two messages."""

    field: str
    recorded: str
    replayed: str
    differs: bool


class _Leaf(NamedTuple):
    path: str
    value: Any


def pairs(recorded: Message | str, replayed: Message | str) -> list[FieldPair]:
    """All fields of two messages; a text stands for a message that cannot be decoded, and says why."""
    sides = [_leaves_of(recorded), _leaves_of(replayed)]
    return [
        FieldPair(
            field=path,
            recorded=_shown(sides[0], path),
            replayed=_shown(sides[1], path),
            differs=not _same(sides[0].get(path, _ABSENT), sides[1].get(path, _ABSENT)),
        )
        for path in dict.fromkeys([*sides[0], *sides[1]])
    ]


def agree(recorded: Message | str, replayed: Message | str) -> bool:
    """Whether two messages of other bytes say the same: equal decisions, or equal numbers within `REL_TOLERANCE`."""
    if isinstance(recorded, str) or isinstance(replayed, str) or type(recorded) is not type(replayed):
        return False
    if isinstance(recorded, Action):
        return all(getattr(recorded, name) == getattr(replayed, name) for name in _DECIDED)
    left, right = _leaves_of(recorded), _leaves_of(replayed)
    return left.keys() == right.keys() and all(_near(left[path], right[path]) for path in left)


def decoded(subject: str, payload: bytes) -> Message | str:
    """The message, or why there is none."""
    try:
        return codec.decode_any(subject, payload)
    except MalformedMessageError as error:
        return str(error)


def first_different_byte(recorded: bytes, replayed: bytes) -> int | None:
    """Its index, `None` when the bytes are equal; the shorter one's length when it begins the longer one."""
    if recorded == replayed:
        return None
    both = enumerate(zip(recorded, replayed, strict=False))
    return next((at for at, (left, right) in both if left != right), min(len(recorded), len(replayed)))


def _leaves_of(message: Message | str) -> dict[str, Any]:
    if isinstance(message, str):
        return {"cannot be decoded": message}
    return dict(_features(message) if isinstance(message, State) else _leaves("", message))


def _features(state: State) -> Iterator[_Leaf]:
    """A state by the names of its features; unknown ones are NaN."""
    yield from (leaf for leaf in _leaves("", state) if leaf.path not in _PACKED)
    try:
        rows, row = unpack_ranks(state), unpack_global(state)
    except MalformedMessageError as error:
        yield _Leaf("features", str(error))
        return
    for rank, values in zip(state.ranks, rows.tolist(), strict=True):
        yield from (_Leaf(f"rank {rank}: {f.name}", value) for f, value in zip(RANK_FEATURES, values, strict=True))
    yield from (_Leaf(f"job: {f.name}", value) for f, value in zip(GLOBAL_FEATURES, row.tolist(), strict=True))


def _leaves(path: str, value: Any) -> Iterator[_Leaf]:
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _leaves(f"{path}.{name}" if path else name, getattr(value, name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(f"{path}.{name}", item)
    else:
        yield _Leaf(path, value)


def _same(left: Any, right: Any) -> bool:
    both_unknown = isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right)
    return both_unknown or bool(left == right)


def _near(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return _same(left, right) or math.isclose(left, right, rel_tol=REL_TOLERANCE, abs_tol=1e-12)
    return _same(left, right)


def _shown(side: dict[str, Any], path: str) -> str:
    value = side.get(path, _ABSENT)
    if isinstance(value, bytes):
        more = "..." if len(value) > MAX_SHOWN_BYTES else ""
        return f"{value[:MAX_SHOWN_BYTES].hex()}{more} ({len(value)} bytes)"
    if isinstance(value, float):
        return "unknown" if math.isnan(value) else repr(value)
    return "none" if value is None else str(value)
