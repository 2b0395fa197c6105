"""The benchmark of restarts beside a crowd of jobs: small runs of it, its judgement, and the documented figures."""

from pathlib import Path

import msgspec
import pytest
from bench.floods.restart import BEGIN, CROWDS, END, HEADINGS, Crowd, RestartResult, cells_of, targets_of
from bench.harness.steady_job import NODE
from bench.harness.tables import markdown
from tests.support.benches import ROOT, run_bench

from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Job, Report

MIB = 1 << 20
RESULT = RestartResult(
    num_jobs=10_000,
    ranks_of_each=4,
    decided_s=(2.0, 1.5, 4.0),
    opened_s=(30.0, 20.0, 25.0),
    held=(10_001, 10_001),
    resident_bytes={"collector": 100 * MIB, "reward": 60 * MIB, "arbitrator": 200 * MIB},
    resident_after_bytes=190 * MIB,
    num_out_of_chain=0,
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_arbitrator_is_restarted_beside_each_crowd_and_opens_all_jobs_again(tmp_path: Path) -> None:
    (tmp_path / "floods.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    options = ["--size", "0.01", "--restarts", "1", "--document", str(tmp_path / "floods.md")]
    found = run_bench("floods.restart", tmp_path / "r.json", *options)
    results = msgspec.convert(found["restarts"], list[RestartResult])
    assert [(one.num_jobs, one.held) for one in results] == [(0, (1, 1)), (100, (101, 101)), (10, (11, 11))]
    for one in results:
        assert one.num_out_of_chain == 0
        assert 0 < one.decided_s[0] < 120
        assert all(size > 10 * MIB for size in one.resident_bytes.values())
    assert "old" not in (tmp_path / "floods.md").read_text()


def test_a_crowd_is_of_jobs_on_the_honest_jobs_node_with_a_report_each() -> None:
    parcels = list(Crowd(2, 1_000).parcels())
    assert [subjects.parse(one.subject).kind for one in parcels] == ["job", "report"] * 2
    specification, report = (one.payload for one in parcels[2:])
    job = decode(Job, parcels[2].subject, specification)
    assert (job.job, job.world_size, job.phase) == ("fake-1", 1_000, "running")
    measured = decode(Report, parcels[3].subject, report)
    assert (measured.job, measured.node, len(measured.rows)) == ("fake-1", NODE, 1_000)


def test_an_arbitrator_holds_no_more_than_its_bounds_of_jobs_and_ranks() -> None:
    assert [Crowd(*crowd).num_held for crowd in ((0, 4), (20, 4), *CROWDS[1:])] == [1, 21, 10_000, 1_000]


def test_a_row_has_medians_the_longest_wait_and_memory_in_mebibytes() -> None:
    assert cells_of(RESULT) == ["10,000 of 4 ranks", "2.0, 4.0", "25.0", "200 / 190", "100", "60"]
    assert cells_of(msgspec.structs.replace(RESULT, num_jobs=0))[0] == "none"


def test_a_restart_that_takes_long_misses_its_target() -> None:
    assert all(target.met for target in targets_of([RESULT]))
    late = msgspec.structs.replace(RESULT, decided_s=(2.0, 5.5), num_out_of_chain=1)
    assert [target.met for target in targets_of([late])] == [False, False]


def test_the_documented_table_is_of_the_documented_figures() -> None:
    found = msgspec.json.decode((ROOT / "docs" / "floods-restart.json").read_bytes())
    results = msgspec.convert(found["restarts"], list[RestartResult])
    assert [(one.num_jobs, one.ranks_of_each) for one in results] == [*CROWDS]
    text = (ROOT / "docs" / "floods.md").read_text()
    assert markdown(HEADINGS, [cells_of(result) for result in results], num_left=1) in text
