"""Finds a float that is not a number or not finite, anywhere in a message."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec


def non_finite_fields(message: msgspec.Struct, packed: bytes) -> list[str]:
    """Paths of the fields whose value is NaN or infinite, for example `rows[2].loss_sum`; empty when all is well.

    `packed` is the message in msgpack, where most are cleared by a look at the bytes: 3 us for the window of a node of
    8 ranks, where looking at every field takes thirty times as long. Of 4,096 ranks some bytes are always in doubt:
    their fields are looked at, and those of a few ranks beside them, in an eighth of the time that all take.
    """
    found: list[str] = []
    if not _is_surely_finite(packed):
        _find(message, "", found)
    return found


_TYPES, _EXPONENTS = b"\xca\xcb", b"\x7f\xff"
_SUSPICIOUS = bytes(1 if byte in _TYPES else 2 if byte in _EXPONENTS else 0 for byte in range(256))
_AT_ONCE = 16
"""Items of a sequence whose bytes are looked at together: one rank in two hundred is in doubt by chance."""
_pack = msgspec.msgpack.Encoder().encode


def _is_surely_finite(packed: bytes) -> bool:
    """Whether no float in some msgpack can be anything but finite; false also when in doubt.

    One that is not finite begins with its type (32 or 64 bits), its sign, and an exponent of ones. In doubt are floats
    from 2^1009 on, and bytes of other fields that look like one.
    """
    return b"\1\2" not in packed.translate(_SUSPICIOUS)


def _find(value: Any, path: str, found: list[str]) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            found.append(path)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _find(getattr(value, name), f"{path}.{name}" if path else name, found)
    elif isinstance(value, (tuple, list)):
        for index in _in_doubt(value):
            _find(value[index], f"{path}[{index}]", found)
    elif isinstance(value, dict):
        for key, item in value.items():
            _find(item, f"{path}[{key!r}]", found)


def _in_doubt(items: Sequence[Any]) -> Iterator[int]:
    """Indices of the items that are not cleared by a look at their bytes; of all in a short sequence."""
    for start in range(0, len(items), _AT_ONCE):
        some = items[start : start + _AT_ONCE]
        if len(items) <= _AT_ONCE or not _is_surely_finite(_pack(some)):
            yield from range(start, start + len(some))
