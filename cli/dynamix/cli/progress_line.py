"""How far a long command is, on standard error: a line that is redrawn on a terminal, a line now and then elsewhere."""

import sys
import time

TERMINAL_EVERY_S = 0.2


class ProgressLine:
    """One line for one command.

    Args:
        plain_every_s: between two lines where standard error is no terminal.
    """

    def __init__(self, plain_every_s: float) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._every_s = TERMINAL_EVERY_S if self._is_terminal else plain_every_s
        self._shown_s = time.monotonic()
        self._width = 0

    def is_due(self) -> bool:
        """Whether the last one was long enough ago; if so, it counts as shown now."""
        now_s = time.monotonic()
        if now_s - self._shown_s < self._every_s:
            return False
        self._shown_s = now_s
        return True

    def show(self, text: str) -> None:
        """Write it, over the last one on a terminal."""
        if self._is_terminal:
            sys.stderr.write(f"\r{text:{self._width}}")
            self._width = len(text)
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def keep(self) -> None:
        """Leave the last one standing: what follows begins on a line of its own."""
        if self._width:
            sys.stderr.write("\n")

    def wipe(self) -> None:
        """Take the last one away."""
        if self._width:
            sys.stderr.write(f"\r{'':{self._width}}\r")
