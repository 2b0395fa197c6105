"""The command line of a benchmark: arguments, table, targets, JSON with the environment, figure and exit code."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamix.cli.output import json_path, output_path
from dynamix.lab.experiments.episodes.provenance import versions
from dynamix.runtime import output_files
from dynamix.runtime.output_files import PNG

MISSED, CANNOT_RUN, INTERRUPTED = 1, 2, 130
"""Exit codes: a target is missed; nothing could be measured; Ctrl-C, as shells have it."""

Option = tuple[str, str | float, str]
"""Flag, default value, whose type is that of all values, and meaning."""


class BenchmarkError(RuntimeError):
    """Nothing could be measured; the text says why and what to change."""


class Target(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One figure with its limit; exactly one of the two limits is given. A figure that is unknown or NaN misses it."""

    name: str
    value: float | None
    at_most: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool:
        """Whether the figure keeps the limit."""
        if self.value is None:
            return False
        return self.value <= self.at_most if self.at_most is not None else self.value >= (self.at_least or 0.0)

    def __str__(self) -> str:
        value = "-" if self.value is None else f"{self.value:,.4g}"
        sign, limit = ("<=", self.at_most) if self.at_most is not None else (">=", self.at_least)
        return f"{self.name}: {value}, target {sign} {limit:g} {'met' if self.met else 'MISSED'}"


class BenchmarkReport(NamedTuple):
    """What a benchmark found."""

    figures: dict[str, Any]
    """What JSON knows, and msgspec.Struct."""
    text: str
    """The table for people."""
    targets: Sequence[Target] = ()
    missed: Sequence[str] = ()
    """Other expectations that are not met, in words."""
    draw: Callable[[Path], None] | None = None


def benchmark_parser(
    name: str, description: str | None, *options: Option, has_figure: bool = False
) -> argparse.ArgumentParser:
    """Parser of `python -m bench.NAME` with these options, `--json`, `--no-targets` and, with a figure, `--png`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, default, meaning in options:
        parser.add_argument(option, type=type(default), default=default, help=f"{meaning} (default: %(default)s)")
    parser.add_argument(
        "--json", metavar="FILE", type=json_path(make_parents=True), help="write the figures here; - is standard output"
    )
    parser.add_argument("--no-targets", action="store_true", help="only report: exit code 0 also when one is missed")
    if has_figure:
        parser.add_argument(
            "--png", metavar="FILE", type=output_path(PNG, make_parents=True), help="draw the figure here"
        )
    return parser


def run_benchmark(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[], BenchmarkReport],
    *,
    cannot: Sequence[type[Exception]] = (),
) -> int:
    """Measure, print, write and draw; returns the exit code. Errors in `cannot` are said in a sentence, as ours are."""
    expected: tuple[type[Exception], ...] = (BenchmarkError, *cannot)
    load_before = os.getloadavg()[0]
    try:
        report = measure()
    except expected as error:
        sys.stderr.write(f"{name}: {error}\n")
        return CANNOT_RUN
    except KeyboardInterrupt:
        return INTERRUPTED
    machine = _machine([load_before, os.getloadavg()[0]])
    targets = [{**msgspec.to_builtins(target), "met": target.met} for target in report.targets]
    text = json.dumps({**machine, **report.figures, "targets": targets}, indent=2, default=_json_value)
    if options.json == "-":
        print(text)
    else:
        print("\n".join(["", report.text, "", _text_of(machine), *map(str, report.targets)]))
        if options.json:
            output_files.write(Path(options.json), f"{text}\n".encode(), make_parents=True)
    if report.draw is not None and options.png:
        report.draw(Path(options.png))
    missed = [*(target.name for target in report.targets if not target.met), *report.missed]
    if not missed or options.no_targets:
        return 0
    sys.stderr.write(f"{name}: target missed: {', '.join(missed)}\n")
    return MISSED


def _json_value(value: Any) -> Any:
    """What JSON holds of a msgspec.Struct."""
    return msgspec.to_builtins(value, str_keys=True)


def _machine(load_average: list[float]) -> dict[str, Any]:
    """The machine and the versions that figures depend on."""
    return {
        "kernel": platform.release(),
        "num_processors": os.cpu_count(),
        "load_average": load_average,
        "versions": versions(),
    }


def _text_of(machine: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    load = "load average {:.1f} to {:.1f}".format(*machine["load_average"])
    return f"{machine['num_processors']} processors, kernel {machine['kernel']}, {load}; {packages}"
