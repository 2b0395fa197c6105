"""How far a capture is: a line that is redrawn on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

TERMINAL_EVERY_S = 0.2
PLAIN_EVERY_S = 5.0


class Progress:
    """`with Progress(job) as progress: progress.show(...)`; on standard error."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._is_terminal = sys.stderr.isatty()
        self._every_s = TERMINAL_EVERY_S if self._is_terminal else PLAIN_EVERY_S
        self._shown_s = time.monotonic()
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            sys.stderr.write("\n")

    def show(self, num_windows: int, num_records: int, num_payload_bytes: int, num_file_bytes: int) -> None:
        """Say it, unless that was done a moment ago."""
        if (now_s := time.monotonic()) - self._shown_s < self._every_s:
            return
        self._shown_s = now_s
        text = (
            f"{self._job}: {num_windows} windows, {num_records} messages, {num_payload_bytes / 1024:.0f} KiB "
            f"({num_file_bytes / 1024:.0f} in the file)"
        )
        if self._is_terminal:
            sys.stderr.write(f"\r{text:{self._width}}")
            self._width = len(text)
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()
