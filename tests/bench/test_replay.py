from pathlib import Path

from bench.messages.recording import write_recording
from tests.support.benches import run_bench

from dynamix.recording.capture import records
from dynamix.schemas.streams import ACTIONS


def test_it_times_every_service_and_each_replay_is_equal(tmp_path: Path) -> None:
    figures = run_bench("replay", tmp_path / "result.json", "--workers", "32", "--windows", "12")
    assert [(row["into"], row["equal"]) for row in figures["replays"]] == [
        (into, True) for into in ("collector", "reward", "arbitrator", "arbitrator, asked", "(reading alone)")
    ]
    assert all(11 < row["recorded_s"] < 12 and row["times_real_time"] > 0 for row in figures["replays"])


def test_the_recording_has_a_decision_for_each_window(tmp_path: Path) -> None:
    write_recording(tmp_path / "job.dxc", num_workers=16, num_windows=5)
    assert [record.sequence for record in records(tmp_path / "job.dxc") if record.stream == ACTIONS.name] == [
        *range(1, 6)
    ]
