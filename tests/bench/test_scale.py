import argparse
import math
import os
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from bench.messages.load import Load, job_of, parcel
from bench.scale.curve import BEGIN, END, exponent, markdown_table, too_steep, write
from bench.scale.generator import SentWindow
from bench.scale.latency import achieved_rate, kept_rate, latency_of, lateness_ms, percentile
from bench.scale.plan import WARM_UP_WINDOWS, ScalePlan
from bench.scale.result import MEMORY_RUN_S, ScaleResult, missed, targets_of
from bench.scale.shards import ShardResult, plan_of
from bench.scale.watch import ProcessSample, cpu_seconds, rss_growth_bytes, sample_of, wait_seconds
from tests.support.benches import ROOT, run_bench

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import State

MS = 10**6
RESULT = ScaleResult(
    workers=10_000,
    jobs=1,
    nodes=1250,
    rate=1.0,
    seconds=300.0,
    policy="static",
    background=False,
    spread_s=0.0,
    decision_latency_p50_ms=40.0,
    decision_latency_p95_ms=60.0,
    decision_latency_p99_ms=70.0,
    decision_latency_max_ms=80.0,
    windows_expected=305,
    windows_decided=305,
    actions_out_of_chain=0,
    late_states=0,
    max_lag_windows=1,
    ingest_vs_raw=1.2,
    ingest_per_s=100_000.0,
    raw_per_s=83_000.0,
    ingest_cpu_us=8.0,
    raw_cpu_us=11.0,
    cpu_percent=4.0,
    cpu_us_per_rank_window=4.0,
    rss_mb=60.0,
    rss_growth_mb=1.0,
    max_loop_lag_ms=30,
    broker_cpu_percent=3.0,
    broker_rss_mb=100.0,
    generator_rate=1.0,
    generator_lateness_ms=1.0,
    publishing_ms=40.0,
    messages_per_s=1250.0,
    bytes_per_s=1.3e6,
    state_bytes=1032,
    action_bytes=30_000,
    publish_retries=0,
    load_average=1.0,
    wait_ms_per_window=2.5,
)


def changed(**changes: object) -> ScaleResult:
    return msgspec.structs.replace(RESULT, **changes)


def sent(window: int, stored_ms: float, *, job: str = "a", late_s: float = 0.0) -> SentWindow:
    return SentWindow(job, window, float(window), window + late_s, window + late_s + 0.05, int(stored_ms * MS))


@pytest.mark.slow
def test_it_decides_every_window_of_a_real_load_and_writes_what_it_found(tmp_path: Path) -> None:
    found = run_bench(
        *("scale", tmp_path / "result.json", "--workers", "36", "--jobs", "2", "--rate", "1", "--seconds", "2"),
        *("--with-windows", "--spread", "0.05", "--policy", "rule", "--ingest-messages", "200"),
    )
    assert found.keys() >= {field.name for field in msgspec.structs.fields(ScaleResult)}
    assert (found["nodes"], found["windows_expected"]) == (6, 2 * (WARM_UP_WINDOWS + 2))
    assert found["windows_decided"] == found["windows_expected"]
    assert found["actions_out_of_chain"] == found["late_states"] == 0
    assert 0 < found["decision_latency_p50_ms"] <= found["decision_latency_p95_ms"] <= found["decision_latency_max_ms"]
    assert all(math.isfinite(found[name]) and found[name] > 0 for name in ("ingest_vs_raw", "rss_mb", "bytes_per_s"))
    assert found["messages_per_s"] == pytest.approx(3 * 6, rel=0.15)


@pytest.mark.slow
def test_two_shards_share_a_broker_and_see_nothing_of_each_other(tmp_path: Path) -> None:
    """Jobs of both have the same names, and each arbitrator decides its own."""
    found = run_bench(
        *("scale.shards", tmp_path / "result.json", "--shards", "2", "--workers", "32", "--jobs", "4", "--rate", "1"),
        *("--seconds", "2"),
    )
    results = msgspec.convert(found["shards"], list[ShardResult])
    assert [(one.shard, one.workers, one.jobs) for one in results] == [(0, 16, 2), (1, 16, 2)]
    for one in results:
        assert one.windows_decided == one.windows_expected == 2 * (WARM_UP_WINDOWS + 2)
        assert one.actions_out_of_chain == 0
        assert 0 < one.decision_latency_p50_ms <= one.decision_latency_max_ms
    assert found["broker_rss_mb"] > 0


