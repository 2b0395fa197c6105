"""`dynamix export`: a capture or a stored job as CSV, JSON lines or Parquet, all with the same rows."""

import asyncio
import csv
import io
import json
import sys
from pathlib import Path

import pytest
from tests.support import examples
from tests.support.brokers import ConfiguredServer
from tests.support.recordings import DEMO

from dynamix import recording
from dynamix.cli.main import main
from dynamix.cli.services import bus_environment
from dynamix.runtime.bus import Bus


def exported(path: Path, *arguments: str) -> bytes:
    assert main(["export", str(DEMO), "-o", str(path), *arguments]) == 0
    return path.read_bytes()


def test_json_lines_are_the_rows_of_the_table(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in exported(tmp_path / "job.jsonl").splitlines()]
    assert rows == list(recording.load(DEMO).rows())
    assert len(rows) == 120
    assert {row["rank"] for row in rows} == {0, 1, 2, 3}
    assert rows[0]["ruling_window"] is None


def test_csv_gives_back_every_number_exactly(tmp_path: Path) -> None:
    table = recording.load(DEMO)
    rows = list(csv.DictReader(io.StringIO(exported(tmp_path / "job.csv").decode())))
    assert list(rows[0]) == list(table)
    assert [float(row["step_time_s"]) for row in rows] == list(table["step_time_s"])
    assert [int(row["ruling_window"]) if row["ruling_window"] else None for row in rows] == list(table["ruling_window"])


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["export", str(DEMO), "-o", str(tmp_path / "job.parquet")]) == 1
    assert "pip install 'dynamix-batch[tables]'" in capsys.readouterr().err


async def test_a_job_on_the_broker_is_exported_as_it_is_stored(
    server: ConfiguredServer, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bus_environment(server.settings).items():
        monkeypatch.setenv(name, value)
    action = examples.action(3, local_batch_sizes=(150, 150, 150, 62))
    for message in (examples.job(), examples.window(window=3), action):
        await bus.publish(message)
    target = tmp_path / "job.jsonl"
    assert await asyncio.to_thread(main, ["export", "mnist", "-o", str(target)]) == 0
    assert await asyncio.to_thread(main, ["export", "nosuch", "-o", str(target)]) == 1
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(row["rank"], row["window"], row["decided_local_batch_size"]) for row in rows] == [(0, 3, 150), (1, 3, 150)]
