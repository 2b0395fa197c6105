"""The mark `bpf`: a test that cannot run here says so loudly, and fails where CI demands it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MARKED = """
import pytest

@pytest.mark.bpf
def test_of_the_kernel():
    print("it ran")

def test_of_something_else():
    pass
"""
CONFTEST = "import tests.support.bpf\ntests.support.bpf.missing = lambda: {missing!r}\n"


def marked(directory: Path, missing: str | None, *arguments: str, required: str = "") -> tuple[int, str]:
    """Exit code and output of pytest over `MARKED`, on a machine that lacks `missing`."""
    (directory / "test_marked.py").write_text(MARKED)
    (directory / "conftest.py").write_text(CONFTEST.format(missing=missing))
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = bpf\n")
    plugins = ["-p", "tests.support.bpf", "-p", "xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", *plugins, *arguments, "."],
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # halves the time
            "REQUIRE_BPF_TESTS": required,
            "COLUMNS": "200",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["one process", "xdist"])
def test_what_did_not_run_and_why_stands_at_the_end(tmp_path: Path, processes: tuple[str, ...]) -> None:
    code, shown = marked(tmp_path, "lacking: root", *processes)
    assert code == 0
    assert "NOT TESTED HERE" in shown
    assert "1 bpf test did not run: lacking: root; see docs/operations.md, Kernel probes" in shown
    assert "1 passed, 1 skipped" in shown


def test_where_nothing_lacks_it_runs_and_nothing_is_said(tmp_path: Path) -> None:
    code, shown = marked(tmp_path, None, required="1")
    assert code == 0
    assert "it ran" in shown
    assert "NOT TESTED" not in shown


def test_where_ci_demands_it_a_test_that_cannot_run_fails(tmp_path: Path) -> None:
    code, shown = marked(tmp_path, "lacking: root", required="1")
    assert code == 1
    assert "REQUIRE_BPF_TESTS=1, and yet lacking: root" in shown
    assert "1 passed, 1 error" in shown


def test_the_place_that_it_points_at_exists() -> None:
    assert "\n## Kernel probes\n" in (ROOT / "docs/operations.md").read_text()
