"""Text for people: numbers, tables, a line of progress on standard error; and the signals that end a command."""

import asyncio
import contextlib
import itertools
import math
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Self

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
    if len(values) > width:
        edges = [index * len(values) // width for index in range(width + 1)]
        values = [statistics.fmean(values[first:end]) for first, end in itertools.pairwise(edges)]
    shares = ((min(high, max(low, point)) - low) / (high - low) for point in values)
    return "".join(LEVELS[round(share * (len(LEVELS) - 1))] for share in shares)


def in_columns(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Container[str] = (),
    title: str = "",
    caption: str = "",
) -> str:
    """Columns under their headings, right-aligned but for those in `left`."""
    cells = [tuple(headings), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        aligned = (
            cell.ljust(width) if heading in left else cell.rjust(width)
            for cell, width, heading in zip(row, widths, headings, strict=True)
        )
        lines.append("  ".join(aligned).rstrip())
    return "\n".join([*([title] if title else []), *lines, *([caption] if caption else [])])


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], **how: Any) -> None:
    """Print a table between empty lines."""
    print(f"\n{in_columns(headings, rows, **how)}\n")


TERMINAL_EVERY_S = 0.2
PLAIN_EVERY_S = 5.0


class ProgressLine:
    """A line, redrawn on a terminal and repeated now and then elsewhere: `with ProgressLine() as progress: ...`.

    It is repeated every `plain_every_s` seconds; the last line stays on the terminal.
    """

    def __init__(self, plain_every_s: float = PLAIN_EVERY_S) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._every_s = TERMINAL_EVERY_S if self._is_terminal else plain_every_s
        self._shown_s = time.monotonic()
        self._newest = ""
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def show(self, text: str, *, now: bool = False) -> None:
        """Replace the line, unless that was done a moment ago; `now` replaces it in any case."""
        self._newest = text
        if now or time.monotonic() - self._shown_s >= self._every_s:
            self._write(text)

    def write_line(self, text: str) -> None:
        """Write a line that stays."""
        erased = f"\r{'':{self._width}}\r" if self._width else ""
        self._width = 0
        sys.stderr.write(f"{erased}{text}\n")
        sys.stderr.flush()

    def finish(self) -> None:
        """End the line: what follows begins on a line of its own."""
        if self._width:
            self._write(self._newest)
            sys.stderr.write("\n")
            self._width = 0

    def _write(self, text: str) -> None:
        self._shown_s = time.monotonic()
        if not self._is_terminal:
            self.write_line(text)
            return
        cut = text[: shutil.get_terminal_size().columns - 1]
        sys.stderr.write(f"\r{cut:{self._width}}")
        sys.stderr.flush()
        self._width = len(cut)


@contextlib.contextmanager
def stop_event(*extra: signal.Signals) -> Iterator[asyncio.Event]:
    """An event that SIGINT, SIGTERM and `extra` set while the context lasts; needs a running event loop."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, *extra)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
