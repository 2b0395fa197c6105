"""Checks of a scenario's keys: each error names key and value, and the limit, or what is known instead."""

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args

import msgspec

from dynamix.schemas.spelling import suggestion


class Limits(NamedTuple):
    """What a number may be: finite, and within these bounds."""

    low: float = 0
    high: float = math.inf
    is_open: bool = False
    """Whether `low` itself is too low."""

    def check(self, key: str, value: float) -> None:
        """Raise ValueError when the number of that key is outside."""
        if math.isfinite(value) and self.low <= value <= self.high and not (self.is_open and value == self.low):
            return
        if not math.isfinite(value):
            raise ValueError(f"{key} = {value:g}: it must be a finite number")
        limit = f"between {self.low:g} and {self.high:g}" if self.high < math.inf else f"at least {self.low:g}"
        raise ValueError(f"{key} = {value:g}: it must be {f'above {self.low:g}' if self.is_open else limit}")


NotNegative = Annotated[float, Limits()]
Positive = Annotated[float, Limits(is_open=True)]
Share = Annotated[float, Limits(0, 1)]
Factor = Annotated[float, Limits(1)]
WholeNumber = Annotated[int, Limits()]
AtLeastOne = Annotated[int, Limits(1)]


@cache
def limits_of(table: type[msgspec.Struct]) -> dict[str, Limits]:
    """The limits that a table's fields are annotated with, by key."""
    return {
        field.name: limits
        for field in msgspec.structs.fields(table)
        for part in (field.type, *get_args(field.type))
        for limits in getattr(part, "__metadata__", ())
    }


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
