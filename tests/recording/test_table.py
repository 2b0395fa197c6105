"""A capture as a table: a row for each rank and window, and what decisions and rewards say about it."""

from pathlib import Path

import pytest
from tests.support import capture_files, examples
from tests.support.recordings import DEMO

from dynamix import recording
from dynamix.recording.capture import CaptureError, read_header
from dynamix.schemas.messages import Message


def captured(path: Path, messages: list[Message]) -> recording.CaptureTable:
    capture_files.write(path, capture_files.records_of(messages))
    return recording.load(path)


def test_a_demo_has_a_row_for_each_of_4_ranks_and_30_windows() -> None:
    table = recording.load(DEMO)
    assert table.num_rows == 120
    assert list(table["window"]) == [window for window in range(30) for _ in range(4)]
    assert list(table["rank"]) == list(range(4)) * 30
    assert set(table["job"]) == {read_header(DEMO).job}
    sizes, totals = list(table["local_batch_size"]), list(table["job_global_batch_size"])
    assert [sum(sizes[at : at + 4]) for at in range(0, 120, 4)] == [totals[at] for at in range(0, 120, 4)]
    terms = [name for name in table if name.startswith("reward_") and name != "reward_formula"]
    assert terms == ["reward_accuracy", "reward_accuracy_rise", "reward_iteration_time", "reward_size"]
    for row in table.rows():
        assert row["reward"] == pytest.approx(sum(row[term] or 0.0 for term in terms))  # type: ignore[misc, arg-type]
        assert row["job_samples_per_s"] == pytest.approx(row["job_num_samples"] / (10 * row["job_step_time_s"]))  # type: ignore[operator]
    assert list(table["ruling_window"])[:12] == [None] * 8 + [0] * 4


def test_what_was_decided_on_a_window_stands_beside_what_ruled_it(tmp_path: Path) -> None:
    table = captured(
        tmp_path / "job.dxc",
        [
            examples.applied(0, 2),
            *(examples.window(window=window) for window in (2, 1, 0)),
            examples.action(2, local_batch_sizes=(100, 60, 50, 40), hash=bytes(32)),
            examples.window(window=0, generation=1),
        ],
    )
    assert list(zip(table["generation"], table["window"], table["rank"], table["ruling_window"], strict=True)) == [
        (0, 0, 0, None), (0, 0, 1, None), (0, 1, 0, None), (0, 1, 1, None), (0, 2, 0, 0), (0, 2, 1, 0),
        (1, 0, 0, None), (1, 0, 1, None),
    ]  # fmt: skip
    assert list(table["decided_local_batch_size"]) == [None] * 4 + [100, 60] + [None] * 2
    assert list(table["decided_global_batch_size"])[4:6] == [250, 250]


def test_where_the_collectors_window_is_missing_a_row_has_what_the_rank_reported(tmp_path: Path) -> None:
    table = captured(tmp_path / "job.dxc", [examples.report(window=0), examples.window(window=1)])
    first, _, third, _ = table.rows()
    assert (first["probe"], first["cpu_time_ratio"], first["local_batch_size"]) == ("none", None, 128)
    assert (first["step_time_s"], first["loss"]) == (pytest.approx(0.1), 0.5)
    assert first["reported_unix_s"] == pytest.approx(1.7e9)
    assert (third["probe"], third["reported_unix_s"]) == ("tcp_info", None)


def test_what_is_good_of_a_cut_off_or_damaged_capture_is_read_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "cut.dxc"
    path.write_bytes(DEMO.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="cut off here"):
        assert recording.load(path).num_rows > 0
    data = bytearray(DEMO.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.warns(UserWarning, match="does not match its checksum"):
        assert recording.load(path).num_rows > 40
    path.write_text("no capture")
    with pytest.raises(CaptureError, match="this is no capture"):
        recording.load(path)
