"""Each benchmark program runs as a user would start it, with numbers too small to judge anything."""

import os
from pathlib import Path

import pytest
from tests.support.scripts import run_script

ROOT = Path(__file__).parents[2]
CANNOT_RUN = 2
NEEDS_ROOT = ("kernel", "exchange", "cluster")
PROGRAMS = {
    "overhead": ("overhead", "--pairs 2 --step-ms 10"),
    "kernel": ("kernel", "--quick"),
    "bus": (
        "bus",
        "--pairs 1 --messages 200 --seconds 2 --workers 32 --policy rule --recorded-workers 8 --windows 4",
    ),
    "exchange": ("exchange", "sums --ranks 2 --log2-elements 10 --masks steady --rounds 1 --arms all-reduce,rows"),
    "exchange-steps": ("exchange", "steps --ranks 2 --workloads ncf --rounds 1 --steps 1 --arms all-reduce,rows"),
    "coding": ("exchange", "coding --repeats 1"),
    "cluster": ("cluster", "--case slow-down --arm rule --seeds 1 --limit 4 --grid 0.5 --work {work}"),
    "others": ("cluster", "--case equal --arm torch-post-local --seeds 1 --limit 2 --grid 0.5 --work {work}"),
    "virtual": ("virtual", "--scale smoke --jobs 1 --only static --work {work}"),
    "floods": ("faults", "floods --size 0.01 --calm 1 --after 1 --flood jobs --flood small"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_and_writes_its_table(name: str, tmp_path: Path) -> None:
    module, arguments = PROGRAMS[name]
    options = arguments.format(work=tmp_path / "work").split()
    options += ["--csv", str(tmp_path / "csv"), *(["--no-targets"] if module != "virtual" else [])]
    done = run_script(f"bench.{module}", *options, cwd=ROOT)
    if done.returncode == CANNOT_RUN and module in NEEDS_ROOT and (os.geteuid() != 0 or "not found" in done.stderr):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    tables = list((tmp_path / "csv").glob("*.csv"))
    assert tables
    assert all(len(table.read_text().splitlines()) > 1 for table in tables)
