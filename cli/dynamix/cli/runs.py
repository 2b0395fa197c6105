"""What commands that run many episodes share: arguments, progress, and the command line that repeats them."""

import argparse
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dynamix.lab.comparison import LEDGER

from .formatting import bar, duration
from .output import add_option, output_path
from .progress import ProgressLine

if TYPE_CHECKING:
    from dynamix.lab.comparison.runs import ComparisonProgress
    from dynamix.lab.simulator.scenario import Suite

NUM_JOBS = 2
BAR_WIDTH = 20


def add_run_arguments(parser: argparse.ArgumentParser, results: str) -> None:
    """Declare the arguments of a command that runs many episodes."""
    add_option(parser, "--jobs", NUM_JOBS, "worker processes")
    add_data_argument(parser)
    ledger = output_path(LEDGER, make_parents=True)
    what = "the results of all runs, one per line; only such a file is replaced"
    add_option(parser, "--results", results, what, metavar="FILE", type=ledger)
    parser.add_argument(
        "--resume", action="store_true", help="keep the runs that FILE has; without it, an old file becomes FILE.old"
    )


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--data DIR`."""
    what = "directory with the data sets (default: the usual places)"
    parser.add_argument("--data", metavar="DIR", type=Path, help=what)


def command_line(*words: str | int) -> str:
    """A command line that makes the same numbers again, for the result."""
    return shlex.join(["dynamix", *map(str, words)])


def suite_of(arguments: argparse.Namespace, name: str) -> "Suite":
    """The suite of `--scenarios DIR`, else the one called `name`."""
    from dynamix.lab.simulator.scenario import read_suite, suite_named  # noqa: PLC0415 - torch

    return read_suite(Path(arguments.scenarios)) if arguments.scenarios else suite_named(name)


class RunsProgress(ProgressLine):
    """How many runs are done, what is left, and which one was the last."""

    def __init__(self) -> None:
        super().__init__(keep=True)
        self._begun_s = time.monotonic()

    def show_run(self, progress: "ComparisonProgress") -> None:
        """One run is over."""
        done, total = progress.num_done, progress.num_total
        passed = duration(time.monotonic() - self._begun_s)
        left = "" if progress.left_s is None else f", {duration(progress.left_s)} left"
        text = f"{bar(done / total, BAR_WIDTH)} {done}/{total} runs, {passed}{left}: {progress.newest}"
        self.show(text, now=done == total)
