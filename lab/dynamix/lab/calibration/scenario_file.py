"""A scenario as the text of its file: what differs from the format's defaults, in the format's order."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from dynamix.lab.simulator.scenario import Scenario


def scenario_text(scenario: Scenario, comments: tuple[str, ...] = ()) -> str:
    """TOML that `Scenario.read` reads as an equal scenario, but for the name, which is the file's."""
    lines = [f"# {comment}" for comment in comments]
    tables = []
    for key, value in _changed(scenario):
        if isinstance(value, msgspec.Struct):
            tables += [f"\n[{key}]", *_pairs(value)]
        elif isinstance(value, tuple):
            for entry in value:
                tables += [f"\n[[{key}]]", *_pairs(entry)]
        elif key != "name":
            lines.append(f"{key} = {_scalar(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _pairs(struct: msgspec.Struct) -> list[str]:
    return [f"{key} = {_scalar(value)}" for key, value in _changed(struct)]


def _changed(struct: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """Fields whose value is not the default."""
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        if field.required or value != field.default:
            yield field.encode_name, value


def _scalar(value: object) -> str:
    """TOML writes strings, whole numbers and booleans as JSON does, and finite floats as Python."""
    return repr(value) if isinstance(value, float) else json.dumps(value)
