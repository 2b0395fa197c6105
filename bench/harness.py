"""Shared by all benchmark programs: arms in pairs, figures with intervals and targets, tables, the command line.

A program measures its arms in `Rounds`, puts its figures into `Table`s and its limits into `Target`s, and hands a
`Report` to `run`, which prints the tables as Markdown (a page holds them as text), writes each as CSV with `--csv DIR`
(docs/results holds those of record), draws the curves with `--png FILE`, and returns the exit code: 0, 1 when a target
is missed, 2 when nothing can be measured here.
"""

import argparse
import asyncio
import contextlib
import csv
import gc
import importlib.metadata
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import uvloop

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.runtime.settings import BusSettings

ROOT = Path(__file__).parents[1]
MISSED, CANNOT_RUN, INTERRUPTED = 1, 2, 130
T = TypeVar("T")


class BenchmarkError(RuntimeError):
    """Nothing could be measured; the text says why and what to change."""


# --- figures and tables ----------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A figure with its 95 % interval, whose bounds are `None` where one value says nothing of the spread."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        spread = "" if self.low is None or self.high is None else f" [{digits(self.low)}, {digits(self.high)}]"
        return digits(self.value) + spread


Cell = Interval | str | int | float | None


class Table(NamedTuple):
    """Rows as a page shows them and docs/results/NAME.csv holds them."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table of a page, and below it what a reader must know."""
        lines = [self.columns, ["---"] * len(self.columns), *([text(cell) for cell in row] for row in self.rows)]
        return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), *(f"\n{note}" for note in self.notes)])

    def write(self, directory: Path) -> None:
        """Write NAME.csv, where an interval has columns for its bounds."""
        wide = [any(isinstance(row[at], Interval) for row in self.rows) for at in range(len(self.columns))]
        lines: list[list[Cell]] = [[] for _ in range(1 + len(self.rows))]
        for at, name in enumerate(self.columns):
            lines[0] += [name, f"{name} low", f"{name} high"] if wide[at] else [name]
            for line, row in zip(lines[1:], self.rows, strict=True):
                cell = row[at]
                parts = cell if isinstance(cell, Interval) else (cell, None, None)
                line.extend(parts if wide[at] else (cell,))
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"{self.name}.csv").open("w", newline="") as file:
            rows = [[f"{cell:.6g}" if isinstance(cell, float) else cell for cell in line] for line in lines]
            csv.writer(file, lineterminator="\n").writerows(rows)


def text(cell: Cell) -> str:
    """A cell in words."""
    if cell is None:
        return "-"
    return digits(cell) if isinstance(cell, float) else str(cell)


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def mean_of(values: Sequence[float]) -> Interval:
    """Mean of independent numbers with Student's 95 % interval."""
    from scipy.special import stdtrit  # noqa: PLC0415 - a second, which each spawned process would pay, too

    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean)
    half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


class Target(NamedTuple):
    """A figure with its limit; one that is unknown or NaN misses it."""

    name: str
    value: float | None
    at_most: float = math.inf
    at_least: float = -math.inf

    @property
    def met(self) -> bool:
        """Whether the figure keeps the limit."""
        return self.value is not None and self.at_least <= self.value <= self.at_most

    def __str__(self) -> str:
        limit = f"<= {self.at_most:g}" if self.at_most < math.inf else f">= {self.at_least:g}"
        return f"{self.name}: {text(self.value)}, target {limit} {'met' if self.met else 'MISSED'}"


class Panel(NamedTuple):
    """Curves over one pair of axes."""

    title: str
    x: str
    y: str
    curves: dict[str, Sequence[tuple[float, float]]]
    logarithmic: bool = False
    limit: float | None = None


