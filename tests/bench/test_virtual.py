import math
from pathlib import Path

import pytest
from tests.support.benches import run_bench


@pytest.mark.slow
def test_it_compares_with_plain_training_and_writes_what_it_found(tmp_path: Path) -> None:
    result = run_bench("virtual", tmp_path / "result.json", "--pairs", "1", "--steps", "20")
    rows = {row["name"]: row for row in result["comparisons"]}
    assert {name: row["target"] for name, row in rows.items()} == {
        "every step": 350.0,
        "every 4th": None,
        "steered": 350.0,
    }
    for row in rows.values():
        assert row["num_pairs"] == 1
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("steps_per_s", "steps_per_cpu_s", "ratio"))
