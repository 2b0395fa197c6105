"""Progress of many episodes: a live bar on a terminal, a line now and then elsewhere."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from dynamix.lab.experiments.comparison.evaluation import ComparisonProgress

PLAIN_WIDTH = 200
PLAIN_LINE_EVERY_S = 10.0
"""Without a terminal, progress is a line at this interval."""


def console_for(*, stderr: bool) -> Console:
    """As wide as the terminal; a file or a pipe has no width to respect."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PLAIN_WIDTH)


class RunsView:
    """Shows how many runs are done, what is left and what came last; on standard error."""

    def __init__(self) -> None:
        self._console = console_for(stderr=True)
        self._last_line_s = -PLAIN_LINE_EVERY_S
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}  {task.fields[newest]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("runs", total=None, left="", newest="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """One line for the reader."""
        self._console.print(text, highlight=False, markup=False)

    def show(self, progress: ComparisonProgress) -> None:
        """One run is over."""
        left = "" if progress.left_s is None else f"{duration(progress.left_s)} left"
        done, total = progress.num_done, progress.num_total
        self._bar.update(self._task, completed=done, total=total, left=left, newest=progress.newest)
        now_s = time.monotonic()
        if not self._console.is_terminal and (now_s - self._last_line_s >= PLAIN_LINE_EVERY_S or done == total):
            self._last_line_s = now_s
            self.say(f"{done}/{total} runs, {left}: {progress.newest}")


def duration(seconds: float) -> str:
    """Minutes and seconds, for example `3:05`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
