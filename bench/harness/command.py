"""The command line of a benchmark: arguments, table, JSON with the environment, figure and exit code."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dynamix.cli.output import json_path, output_path
from dynamix.lab.experiments.episodes.provenance import versions
from dynamix.runtime import output_files
from dynamix.runtime.output_files import PNG

from .targets import Target

MISSED, CANNOT_RUN, INTERRUPTED = 1, 2, 130
"""Exit codes: a target is missed; nothing could be measured; Ctrl-C, as shells have it."""


class BenchmarkError(RuntimeError):
    """Nothing could be measured; the text says why and what to change."""


class BenchmarkReport(NamedTuple):
    """What a benchmark found."""

    figures: dict[str, Any]
    text: str
    """The table for people."""
    targets: Sequence[Target] = ()
    missed: Sequence[str] = ()
    """Other expectations that are not met, in words."""
    draw: Callable[[Path], None] | None = None


def benchmark_parser(name: str, description: str | None, *, has_figure: bool = False) -> argparse.ArgumentParser:
    """Parser of `python -m bench.NAME` with `--json`, `--no-targets` and, where there is a figure, `--png`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    found = environment(load_before)
    if options.json != "-":
        print(f"\n{report.text}\n\n{_environment_text(found)}")
        print("\n".join(map(str, report.targets)))
    targets = [target.as_json() for target in report.targets]
    write_json({**found, **report.figures, "targets": targets}, options.json)
    if report.draw is not None and getattr(options, "png", None):
        report.draw(Path(options.png))
    missed = [*(target.name for target in report.targets if not target.met), *report.missed]
    return exit_code(name, missed, options)


def environment(load_before: float) -> dict[str, Any]:
    """The machine and the versions that figures depend on."""
    return {
        "kernel": platform.release(),
        "num_processors": os.cpu_count(),
        "load_average": [load_before, os.getloadavg()[0]],
        "versions": versions(),
    }


def _environment_text(found: dict[str, Any]) -> str:
    before, after = found["load_average"]
    packages = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"{found['num_processors']} processors, kernel {found['kernel']}, load average {before:.1f} to {after:.1f}; "
        f"{packages}"
    )


def write_json(figures: dict[str, Any], target: str | None) -> None:
    """Write figures to a file, to standard output (`-`), or nowhere."""
    if target == "-":
        print(json.dumps(figures, indent=2))
    elif target:
        output_files.write(Path(target), (json.dumps(figures, indent=2) + "\n").encode(), make_parents=True)


def exit_code(name: str, missed: Sequence[str], options: argparse.Namespace) -> int:
    """`MISSED`, with a line on standard error, when a target was missed and targets count; else 0."""
    if not missed or options.no_targets:
        return 0
    sys.stderr.write(f"{name}: target missed: {', '.join(missed)}\n")
    return MISSED
