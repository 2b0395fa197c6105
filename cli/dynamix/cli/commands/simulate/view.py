"""What is seen of a simulation: where it stands, and in the end a table."""

import time
from collections.abc import Sequence
from typing import Self

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from .simulation import Line, Plan, Simulation

SHOWN_SIZES = 8
PLAIN_LINE_EVERY_S = 10.0
"""Without a terminal, progress is a line at this interval."""
PLAIN_WIDTH = 160


class View:
    """Progress on standard error: one live line on a terminal, a line now and then elsewhere."""

    def __init__(self, plan: Plan, *, windows: bool) -> None:
        self._console = _console(stderr=True)
        self._windows = windows
        self._limit_s = plan.scenario.time_limit_s
        self._status = self._console.status(
            f"{plan.scenario.name} under {plan.label}: loading {plan.scenario.workload}"
        )
        self._last_s = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def show(self, line: Line) -> None:
        """One window is over."""
        text = self._text(line)
        self._status.update(text)
        due = not self._console.is_terminal and time.monotonic() - self._last_s >= PLAIN_LINE_EVERY_S
        if self._windows or due:
            self._last_s = time.monotonic()
            self._console.print(text, highlight=False, markup=False)

    def _text(self, line: Line) -> str:
        accuracy = "" if line.held_out_accuracy is None else f", accuracy {line.held_out_accuracy:.1%}"
        return (
            f"window {line.window}: {line.time_s:.1f} of at most {self._limit_s:g} s, step "
            f"{line.step_time_s * 1000:.1f} ms, batch {line.global_batch_size} = {sizes_text(line.local_batch_sizes)}"
            f"{accuracy}"
        )


def show_summary(simulation: Simulation, *, stderr: bool) -> None:
    """The outcome as a table."""
    table = Table(
        title=f"{simulation.scenario} ({simulation.workload}, {simulation.world_size} workers) under "
        f"{simulation.policy}, seed {simulation.seed}",
        box=SIMPLE,
        show_header=False,
        title_justify="left",
    )
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, value in _rows(simulation):
        table.add_row(name, value)
    _console(stderr=stderr).print(table)


def _rows(simulation: Simulation) -> list[tuple[str, str]]:
    reached = simulation.time_to_target_s
    fixed = simulation.accuracy_at_fixed_time
    last = simulation.windows[-1]
    return [
        (f"time to {simulation.target_accuracy:.1%}", "missed" if reached is None else f"{reached:g} s"),
        (f"accuracy at {simulation.fixed_time_s:g} s", "-" if fixed is None else f"{fixed:.1%}"),
        ("test accuracy at the end", f"{simulation.test_accuracy:.1%}"),
        ("virtual time", f"{simulation.virtual_time_s:.1f} s"),
        ("windows, steps", f"{simulation.num_windows}, {simulation.num_steps}"),
        ("samples", f"{simulation.samples_seen:,}"),
        ("actions applied", str(simulation.num_applied)),
        ("last batch", f"{last.global_batch_size} = {sizes_text(last.local_batch_sizes)}"),
    ]


def sizes_text(sizes: Sequence[int]) -> str:
    """Sizes of few workers each, of many their range."""
    if len(sizes) <= SHOWN_SIZES:
        return "/".join(map(str, sizes))
    return f"{len(sizes)} x {min(sizes)} ... {max(sizes)}"


def _console(*, stderr: bool) -> Console:
    """As wide as the terminal; a file or a pipe has no width to respect."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PLAIN_WIDTH)
