"""Steer a real training job on this machine, and compare it with the same job left alone.

A 4-process gloo job trains a small CNN on Fashion-MNIST to one held-out accuracy, first static, then steered, with the
same seed and global batch. Its ranks are PACED: they sleep to a stated time per sample, one of them three times longer.
"""

import argparse
import asyncio
import time
from pathlib import Path
from typing import Self

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dynamix.cli.errors import CommandError
from dynamix.cli.output import add_json_argument, add_png_argument, write_json, writing
from dynamix.schemas.messages import Report

from .plan import DemoPlan
from .results import Run, Summary

DEFAULTS = DemoPlan()
POLICIES = ("static", "proportional")
PLAIN_WIDTH = 200
PLAIN_LINE_EVERY_S = 5.0
"""Without a terminal, progress is a line at this interval."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--data", metavar="DIR", help="directory with Fashion-MNIST's four idx files")
    add_json_argument(parser)
    add_png_argument(parser, "write the picture (default: %(default)s)", default="dynamix-demo.png")
    parser.add_argument(
        "--policy", default=POLICIES[1], help="what the second run is steered by (default: %(default)s)"
    )
    parser.add_argument("--target", type=float, default=DEFAULTS.target_accuracy, help="held-out accuracy to reach")
    parser.add_argument("--windows", type=int, default=DEFAULTS.min_windows, help="least number of windows per run")
    parser.add_argument("--pace", type=float, default=DEFAULTS.pace_s_per_sample, help="seconds per sample of a rank")
    parser.add_argument("--slowdown", type=float, default=DEFAULTS.slowdown, help="how many times slower rank 3 is")
    parser.add_argument("--seed", type=int, default=DEFAULTS.seed)


def run(namespace: argparse.Namespace) -> int:
    """Run both jobs; 0 when both reached the target."""
    from dynamix.lab.workloads.datasets import fashion_mnist  # noqa: PLC0415 - torch: only once it is needed

    from .figure import draw  # noqa: PLC0415 - matplotlib: the same
    from .runner import TrainingFailedError, run_demo  # noqa: PLC0415 - the same

    console = _console(stderr=True)
    try:
        for split in ("train", "test"):  # now, not after a minute
            fashion_mnist(split, namespace.data)
        plan = _plan(namespace)
        _introduce(console, plan)
        with _View(console, plan) as view:
            runs = asyncio.run(run_demo(plan, (POLICIES[0], namespace.policy), view.say, view.watch))
    except (OSError, ValueError, TimeoutError, TrainingFailedError) as error:
        raise CommandError(str(error)) from error
    with writing(namespace.png):
        draw(runs, plan, Path(namespace.png))
    _table(_console(stderr=namespace.json == "-"), runs)
    console.print(f"Picture: {namespace.png}", highlight=False)
    if namespace.json is not None:
        write_json(Summary(runs=[run.summary for run in runs]), namespace.json)
    return 0 if all(run.summary.time_to_target_s is not None for run in runs) else 1


def _console(*, stderr: bool) -> Console:
    """As wide as the terminal; a file or a pipe has no width to respect."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PLAIN_WIDTH)


def _plan(namespace: argparse.Namespace) -> DemoPlan:
    return DemoPlan(
        data=namespace.data,
        target_accuracy=namespace.target,
        min_windows=namespace.windows,
        max_windows=max(DEFAULTS.max_windows, namespace.windows),
        pace_s_per_sample=namespace.pace,
        slowdown=namespace.slowdown,
        seed=namespace.seed,
    )


def _introduce(console: Console, plan: DemoPlan) -> None:
    console.print(
        f"A {plan.num_ranks}-process gloo job trains a small CNN on Fashion-MNIST to {plan.target_accuracy:.0%} "
        f"held-out accuracy, twice with one seed and one global batch of {plan.local_batch_size * plan.num_ranks}.\n"
        f"Its ranks are [bold]paced[/]: they sleep to {plan.pace_s_per_sample * 1000:g} ms per sample, rank "
        f"{plan.slow_rank} to {plan.slowdown:g} times that. Data, gradients, processes and messages are real.\n"
        "Shown per window: local batch sizes, step time, held-out accuracy, actions applied.",
        highlight=False,
    )


class _View:
    """Progress of the demo: a live bar per run on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, plan: DemoPlan) -> None:
        self._console = console
        self._plan = plan
        self._last_line_s = 0.0
        self._tasks: dict[str, int] = {}
        self._progress = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """One line for the reader."""
        self._console.print(text, highlight=False)

    def watch(self, policy: str, num_applied: int, report: Report) -> None:
        """Show one window."""
        sizes = "/".join(str(row.local_batch_size) for row in report.rows)
        totals = report.totals
        held_out = "" if report.held_out_accuracy is None else f", {report.held_out_accuracy:.1%}"
        status = f"{sizes}, {totals.time_s / totals.num_steps * 1000:.0f} ms{held_out}, {num_applied} applied"
        if policy not in self._tasks:
            self._tasks[policy] = self._progress.add_task(policy, total=self._plan.min_windows, status="")
        done = report.window + 1
        total = max(self._plan.min_windows, done)
        self._progress.update(self._tasks[policy], completed=done, total=total, status=status)  # type: ignore[arg-type] # TaskID is an int
        if not self._console.is_terminal and time.monotonic() - self._last_line_s >= PLAIN_LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            self.say(f"{policy}: window {done}/{total}: {status}")


def _table(console: Console, runs: list[Run]) -> None:
    table = Table(title="Same seed, same global batch, same target", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for heading in ("to target", "final", "median step", "applied", "last sizes"):
        table.add_column(heading, justify="right", no_wrap=True)
    first = runs[0].summary
    for summary in (run.summary for run in runs):
        table.add_row(
            summary.policy,
            _with_ratio(summary.time_to_target_s, first.time_to_target_s, "{:.1f} s"),
            "-" if summary.final_accuracy is None else f"{summary.final_accuracy:.1%}",
            _with_ratio(summary.median_step_time_s * 1000, first.median_step_time_s * 1000, "{:.0f} ms"),
            f"{summary.num_actions_applied} of {summary.num_windows}",
            "/".join(map(str, summary.local_batch_sizes[-1])) if summary.local_batch_sizes else "-",
        )
    console.print(table)


def _with_ratio(value: float | None, first: float | None, form: str) -> str:
    if value is None:
        return "not reached"
    ratio = "" if first is None or value == first else f" ({value / first:.2f}x)"
    return form.format(value) + ratio
