"""Small pictures of numbers in text: curves, stacked bars, and numbers that a person reads at a glance."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

LEVELS = "▁▂▃▄▅▆▇█"
UNKNOWN = "-"


class Segment(NamedTuple):
    """One part of a stacked bar; the glyph tells it apart where there is no colour."""

    value: float
    glyph: str
    style: str


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
    scale = (len(LEVELS) - 1) / (high - low)
    points = (min(high, max(low, point)) for point in _resampled(values, width))
    return "".join(LEVELS[round((point - low) * scale)] for point in points)


def stacked_bar(segments: Sequence[Segment], full: float, width: int) -> Text:
    """Segments beside each other, `full` being the whole width; a segment that exists is never less than one cell."""
    if full <= 0 or width < 1:
        return Text(" " * max(0, width))
    bar = Text()
    used, total = 0, 0.0
    for segment in segments:
        total += max(0.0, segment.value)
        end = min(width, round(total / full * width))
        cells = max(end - used, 1 if segment.value / full * width >= 0.25 and used < width else 0)
        cells = min(cells, width - used)
        bar.append(segment.glyph * cells, segment.style)
        used += cells
    return bar.append(" " * (width - used))


def fill(share: float, width: int) -> str:
    """A bar for a share between 0 and 1."""
    cells = round(min(1.0, max(0.0, share)) * width)
    return "█" * cells + "░" * (width - cells)


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
    return UNKNOWN if share is None else f"{share * 100:.1f} %"


def signed(value: float, digits: int = 3) -> str:
    """A number with its sign."""
    return f"{value:+.{digits}f}"


def signed_count(value: int) -> str:
    """A whole number with its sign; 0 is a dot, so that what changed stands out."""
    return "·" if value == 0 else f"{value:+d}"


def _resampled(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [index * len(values) // width for index in range(width + 1)]
    return [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
