"""Sizes, windows and numbers of an inspection in words."""

import statistics
from collections.abc import Iterable, Sequence

UNKNOWN = "-"
SHOWN_SIZES = 8


def number(value: float | None, form: str = "{:.3g}") -> str:
    """A number, or the sign for none."""
    return UNKNOWN if value is None else form.format(value)


def sizes(values: Sequence[int]) -> str:
    """Sizes in rank order where they are few, otherwise their range."""
    if not values:
        return UNKNOWN
    if len(values) <= SHOWN_SIZES:
        return "/".join(map(str, values))
    return f"{min(values)}...{max(values)} ({statistics.median(values):.0f})"


def ranges(values: Iterable[int]) -> str:
    """Numbers in rising order with runs drawn together: `0, 4-7, 9`."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1][1:] = [value]
        else:
            runs.append([value])
    return ", ".join("-".join(map(str, run)) for run in runs)
