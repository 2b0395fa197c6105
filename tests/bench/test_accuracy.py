"""The benchmark of accuracies: its arms, and how they are compared."""

import math
from pathlib import Path

import pytest
from bench.accuracy import ARMS, row_of
from tests.support.benches import run_bench


def test_differences_are_paired_by_seed() -> None:
    row = row_of("int8", [80.0, 82.0, 84.0], [80.5, 82.0, 83.5])
    assert (row.accuracy, row.difference, row.num_seeds) == (82.0, 0.0, 3)
    assert row.high == pytest.approx(4.302653 * 0.5 / math.sqrt(3), rel=1e-6), "t with 2 degrees of freedom"
    assert row.low == pytest.approx(-row.high)


@pytest.mark.slow
def test_every_arm_trains_under_every_seed(tmp_path: Path) -> None:
    result = run_bench("accuracy", tmp_path / "result.json", "--seeds", "2", "--epochs", "0.05")
    assert [row["name"] for row in result["rows"]] == list(ARMS)
    for row in result["rows"]:
        assert len(row["accuracies"]) == 2
        assert all(15 < accuracy < 90 for accuracy in row["accuracies"])
    assert result["rows"][0]["difference"] == 0.0
    assert any(row["accuracies"] != result["rows"][0]["accuracies"] for row in result["rows"][1:])
