import math
import threading
from pathlib import Path

import pytest
from bench.harness.part_timer import CLOCKS, PartTimer
from tests.support.benches import run_bench

PAIRED = ("paired_wall", "paired_cpu", "paired_thread")
PARTS = ("hook: weighing and the rest", "hook: norms", "loader", "sampler", "optimizer hooks", "session.step")


@pytest.mark.slow
def test_it_measures_a_real_job_and_writes_what_it_found(tmp_path: Path) -> None:
    result = run_bench("overhead", tmp_path / "result.json", "--pairs", "4", "--step-ms", "5")
    assert (result["num_ranks"], result["window_steps"], result["num_pairs"]) == (2, 20, 4)
    assert result["num_windows"] >= result["num_actions_applied"] >= 1
    launch = result["launch_part"]
    for clock in ("direct_wall", "direct_cpu"):
        direct, parts = result[clock], result[clock]["training_thread_us"]
        assert {*PARTS, launch} <= set(parts)
        assert sum(parts.values()) == pytest.approx(direct["gross_us"])
        assert direct["ours_us"] == pytest.approx(direct["gross_us"] - parts[launch])
        assert all(math.isfinite(direct[key]) and direct[key] > 0 for key in ("ours_percent", "gross_percent"))
    assert all(math.isfinite(result[pair]["ratio"]) and result[pair]["ratio"] > 0 for pair in PAIRED)
    for pair in PAIRED:
        low, high = result[pair]["interval_percent"]
        assert low <= result[pair]["mean_percent"] <= high
    thread = result["paired_thread"]
    assert result["thread_percent_of_step"] == pytest.approx((thread["on_ms"] - thread["off_ms"]) / 5 * 100)
    assert [target["value"] for target in result["targets"]] == [
        result["thread_percent_of_step"],
        result["paired_wall"]["interval_percent"][1],
    ]


def test_a_part_is_charged_less_the_parts_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setitem(CLOCKS, "cpu", lambda: now[0])
    timer = PartTimer()

    def spend(seconds: float) -> None:
        now[0] += seconds

    inner = timer.timed(spend, "inner")

    def work() -> None:
        spend(1)
        inner(2)
        spend(4)
        inner(8)

    outer = timer.timed(work, "outer")
    outer()
    assert not any(timer.seconds(here=True).values())  # no clock yet
    timer.clock = "cpu"
    outer()
    assert timer.seconds(here=True) == {"cpu": {"outer": 5, "inner": 10}, "wall": {}}
    thread = threading.Thread(target=outer)
    thread.start()
    thread.join()
    assert timer.seconds(here=False) == timer.seconds(here=True)
