from pathlib import Path

import msgspec
import pytest
from bench.failover.__main__ import BEGIN, COLUMNS, END, summary
from bench.failover.servers import free_ports
from bench.failover.trial import Trial
from bench.harness.steady_job import SteadyJob
from bench.harness.tables import markdown
from tests.support import examples
from tests.support.benches import ROOT, run_bench

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
