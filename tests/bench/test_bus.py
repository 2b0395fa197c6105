import math
from pathlib import Path

from tests.support.benches import run_bench


def test_it_compares_on_a_real_broker_and_writes_what_it_found(tmp_path: Path) -> None:
    result = run_bench("bus", tmp_path / "result.json", "--pairs", "1", "--messages", "300")
    rows = {row["name"]: row for row in result["comparisons"]}
    assert {name: row["num_messages"] for name, row in rows.items()} == {
        "consume": 600,
        "publish": 300,
        "publish, encoding": 300,
    }
    assert {name: row["target"] for name, row in rows.items()} == {
        "consume": 0.6,
        "publish": 0.6,
        "publish, encoding": None,
    }
    for row in rows.values():
        assert row["num_pairs"] == 1
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("ours_per_s", "raw_per_s", "ratio"))
    assert result["message_bytes"] > 0
