import math
from pathlib import Path

from tests.support.benches import run_bench


def test_it_compares_with_nats_py_on_a_real_broker_and_writes_what_it_found(tmp_path: Path) -> None:
    result = run_bench("objects", tmp_path / "result.json", "--pairs", "1", "--sizes", "1")
    assert [(row["name"], row["size_mb"], row["num_pairs"]) for row in result["comparisons"]] == [
        ("put", 1, 1),
        ("get", 1, 1),
    ]
    for row in result["comparisons"]:
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("ours_mb_per_s", "nats_py_mb_per_s", "ratio"))
