from pathlib import Path

import pytest
from bench.faults import FaultOutcome, summed
from tests.support.benches import run_bench


def test_rounds_are_summed_and_times_are_the_worst() -> None:
    once_counted = {"kills": "30", "worst_takeover_s": "0.25", "decided_exactly_once": "300/300"}
    once = FaultOutcome("kills", True, 3.5, once_counted)
    again_counted = {"kills": "31", "worst_takeover_s": "0.5", "decided_exactly_once": "299/300"}
    again = FaultOutcome("kills", False, 2.0, again_counted)
    assert summed([[once], [again]]) == [
        {
            "name": "kills",
            "passed": 1,
            "total": 2,
            "seconds": 3.5,
            "figures": {"kills": 61, "worst_takeover_s": 0.5, "decided_exactly_once": "599/600"},
        }
    ]


@pytest.mark.slow
def test_it_runs_a_fault_and_writes_what_its_test_counted(tmp_path: Path) -> None:
    arguments = ["--rounds", "1", "--workers", "0", "--faults", "quick", "--", "-k", "reordering"]
    result = run_bench("faults", tmp_path / "result.json", *arguments)
    (row,) = result["faults"]
    assert (row["passed"], row["total"]) == (1, 1)
    assert row["figures"]["moved"] > 0
    assert result["seeds"] == [1]
