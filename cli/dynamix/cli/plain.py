"""Messages as plain data, for JSON and for reading: with the field names that the wire leaves out."""

from collections.abc import Container
from typing import Any

import msgspec

Plain = dict[str, Any]


def plain(message: msgspec.Struct, leave_out: Container[str] = ()) -> Plain:
    """A message by field; digests and packed numbers as hexadecimal text."""
    return {
        name: _plain_value(value) for name, value in msgspec.structs.asdict(message).items() if name not in leave_out
    }


def _plain_value(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    return value
