"""What to answer to a misspelt name: a setting, a flag, a command, a key of a scenario, an option of a policy."""

import difflib
from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str]) -> str:
    """`: did you mean ...?` with the nearest known name, otherwise `: known are ...`; to follow the unknown name."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {near[0]}?" if near else f": known are {', '.join(names) or 'none'}"
