"""Answers to a misspelt name: a setting, a flag, a command, an option of a policy. Imports next to nothing."""

import difflib
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one most resembles; `None` where none is near."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1)), None)


def suggestion(name: str, known: Iterable[str]) -> str:
    """`: did you mean ...?` with the nearest known name, otherwise `: known are ...`; to follow the unknown name."""
    names = sorted(known)
    near = nearest(name, names)
    return f": did you mean {near}?" if near is not None else f": known are {', '.join(names) or 'none'}"


def choices(kind: Any) -> str:
    """`use one of ...` for a type that is, or holds, a `Literal`; empty for others."""
    literals = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
    return f"use one of {', '.join(str(each) for part in literals for each in get_args(part))}" if literals else ""
