"""Answers to a misspelt name: a setting, a flag, a command, an option of a policy. Imports next to nothing."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one most resembles; `None` where none is near."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1)), None)


def suggestion(name: str, known: Iterable[str]) -> str:
    """`: did you mean ...?` with the nearest known name, otherwise `: known are ...`; to follow the unknown name."""
    names = sorted(known)
    near = nearest(name, names)
    return f": did you mean {near}?" if near is not None else f": known are {', '.join(names) or 'none'}"
