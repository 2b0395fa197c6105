"""How far a replay is."""

import sys
import time
from types import TracebackType
from typing import Self

from dynamix.cli.progress_line import ProgressLine
from dynamix.recording.replay import Tape

PLAIN_EVERY_S = 10.0


class Progress:
    """`with Progress(what) as progress: replay(..., on_progress=progress.show)`."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._line = ProgressLine(PLAIN_EVERY_S)
        self._begun_s = time.monotonic()

    def __enter__(self) -> Self:
        sys.stderr.write(f"{self._what}\n")
        sys.stderr.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.wipe()

    def show(self, tape: Tape) -> None:
        """Say it, unless that was done a moment ago."""
        if self._line.is_due():
            ratio = tape.recorded_s / max(1e-9, time.monotonic() - self._begun_s)
            self._line.show(
                f"{tape.num_records} messages, {tape.recorded_s:.0f} s of the recording, {ratio:.1f} times its pace"
            )
