from pathlib import Path

import pytest
from bench.finishing import EndedJob, summed
from tests.support.benches import run_bench


def test_an_abort_counts_whatever_torchrun_makes_of_it() -> None:
    well = EndedJob(0, (), 2.0, "")
    aborted = EndedJob(1, ("terminate called", "signal 6"), 4.0, "terminate called without an active exception")
    silent = EndedJob(0, ("terminate called",), 3.0, "terminate called without an active exception")
    assert summed([well, aborted, silent]) == {
        "jobs": 3,
        "ended_otherwise": 2,
        "exit_codes": {"0": 2, "1": 1},
        "signs": {"terminate called": 2, "signal 6": 1},
        "mean_s": 3.0,
    }


@pytest.mark.slow
def test_it_runs_jobs_to_their_end(tmp_path: Path) -> None:
    arguments = ["--bus", "--jobs", "1", "--beside", "1", "--samples", "500", "--load", "1", "--nice", "19"]
    result = run_bench("finishing", tmp_path / "result.json", *arguments)
    assert result["exit_codes"] == {"0": 1}
    assert result["ended_otherwise"] == 0
