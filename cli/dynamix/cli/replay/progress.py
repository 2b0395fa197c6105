"""How far a replay is: a line that is redrawn on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from dynamix.lab.replay import Tape

TERMINAL_EVERY_S = 0.2
PLAIN_EVERY_S = 10.0


class Progress:
    """`with Progress(what) as progress: replay(..., on_progress=progress.show)`; on standard error."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_terminal = sys.stderr.isatty()
        self._every_s = TERMINAL_EVERY_S if self._is_terminal else PLAIN_EVERY_S
        self._begun_s = self._shown_s = time.monotonic()
        self._width = 0

    def __enter__(self) -> Self:
        sys.stderr.write(f"{self._what}\n")
        sys.stderr.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            sys.stderr.write(f"\r{'':{self._width}}\r")

    def show(self, tape: Tape) -> None:
        """Say it, unless that was done a moment ago."""
        if (now_s := time.monotonic()) - self._shown_s < self._every_s:
            return
        self._shown_s = now_s
        ratio = tape.recorded_s / max(1e-9, now_s - self._begun_s)
        text = f"{tape.num_records} messages, {tape.recorded_s:.0f} s of the recording, {ratio:.1f} times its pace"
        if self._is_terminal:
            sys.stderr.write(f"\r{text:{self._width}}")
            self._width = len(text)
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()
