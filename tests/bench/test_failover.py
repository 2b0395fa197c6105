import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bench.failover.__main__ import (
    BEGIN,
    BEGIN_PARTITION,
    COLUMNS,
    END,
    PARTITION_COLUMNS,
    partition_summary,
    summary,
)
from bench.failover.minority import MinorityView
from bench.failover.servers import free_ports
from bench.failover.trial import Trial
from bench.harness.steady_job import SteadyJob
from bench.harness.tables import markdown
from bench.hosts.namespace import DIRECTORY
from tests.support import examples
from tests.support.benches import ROOT, run_bench
from tests.support.brokers import until

from dynamix.runtime.bus import Bus
from dynamix.schemas.chain import seal

TRIAL = Trial(
    fault="leader-kill",
    server="broker-1",
    stream="FEED",
    acknowledged=1000,
    lost=0,
    longest_wait_s=4.0,
    num_windows=50,
)
VIEW = MinorityView(
    acknowledged=900,
    lost=0,
    cut_for_s=12.0,
    sent_while_cut=500,
    acknowledged_while_cut=0,
    stored_of_these=500,
    left_after_s=11.0,
    back_after_s=3.0,
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_kills_a_leader_under_a_real_job_and_writes_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "failover.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    document = ["--document", str(tmp_path / "failover.md")]
    found = run_bench("failover", tmp_path / "result.json", "--trials", "1", "--fault", "leader-kill", *document)
    (trial,) = msgspec.convert(found["trials"], list[Trial])
    assert (trial.fault, trial.stream, trial.lost) == ("leader-kill", "FEED", 0)
    assert trial.acknowledged > trial.num_windows > 0
    assert {target["name"]: target["met"] for target in found["targets"]} == {
        "acknowledged messages lost": True,
        "actions out of their chain": True,
    }
    assert "| leader-kill | 1 |" in (tmp_path / "failover.md").read_text()


@pytest.mark.slow
@pytest.mark.bpf
@pytest.mark.timeout(600)
def test_a_server_that_is_cut_off_acknowledges_nothing_and_its_clients_lose_nothing(tmp_path: Path) -> None:
    (tmp_path / "failover.md").write_text(f"{BEGIN}\nother\n{END}\n{BEGIN_PARTITION}\nold\n{END}\n")
    options = ["--trials", "1", "--fault", "minority-partition", "--document", str(tmp_path / "failover.md")]
    found = run_bench("failover", tmp_path / "result.json", *options)
    (trial,) = msgspec.convert(found["trials"], list[Trial])
    seen = trial.minority
    assert seen is not None
    assert (trial.fault, trial.lost, seen.lost, seen.acknowledged_while_cut) == ("minority-partition", 0, 0, 0)
    assert seen.stored_of_these == seen.sent_while_cut > 50
    assert trial.acknowledged > seen.acknowledged > seen.sent_while_cut
    assert 0 < seen.left_after_s <= seen.cut_for_s
    assert seen.back_after_s > 0
    assert all(target["met"] for target in found["targets"])
    text = (tmp_path / "failover.md").read_text()
    assert "other" in text
    assert "| minority-partition | 1 |" in text


@pytest.mark.slow
@pytest.mark.bpf
async def test_servers_on_hosts_leave_nothing_when_the_benchmark_is_killed() -> None:
    command = [sys.executable, "-m", "bench.failover", "--fault", "minority-partition"]
    bench = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=subprocess.DEVNULL)

    def left() -> list[Path]:
        return [path for path in DIRECTORY.iterdir() if path.name.startswith(f"dynamix-hosts-{bench.pid}-")]

    def children() -> list[str]:
        return Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()

    await until(lambda: len(children()) >= 4, 60)  # the janitor and three servers
    started = children()
    assert len(left()) == 4  # three hosts and the switch
    bench.kill()
    await bench.wait()
    await until(lambda: not left(), 60)
    await until(lambda: not any(Path(f"/proc/{child}").exists() for child in started), 60)


def test_what_clients_beside_a_cut_off_server_saw_is_summed() -> None:
    trials = [
        TRIAL,
        msgspec.structs.replace(TRIAL, fault="minority-partition", minority=VIEW),
        msgspec.structs.replace(
            TRIAL,
            fault="minority-partition",
            longest_wait_s=8.0,
            minority=msgspec.structs.replace(VIEW, left_after_s=10.0, sent_while_cut=400),
        ),
    ]
    (row,) = partition_summary(trials)
    assert {name: row[name] for name in ("fault", "trials", "median_s", "sent_while_cut", "left_after_s")} == {
        "fault": "minority-partition",
        "trials": 2,
        "median_s": 6.0,
        "sent_while_cut": 900,
        "left_after_s": "10.0 to 11.0",
    }


def test_trials_are_summed_by_fault() -> None:
    times = (4.0, 6.0, 9.0)
    trials = [msgspec.structs.replace(TRIAL, longest_wait_s=time, lost=time == 9.0) for time in times]
    (row,) = summary(trials)
    assert row == {
        "fault": "leader-kill",
        "trials": 3,
        "acknowledged": 3000,
        "lost": 1,
        "median_s": 6.0,
        "shortest_s": 4.0,
        "longest_s": 9.0,
        "within_5_s": 1,
    }


async def test_an_action_that_does_not_follow_the_one_before_it_is_counted(bus: Bus) -> None:
    job, last = SteadyJob(bus), b""
    for window in range(4):
        job.actions.append(seal(examples.action(window), last))
        last = job.actions[-1].hash
    assert job.num_out_of_chain() == 0
    job.actions.append(job.actions[-1])
    assert job.num_out_of_chain() == 1
    del job.actions[0]
    assert job.num_out_of_chain() == 2, "the first one is not the first of its log either"


def test_ports_are_free_and_differ() -> None:
    assert len(set(free_ports(3))) == 3


def test_the_documented_table_is_of_the_documented_figures() -> None:
    found = msgspec.json.decode((ROOT / "docs" / "failover.json").read_bytes())
    cells = [[cell.format_map(row) for cell in COLUMNS.values()] for row in found["summary"]]
    assert markdown([*COLUMNS], cells, num_left=1) in (ROOT / "docs" / "failover.md").read_text()
    assert summary(msgspec.convert(found["trials"], list[Trial])) == found["summary"]


def test_the_documented_partitions_are_of_the_documented_figures() -> None:
    found = msgspec.json.decode((ROOT / "docs" / "failover-partition.json").read_bytes())
    rows = partition_summary(msgspec.convert(found["trials"], list[Trial]))
    cells = [[cell.format_map(row) for cell in PARTITION_COLUMNS.values()] for row in rows]
    assert markdown([*PARTITION_COLUMNS], cells, num_left=1) in (ROOT / "docs" / "failover.md").read_text()
    assert rows == found["summary"]
