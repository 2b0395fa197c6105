"""The benchmark across hosts: once as a user runs it, then its thinking on made-up windows."""

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bench.cluster import table
from bench.cluster.display import describe, panels_of, text_of
from bench.cluster.plan import Arm, ClusterPlan, by_rank, cluster_parser, plan_of
from bench.cluster.summary import ClusterResult, JobMessages, WindowSpread, missed, summarise
from bench.harness.figure import draw
from bench.hosts.cgroups import find_hierarchies
from bench.hosts.namespace import DIRECTORY
from tests.support import examples
from tests.support.benches import ROOT, run_bench
from tests.support.brokers import until

from dynamix.collector.procfs.proc import NamespaceTraffic
from dynamix.schemas.messages import Applied, MetricWindow, NetworkMetrics, RankMetrics, SystemMetrics
from dynamix.schemas.messages.allocation import EXACT, Exchange

PLAN = ClusterPlan(num_hosts=2, num_windows=3, num_warm_up_windows=1)
NO_TRAFFIC = NamespaceTraffic(0, 0, 0)


@pytest.mark.slow
@pytest.mark.bpf
def test_a_job_across_hosts_is_steered_and_shows_its_slow_processor(tmp_path: Path) -> None:
    sizes = ("--hosts", "2", "--windows", "4", "--window-steps", "4", "--warm-up", "1")
    slow = ("--slow-cpu", "1=0.1", "--policy", "proportional:24", "--png", str(tmp_path / "figure.png"))
    found = run_bench("cluster", tmp_path / "result.json", *sizes, *slow)
    (run,) = found["runs"]
    assert (run["label"], run["num_windows"], len(run["step_times_s"])) == ("proportional:24", 4, 4)
    assert run["num_actions"] >= run["num_actions_applied"] >= 1
    assert sum(run["local_batch_sizes"]) == 48
    ranks = run["ranks"]
    assert ranks[1]["windows"]["compute_time_s"][0] > ranks[0]["windows"]["compute_time_s"][0]
    assert ranks[1]["windows"]["local_batch_size"][0] == 24 > ranks[1]["windows"]["local_batch_size"][-1]
    for rank in ranks:
        assert sum(rank["probes"].values()) == 4
        assert "none" not in rank["probes"]
        assert rank["medians"]["cpu_time_ratio"] > 0
        assert rank["host_retransmits"] >= rank["num_retransmits"]
        assert rank["host_tx_bytes"] > 4 * 4 * 0.4e6  # each step's gradient
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.bpf
async def test_a_benchmark_that_is_killed_leaves_nothing() -> None:
    command = [sys.executable, "-m", "bench.cluster", "--hosts", "2"]
    bench = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=subprocess.DEVNULL)
    mark = f"dynamix-hosts-{bench.pid}-"
    places = (DIRECTORY, *find_hierarchies().roots)

    def left() -> list[Path]:
        return [path for place in places if place.exists() for path in place.iterdir() if path.name.startswith(mark)]

    def busy_hosts() -> int:
        procs = [file for path in left() for file in path.glob("*/cgroup.procs")]
        return len({file.parent.name for file in procs if file.read_text()})

    def children_of(pid: int) -> list[str]:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    await until(lambda: busy_hosts() == 2)
    children = children_of(bench.pid)
    bench.kill()
    await bench.wait()
    assert len(children) == 6  # janitor, broker, two services, two collectors
    await until(lambda: not left())
    await until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def window_of(rank: int, number: int, step_s: float = 0.1, **network: int) -> MetricWindow:
    """A window of one rank on a host of its own."""
    metrics = RankMetrics(
        rank=rank,
        training=examples.training(step_time_s=step_s, local_batch_size=32 + rank),
        system=SystemMetrics(cpu_time_ratio=0.25 * (1 + rank)),
        network=NetworkMetrics(**{"tx_bytes": 1000, "rx_bytes": 2000, "retransmits": 5} | network),
    )
    job = examples.job_metrics(step_time_s=step_s, throughput=100 / step_s)
    return msgspec.structs.replace(examples.window(f"host-{rank}", window=number, job_metrics=job), ranks=(metrics,))


