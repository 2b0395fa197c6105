"""The benchmark of the page, with numbers too small to judge anything."""

from pathlib import Path

import pytest
from bench.harness.browser import find_browser
from tests.support.benches import run_bench

pytestmark = [
    pytest.mark.skipif(find_browser() is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.slow,
    pytest.mark.timeout(240),
]


def test_server_browser_and_actions_are_measured(tmp_path: Path) -> None:
    found = run_bench("dashboard", tmp_path / "out.json", "--jobs", "2", "--ranks", "8", "--seconds", "6")
    assert (found["num_jobs"], found["num_ranks"]) == (2, 8)
    assert found["num_actions"] >= 1
    assert found["server_cpu_share"] > 0
    assert found["browser_pss_mb"] > found["renderer_pss_mb"] > found["js_heap_mb"] > 0
