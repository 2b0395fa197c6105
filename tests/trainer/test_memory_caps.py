from pathlib import Path

import pytest

from dynamix.trainer.job.identity import lower_cap, merge_caps, read_caps


def test_a_rank_that_ran_out_of_memory_keeps_four_fifths_of_the_size(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "caps"
    assert lower_cap(path, 3, failed_size=500, minimum=32) == 400
    assert lower_cap(path, 0, failed_size=33, minimum=32) == 32
    assert read_caps(path) == {3: 400, 0: 32}
    assert lower_cap(path, 3, failed_size=400, minimum=32) == 320
    assert read_caps(path) == {3: 320, 0: 32}
    assert sorted(file.name for file in path.parent.iterdir()) == ["caps.rank0.json", "caps.rank3.json"]


def test_a_damaged_file_is_no_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "caps.rank1.json").write_text("{")
    assert read_caps(tmp_path / "caps") == {}
    assert "caps.rank1.json holds no memory cap" in caplog.text


def test_the_lowest_bound_that_any_rank_knows_holds_for_all() -> None:
    known = [{0: 400}, {0: 300, 2: 2000}, {1: 8, 7: 64}]
    assert merge_caps(known, world_size=3, maximum=1024, minimum=32) == (300, 32, 1024)
