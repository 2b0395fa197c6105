"""Loggers that need no package: a line of JSON per window, or a row of a CSV file; restarts append to the same file."""

import csv
import io
import json
from pathlib import Path

from dynamix.runtime import output_files
from dynamix.runtime.output_files import FileKind

from .delivery import Metrics

_JSONL = FileKind("a file of metrics as lines of JSON", lambda head: head.startswith(b'{"step": '))
_CSV = FileKind("a CSV file of metrics", lambda head: head.startswith(b"step,"))


class JsonlLogger:
    """Appends each window as a line of JSON to a file, by default `<job>.jsonl` in the working directory."""

    def __init__(self, path: str | Path | None = None) -> None:
        """Append to the file of an earlier start of the job. Raises ValueError when it has other content."""
        self._path = _checked(path, _JSONL)

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Append a line; the file is complete after each."""
        if self._path is None:
            self._path = _checked(f"{metrics['job']}.jsonl", _JSONL)
            assert self._path is not None, "it has a name now"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def close(self) -> None:
        """Do nothing: nothing is buffered."""


class CsvLogger:
    """Appends each window as a row to a CSV file, by default `<job>.csv` in the working directory.

    A metric that was not known before becomes a further column: then the file is written again as a whole.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        """Append to the file of an earlier start of the job. Raises ValueError when it has other content."""
        self._path = _checked(path, _CSV)
        self._columns: list[str] = []

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Append a row; the file is complete after each."""
        if self._path is None:
            self._path = _checked(f"{metrics['job']}.csv", _CSV)
            assert self._path is not None, "it has a name now"
        row = {"step": step, **metrics}
        self._columns = self._columns or _columns_of(self._path)
        if new := [name for name in row if name not in self._columns]:
            self._columns += new
            _widen(self._path, self._columns)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def close(self) -> None:
        """Do nothing: nothing is buffered."""


def _checked(path: str | Path | None, kind: FileKind) -> Path | None:
    if path is None:
        return None
    output_files.check(Path(path), kind, make_parents=True)
    return Path(path)


def _columns_of(path: Path) -> list[str]:
    """The columns of a file that is there already."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return next(csv.reader(file), [])


def _widen(path: Path, columns: list[str]) -> None:
    """Write the file again with these columns; rows that lack one have an empty field."""
    rows: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    content = io.StringIO(newline="")
    writer = csv.DictWriter(content, columns)
    writer.writeheader()
    writer.writerows(rows)
    output_files.write(path, content.getvalue().encode(), make_parents=True)