@pytest.mark.parametrize(("shards", "workers", "jobs"), [(0, 10, 1), (3, 10, 3), (2, 10, 3)])
def test_what_cannot_be_divided_into_shards_is_said(shards: int, workers: int, jobs: int) -> None:
    options = argparse.Namespace(shards=shards, workers=workers, jobs=jobs)
    with pytest.raises(ValueError, match=f"must divide --workers {workers} and --jobs {jobs}, {shards} does not"):
        plan_of(options)


def test_a_decision_is_timed_from_the_last_state_to_its_action_and_the_warm_up_is_left_out() -> None:
    first = WARM_UP_WINDOWS
    windows = [sent(0, 0), *(sent(first + number, 1000 * number) for number in range(4))]
    times_ms = (5, 20, 10, 40)
    decided = {("a", first + number): int((1000 * number + ms) * MS) for number, ms in enumerate(times_ms)}
    decided["a", 0] = 900 * MS
    found = latency_of(windows, decided)
    assert found == {
        "decision_latency_p50_ms": 10,
        "decision_latency_p95_ms": 40,
        "decision_latency_p99_ms": 40,
        "decision_latency_max_ms": 40,
        "max_lag_windows": 1,
    }


def test_windows_that_wait_for_each_other_are_counted_as_lag() -> None:
    first = WARM_UP_WINDOWS
    windows = [sent(first + number, 1000 * number) for number in range(4)]
    decided = {("a", first + number): 3500 * MS for number in range(4)}
    assert latency_of(windows, decided)["max_lag_windows"] == 4


def missed_by(result: ScaleResult) -> list[str]:
    return [*missed(result), *(str(target) for target in targets_of(result) if not target.met)]


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (0.25, 0.5, 0.51, 1.0)] == [1.0, 2.0, 3.0, 4.0]
    assert math.isnan(percentile([], 0.5))