class Report(NamedTuple):
    """The results of a program."""

    tables: Sequence[Table]
    targets: Sequence[Target] = ()
    panels: Sequence[Panel] = ()


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Write a PNG of panels side by side."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - a second, which each spawned process would pay, too

    figure = Figure(figsize=(5.0 * len(panels), 4.0), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label, points in panel.curves.items():
            axes.plot(*np.transpose(points), "o-" if len(points) <= 20 else "-", markersize=3, label=label)
        if panel.logarithmic:
            axes.set(xscale="log", yscale="log")
        if panel.limit is not None:
            axes.axhline(panel.limit, color="black", linewidth=0.8, linestyle="--")
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


# --- the command line ------------------------------------------------------------------------------------------------


def parser(name: str, about: str | None, *options: tuple[str, str | float, str]) -> argparse.ArgumentParser:
    """Parser of `python -m bench.NAME`; an option is its flag, its default, whose type it has, and its meaning."""
    made = argparse.ArgumentParser(
        prog=f"python -m bench.{name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, default, meaning in options:
        made.add_argument(flag, type=type(default), default=default, help=f"{meaning} (default: %(default)s)")
    made.add_argument("--csv", metavar="DIR", type=Path, help="write each table there: docs/results for the record")
    made.add_argument("--png", metavar="FILE", type=Path, help="draw the curves, where there are some")
    made.add_argument("--no-targets", action="store_true", help="exit code 0 also when a target is missed")
    return made


def run(name: str, options: argparse.Namespace, measure: Callable[[], Report], *cannot: type[Exception]) -> int:
    """Measure, print, write and draw; returns the exit code. `cannot`: errors that are reported in one sentence."""
    begun = os.getloadavg()[0]
    expected: tuple[type[Exception], ...] = (BenchmarkError, *cannot)
    try:
        report = measure()
    except expected as error:
        sys.stderr.write(f"bench.{name}: {error}\n")
        return CANNOT_RUN
    except KeyboardInterrupt:
        return INTERRUPTED
    for table in report.tables:
        print(f"\n{table.markdown()}")
        if options.csv:
            table.write(options.csv)
    libraries = ", ".join(
        f"{library} {importlib.metadata.version(library)}" for library in ("torch", "numpy", "nats-py")
    )
    print(
        f"\n{os.cpu_count()} processors, kernel {platform.release()}, load average {begun:.1f} to "
        f"{os.getloadavg()[0]:.1f}; Python {platform.python_version()}, {libraries}"
    )
    print("\n".join(map(str, report.targets)))
    if report.panels and options.png:
        draw(report.panels, options.png)
    missed = [target.name for target in report.targets if not target.met]
    if missed:
        sys.stderr.write(f"bench.{name}: target missed: {', '.join(missed)}\n")
    return MISSED if missed and not options.no_targets else 0


# --- timings in pairs ------------------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """One run of one arm."""

    wall_s: float
    cpu_s: float
    """CPU time of all processes that did the work."""
    num_items: float = 1.0
    """Messages, steps, samples: what the run is counted in."""
    num_bytes: int = 0
    thread_s: float = 0.0
    """CPU time of the thread that timed it."""

    @property
    def per_s(self) -> float:
        """Items per second by the wall clock."""
        return self.num_items / self.wall_s

    @property
    def cpu_us(self) -> float:
        """Microseconds of CPU time per item."""
        return 1e6 * self.cpu_s / self.num_items


class Timed:
    """Times the body of a `with` statement by the wall clock, and in CPU time of this process and of this thread."""

    timing: Timing

    def __init__(self, num_items: float = 1.0) -> None:
        self._num_items = num_items

    def __enter__(self) -> Self:
        self._began = time.perf_counter(), time.process_time(), time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        ended = time.perf_counter(), time.process_time(), time.thread_time()
        wall_s, cpu_s, thread_s = (end - began for began, end in zip(self._began, ended, strict=True))
        self.timing = Timing(wall_s, cpu_s, self._num_items, thread_s=thread_s)


class Rounds:
    """Timings of several arms: `for arm in rounds: rounds.record(run(arm))`.

    A round runs every arm once, in random order; the next one in the reverse order, so that a drift of the machine hits
    all arms alike. Equal seeds give equal orders, also in different processes.

    Args:
        arms: their names.
        num_rounds: those that are kept; `num_warm_up` more come first.
        label: shown with the number of the round; nothing is shown without one.

    Attributes:
        timings: by arm, one timing per round.
    """

    def __init__(self, arms: Sequence[str], num_rounds: int, *, label: str = "", num_warm_up: int = 1) -> None:
        self.timings: dict[str, list[Timing]] = {arm: [] for arm in arms}
        self._numbers = range(-num_warm_up, num_rounds)
        self._label = label
        self._is_kept = False
        self._arm = ""

    def __iter__(self) -> Iterator[str]:
        generator, order = random.Random(0), list[str]()
        for number in self._numbers:
            order = order[::-1] if order and number % 2 else generator.sample([*self.timings], len(self.timings))
            self._is_kept = number >= 0
            for self._arm in order:
                gc.collect()
                yield self._arm
            if self._label and number % 20 == 0:
                sys.stderr.write(f"  {self._label}: round {number + 1} of {self._numbers.stop}\n")

    def record(self, timing: Timing) -> None:
        """Keep the timing of the arm that is being run."""
        if self._is_kept:
            self.timings[self._arm].append(timing)

    def median(self, arm: str, figure: str) -> float:
        """Median of a figure of `Timing`, such as `per_s`."""
        return float(statistics.median(getattr(timing, figure) for timing in self.timings[arm]))

    def ratio(self, figure: str) -> Interval:
        """Median and range of the rounds' ratios of a figure of the first arm to that of the second."""
        pairs = zip(*self.timings.values(), strict=True)
        found = [getattr(ours, figure) / getattr(theirs, figure) for ours, theirs in pairs]
        return Interval(statistics.median(found), min(found), max(found))


# --- brokers ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def connected(settings: BusSettings, name: str) -> AsyncIterator[Bus]:
    """A bus named `name`, closed at the end."""
    bus = await Bus.connect(settings, name=name)
    try:
        yield bus
    finally:
        await bus.close()


@contextlib.asynccontextmanager
async def broker_with_bus(name: str, host: str = "127.0.0.1") -> AsyncIterator[tuple[EmbeddedServer, Bus]]:
    """A broker with its streams, and a bus named `name`."""
    async with EmbeddedServer(host=host) as server, connected(server.settings, name) as bus:
        await provision(bus)
        yield server, bus


def run_with_uvloop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop, as the services run."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
