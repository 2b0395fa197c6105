"""What a long command shows, a line on standard error, and the signals that ask it to finish."""

import asyncio
import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from typing import Self

TERMINAL_EVERY_S = 0.2
PLAIN_EVERY_S = 10.0


class ProgressLine:
    """A line, redrawn on a terminal and repeated now and then elsewhere: `with ProgressLine() as progress: ...`.

    It is repeated every `plain_every_s` seconds; with `keep` the last line stays on the terminal at the end.
    """

    def __init__(self, plain_every_s: float = PLAIN_EVERY_S, *, keep: bool = False) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._every_s = TERMINAL_EVERY_S if self._is_terminal else plain_every_s
        self._keep = keep
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
        self._erase()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def finish(self) -> None:
        """End the line: what follows begins on a line of its own."""
        if self._keep and self._width:
            self._write(self._newest)
            sys.stderr.write("\n")
            self._width = 0
        self._erase()

    def _write(self, text: str) -> None:
        self._shown_s = time.monotonic()
        if not self._is_terminal:
            self.write_line(text)
            return
        cut = text[: shutil.get_terminal_size().columns - 1]
        sys.stderr.write(f"\r{cut:{self._width}}")
        sys.stderr.flush()
        self._width = len(cut)

    def _erase(self) -> None:
        if self._width:
            sys.stderr.write(f"\r{'':{self._width}}\r")
            sys.stderr.flush()
            self._width = 0


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
