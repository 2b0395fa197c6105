"""Numbers, times and local batch sizes as text for people."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

LEVELS = "▁▂▃▄▅▆▇█"
UNKNOWN = "-"
SHOWN_SIZES = 8
"""The range is shown for more ranks."""


def formatted(value: float | None, form: str = "{:.3g}", factor: float = 1.0) -> str:
    """`value * factor` in a format; a dash when it is not known."""
    return UNKNOWN if value is None else form.format(value * factor)


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits and thousands grouped; a dash when it is not known."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def duration(seconds: float | None) -> str:
    """A time in the unit that suits it."""
    if seconds is None:
        return UNKNOWN
    if seconds == 0:
        return "0 ms"
    for limit, factor, unit, digits in ((1e-3, 1e6, "µs", 0), (1.0, 1e3, "ms", 1), (120.0, 1.0, "s", 1)):
        if seconds < limit:
            return f"{seconds * factor:.{digits}f} {unit}"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def percent(share: float | None) -> str:
    """A share as a percentage."""
    return formatted(share, "{:.1f} %", 100)


def signed_count(value: int) -> str:
    """A whole number with its sign; 0 is a dot, so that what changed stands out."""
    return "·" if value == 0 else f"{value:+d}"


def sizes_text(values: Sequence[int]) -> str:
    """Sizes in rank order where they are few, otherwise their range and median."""
    if not values:
        return UNKNOWN
    if len(values) <= SHOWN_SIZES:
        return "/".join(map(str, values))
    return f"{min(values)}...{max(values)} ({statistics.median(values):.0f})"


def ranges(values: Iterable[int]) -> str:
    """Rising numbers with consecutive ones drawn together: `0, 4-7, 9`."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1][1:] = [value]
        else:
            runs.append([value])
    return ", ".join("-".join(map(str, run)) for run in runs)


def bar(share: float, width: int) -> str:
    """A bar for a share between 0 and 1."""
    cells = round(min(1.0, max(0.0, share)) * width)
    return "█" * cells + "░" * (width - cells)


def curve(values: Sequence[float], width: int) -> str:
    """The values as one line of at most `width` characters, newest last; means where there are more values.

    The scale leaves out the 5 % at either end, so that the first windows of a job do not flatten all the others.
    """
    if not values or width < 1:
        return ""
    ordered = sorted(values)
    cut = len(ordered) // 20
    low, high = ordered[cut], ordered[-1 - cut]
    if high == low:
        return LEVELS[len(LEVELS) // 2 - 1] * min(width, len(values))
    shares = ((min(high, max(low, point)) - low) / (high - low) for point in _resampled(values, width))
    return "".join(LEVELS[round(share * (len(LEVELS) - 1))] for share in shares)


def _resampled(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [index * len(values) // width for index in range(width + 1)]
    return [statistics.fmean(values[low:high]) for low, high in itertools.pairwise(edges)]
