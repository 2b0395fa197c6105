"""Checks of a scenario's keys: each error names key and value, and the limit, or what is known instead."""

import math
import re
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from dynamix.schemas.spelling import suggestion


def check_between(key: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise ValueError when a number is not finite or outside [low, high]."""
    if not (math.isfinite(value) and low <= value <= high):
        limit = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ValueError(f"{key} = {value:g}: it must be {limit}")


def check_positive(key: str, value: float) -> None:
    """Raise ValueError when a number is not finite or not above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{key} = {value:g}: it must be above 0")


def explain_decode_error(message: str, content: Mapping[str, Any], tables: Mapping[str, type[msgspec.Struct]]) -> str:
    """A decoder's message with the value that it complains of, or with the nearest known key.

    Args:
        message: of a `msgspec.ValidationError`.
        content: what was decoded.
        tables: the structs by name of table; the outermost one's is empty.
    """
    text, _, place = message.partition(" - at ")
    path = place.strip("`").removeprefix("$").removeprefix(".")
    if unknown := re.search(r"unknown field `(.*)`", text):
        table = tables[re.sub(r"\[.*", "", path)]
        return f"unknown key {_joined(path, unknown[1])!r}{suggestion(unknown[1], table.__struct_fields__)}"
    if missing := re.search(r"missing required field `(.*)`", text):
        return f"the key {_joined(path, missing[1])!r} is missing"
    if text.startswith("Invalid enum value"):
        text = f"it must be one of {', '.join(map(repr, _choices(path, tables)))}"
    if not path or not text.startswith(("Expected", "it must")):
        return text
    return f"{path} = {_value_at(content, path)!r}: {text[0].lower()}{text[1:]}"


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _choices(path: str, tables: Mapping[str, type[msgspec.Struct]]) -> tuple[str, ...]:
    table, _, key = re.sub(r"\[\d+\]", "", path).rpartition(".")
    return next(get_args(field.type) for field in msgspec.structs.fields(tables[table]) if field.name == key)


def _value_at(content: Any, path: str) -> Any:
    for key, index in re.findall(r"(\w+)|\[(\d+)\]", path):
        content = content[key] if key else content[int(index)]
    return content
