"""A document's place for a table: found before the measurement that fills it."""

from pathlib import Path

import pytest
from bench.floods.__main__ import main
from bench.harness.command import BenchmarkError
from bench.harness.document import TablePlace

MARKERS = "<!-- begin -->", "<!-- end -->"


def test_a_table_replaces_the_one_that_is_there(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("before\n<!-- begin -->\nold\n<!-- end -->\nafter\n")
    TablePlace(str(document), *MARKERS).write(["a", "b"], [["1", "2"]], num_left=1)
    table = "| a | b |\n|---|---:|\n| 1 | 2 |"
    assert document.read_text() == f"before\n<!-- begin -->\n\n{table}\n\n<!-- end -->\nafter\n"


def test_without_a_document_nothing_is_written(tmp_path: Path) -> None:
    TablePlace(None, *MARKERS).write(["a"], [], num_left=1)
    assert list(tmp_path.iterdir()) == []


def test_a_document_without_a_place_is_refused_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.md"
    empty.touch()
    for name, reason in (("none.md", "No such file or directory"), ("empty.md", "has no place for the table")):
        with pytest.raises(BenchmarkError, match=reason):
            TablePlace(str(tmp_path / name), *MARKERS)
        monkeypatch.setattr("sys.argv", ["floods", "--role", "all", "--document", str(tmp_path / name)])
        assert main() == 2
        assert f"floods: cannot write the table into {tmp_path / name}: " in capsys.readouterr().err
