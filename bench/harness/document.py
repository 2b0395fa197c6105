"""The place of a table in a document: looked up before a measurement, since one of minutes must not end without it."""

from collections.abc import Sequence
from pathlib import Path

from bench.harness.command import BenchmarkError
from bench.harness.tables import Cells, markdown, replaced

from dynamix.runtime import output_files


class TablePlace:
    """Where a table goes, if anywhere."""

    def __init__(self, document: str | None, begin: str, end: str) -> None:
        """Without a document nothing is written. Raises BenchmarkError for one without a place for the table."""
        self._path = Path(document) if document else None
        self._markers = begin, end
        if self._path is not None:
            try:
                replaced(self._path.read_text(), *self._markers, "")
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise BenchmarkError(f"cannot write the table into {self._path}: {reason}") from error

    def write(self, headings: Cells, cells: Sequence[Cells], *, num_left: int) -> None:
        """Replace the table that is there."""
        if self._path is not None:
            table = markdown(headings, cells, num_left=num_left)
            text = replaced(self._path.read_text(), *self._markers, f"\n{table}\n")
            output_files.write(self._path, text.encode())
