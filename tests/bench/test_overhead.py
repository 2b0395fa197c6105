import math
import time
from pathlib import Path

import pytest
from bench.stopwatch import Stopwatch
from tests.support.benches import run_bench


def test_it_measures_a_real_job_and_writes_what_it_found(tmp_path: Path) -> None:
    result = run_bench("overhead", tmp_path / "result.json", "--pairs", "10", "--step-ms", "5")
    direct, targets = result["direct"], result["targets"]
    assert (result["num_ranks"], result["window_steps"], result["num_pairs"]) == (2, 20, 10)
    assert result["num_windows"] >= result["num_actions_applied"] >= 1
    parts = direct["training_thread_us"]
    assert direct["launch_part"] in parts
    assert {"hook: weighing", "hook: norms", "loader", "sampler", "optimizer hooks", "session.step"} <= set(parts)
    assert sum(parts.values()) == pytest.approx(direct["gross_us"])
    assert direct["ours_us"] == pytest.approx(direct["gross_us"] - parts[direct["launch_part"]])
    ratios = [direct["ours_percent"], direct["gross_percent"], *(result[pair]["ratio"] for pair in PAIRED)]
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios)
    for pair in PAIRED:
        low, high = result[pair]["interval_percent"]
        assert low <= result[pair]["mean_percent"] <= high
    assert [target["percent"] for target in targets] == [
        direct["ours_percent"],
        result["paired_wall"]["interval_percent"][1],
    ]


PAIRED = ("paired_wall", "paired_cpu")


def test_a_part_is_charged_less_the_parts_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = Stopwatch()

    def spend(seconds: float) -> None:
        now[0] += seconds

    inner = watch.timed(spend, "inner")

    def work() -> None:
        spend(1)
        inner(2)
        spend(4)
        inner(8)

    outer = watch.timed(work, "outer")
    outer()
    assert watch.here == {}  # not running yet
    watch.running = True
    outer()
    assert watch.here == {"outer": 5, "inner": 10}
    assert watch.elsewhere == {}