def result_of(plan: ClusterPlan = PLAN, policy: str = "static", **network: int) -> ClusterResult:
    """Windows of 0.3, 0.1 and 0.2 s per step."""
    seen = JobMessages(plan.num_hosts, plan.num_windows)
    for number, step_s in enumerate((0.3, 0.1, 0.2)):
        for rank in range(plan.num_hosts):
            seen.record_message(window_of(rank, number, step_s, **network))
    return summarise(plan, Arm(policy, 32), seen, [NO_TRAFFIC] * plan.num_hosts)


def test_medians_leave_out_what_is_to_warm_up_and_windows_do_not() -> None:
    result = result_of()
    assert result.step_times_s == [0.3, 0.1, 0.2]
    assert (result.step_time_s.low, result.step_time_s.median, result.step_time_s.high) == pytest.approx(
        (0.125, 0.15, 0.175)
    )
    assert result.throughput.median == pytest.approx(750)
    rank = result.ranks[1]
    assert rank.medians["rx_bytes_per_s"] == pytest.approx((2000 + 1000) / 2)  # 10 steps of 0.1 s, and of 0.2 s
    assert rank.windows["tx_bytes_per_s"] == pytest.approx([1000 / 3, 1000, 500])
    assert rank.medians["cpu_time_ratio"] == 0.5
    assert rank.medians["srtt_us"] is None
    assert (rank.num_retransmits, rank.probes) == (15, {"tcp_info": 3})
    assert result.local_batch_sizes == [32, 33]


def test_times_of_steps_are_told_apart_by_how_gradients_travelled() -> None:
    plan = ClusterPlan(num_hosts=2, num_windows=6, num_warm_up_windows=1)
    seen = JobMessages(2, 6)
    for number, step_s in enumerate((0.9, 0.3, 0.5, 0.7, 0.1, 0.2)):
        for rank in range(2):
            seen.record_message(window_of(rank, number, step_s))
    shares = Exchange(route="shares", shares=(1.0, 0.0))
    for window, exchange in ((2, EXACT), (3, shares), (4, shares)):
        seen.record_message(
            Applied(
                job=examples.JOB,
                generation=0,
                decided_window=window - 2,
                effective_window=window,
                effective_step=10 * window,
                local_batch_sizes=(32, 32),
                exchange=exchange,
            )
        )
    result = summarise(plan, Arm("rule", 32), seen, [NO_TRAFFIC] * 2)
    assert result.exchanges == ["exact"] * 3 + ["none over shares"] * 3
    found = {exchange: spread.median for exchange, spread in result.step_time_s_by_exchange.items()}
    assert found == pytest.approx({"exact": 0.4, "none over shares": 0.15})  # without the window in which they began
    assert "step with gradients none over shares: 150.0 ms" in text_of(result)


def test_a_window_counts_when_all_hosts_sent_it() -> None:
    seen = JobMessages(2, 3)
    for rank, number in ((0, 0), (1, 0), (0, 1), (0, 2), (1, 2), (1, 2)):
        seen.record_message(window_of(rank, number))
    assert not seen.is_complete
    applied = Applied(
        job=examples.JOB,
        generation=0,
        decided_window=0,
        effective_window=2,
        effective_step=20,
        local_batch_sizes=(32, 32),
    )
    for message in (applied, examples.action(0), examples.action(1)):
        seen.record_message(message)
    result = summarise(PLAN, Arm("rule", 32), seen, [NO_TRAFFIC, NamespaceTraffic(10, 20, 30)])
    assert (result.num_windows, result.num_windows_planned) == (2, 3)
    assert (result.num_actions, result.num_actions_applied) == (2, 1)
    assert missed(result) == ["all windows of rule:32"]
    assert "any action" in missed(msgspec.structs.replace(result, num_windows=3, num_actions=0))[0]
    assert (result.ranks[1].host_tx_bytes, result.ranks[1].host_rx_bytes, result.ranks[1].host_retransmits) == (
        *(10, 20, 30),
    )
    seen.record_message(window_of(1, 1))
    assert seen.is_complete


