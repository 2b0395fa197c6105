"""bench.kernel as a user runs it, and what it makes of its figures."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.harness.rounds import Timing
from bench.kernel import __main__ as bench
from bench.kernel.arms import ARMS, BULK, CONNECTIONS, DATAGRAMS, TRAFFIC, UNKNOWN, compare_arms
from bench.kernel.programs import made_groups
from bench.kernel.training import PACED, TRAINING
from tests.support.benches import run_bench

from dynamix.collector.ebpf.attachment import v2_mount
from dynamix.collector.ebpf.program import INGRESS, MAPS, SOCKETS

MIB = 1 << 20
STATISTICS = Path("/proc/sys/kernel/bpf_stats_enabled")


@pytest.mark.bpf
@pytest.mark.slow
def test_it_measures_all_that_the_probe_costs_and_leaves_nothing(tmp_path: Path) -> None:
    before = STATISTICS.read_text()
    png = tmp_path / "result.png"
    result = run_bench("kernel", tmp_path / "result.json", "--quick", "--png", str(png))
    assert STATISTICS.read_text() == before
    assert png.stat().st_size > 0

    rows = {row["name"]: row for row in result["run_times"]}
    assert list(rows) == [*(kind.name for kind in TRAFFIC), UNKNOWN, *(kind.name for kind in TRAINING)]
    for row in rows.values():
        assert row["items_per_s"] > 0
        assert row["programs"][INGRESS]["ns_per_run"] > 0
        assert row["empty_ns"] > 0
        ns_per_s = sum(figures["runs_per_s"] * (figures["ns_per_run"] or 0) for figures in ours(row))
        assert row["machine_percent"] == pytest.approx(100 * ns_per_s / 1e9 / result["num_processors"])
    opened = rows[CONNECTIONS.name]
    assert opened["programs"][SOCKETS]["runs_per_s"] > 4 * opened["items_per_s"], "both ends open and close"
    datagrams = rows[DATAGRAMS.name]["programs"]
    assert datagrams[SOCKETS]["runs_per_s"] < datagrams[INGRESS]["runs_per_s"] / 10, "no connection, but for late ends"
    assert rows[BULK.name]["programs"][SOCKETS]["runs_per_s"] > 0

    for comparison in result["arms"]:
        for differences in comparison["clocks"].values():
            assert [len(row["rounds_percent"]) for row in differences] == [comparison["num_rounds"]] * 4
    assert set(result["memory"]["maps_bytes"]) == set(MAPS)
    assert result["memory"]["maps_bytes"]["sockets"] > MIB
    assert result["memory"]["loader"]["peak_bytes"] > max(map(max, result["memory"]["collector_bytes"].values()))
    few, many = (window["window_us"] for window in result["reading"]["windows"])
    assert 0 < result["reading"]["socket_us"] < few < many


@pytest.mark.bpf
def test_control_groups_of_killed_benchmarks_are_removed() -> None:
    mount = v2_mount(Path("/proc/self/mountinfo").read_text())
    assert mount is not None
    dead = mount / f"dynamix-bench-{2**22 + 1}"  # no process has such an id
    (dead / "busy").mkdir(parents=True)
    with made_groups(mount) as groups:
        assert not dead.exists()
        assert all(group.is_dir() for group in groups)
    assert not groups.busy.parent.exists()


def test_without_root_it_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("sys.argv", ["bench.kernel"])
    assert bench.main() == 2
    assert "kernel: only root may" in capsys.readouterr().err


def test_each_arm_is_compared_with_off_in_its_own_round_and_on_with_both_placebos() -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def switch(arm: str) -> Iterator[None]:
        seen.append(arm)
        yield

    def block() -> Timing:
        slower = {"on": 1.10, "placebo": 1.02, "placebo 2": 0.98}.get(seen[-1], 1.0)
        return Timing(num_items=2.0, wall_s=2 * 0.01 * slower, cpu_s=2 * 0.02 * slower**2)

    found = compare_arms(switch, block, 6, name="bulk", item="Gbit")
    rounds = [seen[start : start + 4] for start in range(4, 28, 4)]  # the first one warms up
    assert all(sorted(arms) == sorted(ARMS) for arms in rounds)
    assert len({tuple(arms) for arms in rounds}) > 1, "the order is random"
    wall = {(row["arm"], row["against"]): row for row in found["clocks"]["wall clock"]}
    medians = {pair: row["median_percent"] for pair, row in wall.items()}
    assert medians == pytest.approx(
        {("on", "off"): 10.0, ("placebo", "off"): 2.0, ("placebo 2", "off"): -2.0, ("on", "both placebos"): 10.0}
    )
    assert wall["on", "off"]["against_median_ms"] == pytest.approx(10.0)
    assert found["clocks"]["CPU time"][0]["median_percent"] == pytest.approx(21.0)


def test_targets_are_of_bulk_traffic_and_the_paced_job() -> None:
    rows = [row_of(BULK.name, 200.0, 10.0, 1.01), row_of(PACED.name, 500.0, 0.0, 0.1)]
    assert [target.met for target in bench.targets_of(rows)] == [True, True, False, True]
    rows = [row_of(BULK.name, 200.1, 9.9, 1.0), row_of(PACED.name, 500.0, 0.0, 0.11)]
    assert [target.met for target in bench.targets_of(rows)] == [False, False, True, False]


def ours(row: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, float]]:
    return [row["programs"][name] for name in (INGRESS, SOCKETS)]


def row_of(name: str, ns: float, gbit_per_s: float, percent: float) -> dict[str, object]:
    programs = {INGRESS: {"ns_per_run": ns}}
    return {"name": name, "programs": programs, "gbit_per_s": gbit_per_s, "machine_percent": percent}