def test_a_generator_that_falls_behind_is_found_out() -> None:
    plan = ScalePlan(workers=8, seconds=10)
    steady = [sent(WARM_UP_WINDOWS + number, 0, late_s=0.2) for number in range(10)]
    assert achieved_rate(plan, steady) == pytest.approx(1.0)
    assert kept_rate(plan, steady)
    slow = [sent(WARM_UP_WINDOWS + number, 0, late_s=0.15 * number) for number in range(10)]
    assert achieved_rate(plan, slow) == pytest.approx(1 / 1.15)
    assert not kept_rate(plan, slow)
    late = [*steady[:-1], sent(WARM_UP_WINDOWS + 9, 0, late_s=1.1)]
    assert lateness_ms(late) == pytest.approx(1100)
    assert not kept_rate(plan, late)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"workers": 10, "jobs": 3}, "--jobs must divide --workers 10 without a rest, 3 does not"),
        ({"workers": 1 << 20}, "at most 131072 ranks, not 1048576"),
        ({"seconds": 0.5}, "must make at least one window"),
        ({"spread_s": 1.0}, "--spread must be from 0 to below the window's 1 s, not 1.0"),
    ],
)
def test_what_cannot_be_run_is_said_with_its_value(changes: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        ScalePlan(**changes)  # type: ignore[arg-type]


def test_the_load_is_what_the_arbitrator_decides_by() -> None:
    """Real states of all nodes, the last one with fewer ranks: `rule` fits its model to them and moves the batch."""
    job = job_of("load-0a1b2c3d", 20, "rule")
    assert [len(node.ranks) for node in job.nodes] == [8, 8, 4]
    load, fold, decided = Load(job), Fold(job, policy_named("rule"), None), []
    for window in range(4):
        parcels = [parcel(state) for state in load.states(window)]
        assert len({one.message_id for one in parcels}) == 3
        for node, one in enumerate(parcels):
            fold.add_state(3 * window + node + 1, decode(State, one.subject, one.payload))
        action = fold.close()
        assert action is not None
        assert action.window == window
        fold.adopt(action)
        decided.append(action.local_batch_sizes)
    assert len(set(decided)) > 1
    assert [metrics.node for metrics in load.windows(0)] == [reward.node for reward in load.rewards(0)]


def test_cpu_time_and_growth_are_taken_from_their_spans() -> None:
    samples = [
        ProcessSample(float(at), at * 0.04, 100 + (50 if at == 12 else 0) + (8 if at >= 90 else 0)) for at in range(101)
    ]
    assert cpu_seconds(samples, 10.5, 60.5) == pytest.approx(2.0)
    assert rss_growth_bytes(samples, 10, 100) == 8
    assert wait_seconds(samples, 10, 60) is None
    assert wait_seconds([ProcessSample(0.0, 0.0, 0, 1.0), ProcessSample(10.0, 0.0, 0, 2.0)], 5, 10) == pytest.approx(
        0.5
    )


def test_a_process_is_measured_by_its_own_files() -> None:
    block = np.ones(1 << 22)
    while (found := sample_of(os.getpid())).cpu_s == 0:
        block.sum()
    assert found.rss_bytes > block.nbytes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"windows_decided": 304}, "304 of 305 windows decided"),
        ({"actions_out_of_chain": 2}, "2 actions out of their chain"),
        ({"decision_latency_p95_ms": 100.1}, "latency, ms: 100.1, target <= 100 MISSED"),
        ({"decision_latency_p95_ms": math.nan}, "latency, ms: nan, target <= 100 MISSED"),
        ({"ingest_vs_raw": 0.59}, "ingest of raw: 0.59, target >= 0.6 MISSED"),
        ({"rss_growth_mb": 5.1, "seconds": MEMORY_RUN_S}, "growth of memory, MB: 5.1, target <= 5 MISSED"),
    ],
)
def test_each_target_can_be_missed(changes: dict[str, float], text: str) -> None:
    (target,) = missed_by(changed(**changes))
    assert text in target


def test_all_targets_can_be_met_and_short_runs_say_nothing_about_memory() -> None:
    assert missed_by(RESULT) == []
    assert missed_by(changed(rss_growth_mb=50.0)) == []


def test_cost_that_grows_faster_than_the_workers_is_found() -> None:
    small = changed(workers=1000, cpu_percent=0.4, decision_latency_p50_ms=4.0)
    assert exponent(small, RESULT, "cpu_percent") == pytest.approx(1.0)
    assert too_steep([changed(workers=32, cpu_percent=0.2, decision_latency_p50_ms=1.0), small, RESULT]) == []
    (found,) = too_steep([small, changed(cpu_percent=40.0)])
    assert "static: CPU grows with the power 2.00" in found


def test_the_curve_writes_figures_picture_and_table(tmp_path: Path) -> None:
    (tmp_path / "scale.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write([changed(workers=32), RESULT], tmp_path)
    assert msgspec.json.decode((tmp_path / "scale.json").read_bytes(), type=list[ScaleResult])[1] == RESULT
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "scale.md").read_text()
    assert (
        "| static | 10,000 | 40.0 / 60.0 / 70.0 | 4.0 | 4.0 | 60 | 3.0 | 100 | 1.20 | 1,250 | 1.30 | 2.5 | 1.0 |"
        in text
    )
    assert "old" not in text
    (tmp_path / "scale.md").write_text("nothing")
    with pytest.raises(ValueError, match="no place for the table"):
        write([RESULT], tmp_path)


def test_the_documented_table_is_of_the_documented_figures() -> None:
    results = msgspec.json.decode((ROOT / "docs" / "scale.json").read_bytes(), type=list[ScaleResult])
    assert markdown_table(results) in (ROOT / "docs" / "scale.md").read_text()