def test_a_run_of_which_nothing_was_seen_is_no_result() -> None:
    with pytest.raises(ValueError, match="none of the 3 windows"):
        summarise(PLAN, Arm("rule", 32), JobMessages(2, 3), [NO_TRAFFIC] * 2)


def test_one_window_has_no_spread() -> None:
    assert WindowSpread.of([0.5]) == WindowSpread(median=0.5, low=0.5, high=0.5)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"slow_links": {3: "20"}}, "not a rate"),
        ({"slow_links": {4: "20mbit"}}, "rank 4 does not exist"),
        ({"slow_cpus": {-1: 0.1}}, "rank -1 does not exist"),
        ({"num_hosts": 1}, "at least 2"),
        ({"num_windows": 5}, "leave none"),
        ({"slow_links": {3: "20mbit"}, "queue_limit_bytes": 100}, "at least 4096"),
    ],
)
def test_a_plan_that_cannot_be_run_says_why(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ClusterPlan(**arguments)  # type: ignore[arg-type]


def test_a_policy_may_bring_its_own_size() -> None:
    assert Arm.parse("static:96", 32) == Arm("static", 96)
    assert Arm.parse("rule", 32).label == "rule:32"
    for text in ("static:0", "static:x", "Rule"):
        with pytest.raises(ValueError, match=r"size|invalid literal|cannot be part"):
            Arm.parse(text, 32)


def test_what_is_slow_is_given_by_rank_and_said_in_words() -> None:
    assert by_rank(["3=20mbit", "0=1gbit"], str) == {3: "20mbit", 0: "1gbit"}
    for text in ("3", "x=1", "-1=1"):
        with pytest.raises(ValueError, match="RANK=VALUE"):
            by_rank([text], str)
    plan = ClusterPlan(slow_cpus={1: 0.1}, slow_links={3: "20mbit"}, queue_limit_bytes=10_000)
    assert describe(plan) == (
        "4 hosts of 0.4 cores; rank 1 has 0.1 cores; rank 3's link has 20mbit, queues of 10000 bytes"
    )


def test_arguments_become_a_plan() -> None:
    parser = cluster_parser("cluster", None)
    assert plan_of(parser.parse_args([])) == ClusterPlan()
    options = parser.parse_args(["--cpu", "none", "--queue-limit", "4500", "--windows", "30", "--probe", "ebpf"])
    expected = ClusterPlan(cores=None, queue_limit_bytes=4500, num_windows=30, probe="ebpf")
    assert plan_of(options) == expected
    assert msgspec.json.decode(msgspec.json.encode(expected), type=ClusterPlan) == expected  # as it reaches the ranks


def test_the_table_compares_actions_within_a_condition_and_the_slow_rank_with_the_others() -> None:
    fast, slow = result_of(policy="rule"), result_of()
    fast = msgspec.structs.replace(fast, throughput=WindowSpread(median=1500, low=1500, high=1500))
    cells = {("slow link", table.EQUAL): [slow], ("slow link", "rule"): [fast]}
    lines = table.tables_of(cells, slow_rank=1).splitlines()
    assert lines[0] == "| one rank has | equal split | rule |"
    assert lines[2] == "| slow link | 150 ms, 750/s, **1.00x** (32/33) | 150 ms, 1500/s, **2.00x** (32/33) |"
    state = lines[-1].split(" | ")
    assert state[0] == "| slow link"
    assert state[7] == "0.500 / 0.250"
    assert state[5] == "- / -"


def test_a_picture_has_a_column_for_every_run(tmp_path: Path) -> None:
    draw(panels_of([result_of(), result_of(policy="rule")], PLAN), tmp_path / "new" / "figure.png")
    assert (tmp_path / "new" / "figure.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
