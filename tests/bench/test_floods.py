import math
from pathlib import Path

import msgspec
import pytest
from bench.floods.__main__ import BEGIN, BEGIN_KEYS, END, HEADINGS, cells_of, targets_of
from bench.floods.measurement import Delays, FloodResult, delays_of
from bench.floods.senders import FLOODS, LARGE_RANKS, Sent, job_on_one_node, measured_of
from bench.harness.steady_job import NODE
from bench.harness.tables import markdown
from tests.support.benches import ROOT, run_bench

CALM = Delays(num_windows=50, median_s=0.01, p95_s=0.02, longest_s=0.03)
RESULT = FloodResult(
    flood="junk",
    count=2260,
    sent=Sent(accepted=2260, refused=0, num_bytes=1_100_620_000, seconds=6.0),
    calm=CALM,
    flooded=msgspec.structs.replace(CALM, longest_s=0.9),
    num_out_of_chain=0,
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_flood_is_sent_and_every_window_of_the_honest_job_is_decided(tmp_path: Path) -> None:
    (tmp_path / "floods.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    document = ["--document", str(tmp_path / "floods.md")]
    found = run_bench("floods", tmp_path / "r.json", "--size", "0.02", "--calm", "1", "--after", "1", *document)
    results = msgspec.convert(found["floods"], list[FloodResult])
    sent = {one.flood: (one.count, one.sent.accepted, one.sent.refused) for one in results}
    assert sent == {
        "jobs": (200, 400, 0),
        "consumers": (20, 20, 0),
        "specifications": (3, 0, 3),
        "junk": (45, 45, 0),
        "reports": (5, 5, 0),
    }
    for one in results:
        assert one.num_out_of_chain == 0
        assert one.calm.num_windows > 0
        assert 0 < one.flooded.median_s <= one.flooded.p95_s <= one.flooded.longest_s
        assert math.isfinite(one.sent.seconds)
    assert "old" not in (tmp_path / "floods.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_honest_jobs_with_keys_are_decided_while_a_key_floods_with_small_messages(tmp_path: Path) -> None:
    (tmp_path / "floods.md").write_text(f"{BEGIN}\nother\n{END}\n{BEGIN_KEYS}\nold\n{END}\n")
    options = ["--keys", "--size", "0.01", "--calm", "1", "--after", "1", "--document", str(tmp_path / "floods.md")]
    found = run_bench("floods", tmp_path / "r.json", *options)
    results = {one.flood: one for one in msgspec.convert(found["floods"], list[FloodResult])}
    assert {name: one.count for name, one in results.items()} == {
        "small": 10_000,
        "small-reports": 5_000,
        "own-reports": 500,
    }
    for one in results.values():
        assert one.num_out_of_chain == 0
        assert one.sent.accepted + one.sent.refused == one.count
        assert one.calm.num_windows > 0
        assert one.flooded.num_windows > 0
    text = (tmp_path / "floods.md").read_text()
    assert "other" in text
    assert "old" not in text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("keys", "flood", "count"), [(["--keys"], "small", 1000), ([], "junk", 2)])
def test_floods_of_three_servers_are_measured(tmp_path: Path, keys: list[str], flood: str, count: int) -> None:
    options = [*keys, "--servers", "3", "--flood", flood, "--size", "0.001", "--calm", "1", "--after", "1"]
    (one,) = msgspec.convert(run_bench("floods", tmp_path / "r.json", *options)["floods"], list[FloodResult])
    assert (one.flood, one.count, one.num_out_of_chain) == (flood, count, 0)
    assert one.flooded.num_windows > 0


def test_delays_are_summed_up() -> None:
    found = delays_of([0.1, 0.2, 0.3, 0.4, 9.0])
    assert (found.num_windows, found.median_s, found.longest_s) == (5, 0.3, 9.0)
    assert found.p95_s == pytest.approx(7.28)


def test_a_delay_above_a_second_and_a_broken_chain_are_found() -> None:
    assert all(target.met for target in targets_of([RESULT]))
    slow = msgspec.structs.replace(RESULT, flooded=msgspec.structs.replace(CALM, longest_s=1.1), num_out_of_chain=1)
    assert [str(target) for target in targets_of([slow])] == [
        "junk: longest delay, s: 1.1, target <= 1 MISSED",
        "junk: actions out of their chain: 1, target <= 0 MISSED",
    ]


def test_floods_go_to_the_collector_of_the_honest_job() -> None:
    job = job_on_one_node("crowd", LARGE_RANKS)
    report = measured_of(job).report
    assert (report.node, len(report.rows), job.world_size) == (NODE, 4096, 4096)


@pytest.mark.parametrize(("file", "with_key"), [("floods.json", False), ("floods-keys.json", True)])
def test_the_documented_table_is_of_the_documented_figures(file: str, *, with_key: bool) -> None:
    found = msgspec.json.decode((ROOT / "docs" / file).read_bytes())
    results = msgspec.convert(found["floods"], list[FloodResult])
    wanted = {name: flood.full for name, flood in FLOODS.items() if flood.with_key == with_key}
    assert {one.flood: one.count for one in results} == wanted
    cells = [cells_of(result) for result in results]
    assert markdown(HEADINGS, cells, num_left=1) in (ROOT / "docs" / "floods.md").read_text()
