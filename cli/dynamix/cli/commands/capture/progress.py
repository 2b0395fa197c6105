"""How far a capture is."""

from types import TracebackType
from typing import Self

from dynamix.cli.progress_line import ProgressLine

PLAIN_EVERY_S = 5.0


class Progress:
    """`with Progress(job) as progress: progress.show(...)`."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._line = ProgressLine(PLAIN_EVERY_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.keep()

    def show(self, num_windows: int, num_records: int, num_payload_bytes: int, num_file_bytes: int) -> None:
        """Say it, unless that was done a moment ago."""
        if self._line.is_due():
            self._line.show(
                f"{self._job}: {num_windows} windows, {num_records} messages, {num_payload_bytes / 1024:.0f} KiB "
                f"({num_file_bytes / 1024:.0f} in the file)"
            )
