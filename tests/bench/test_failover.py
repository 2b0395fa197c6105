import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import msgspec
import pytest
from bench.failover import __main__ as main
from bench.failover import servers
from bench.failover.__main__ import (
    BEGIN,
    BEGIN_PARTITION,
    COLUMNS,
    END,
    PARTITION_COLUMNS,
    partition_summary,
    summary,
)
from bench.failover.kept import KeptOutcomes, TrialOutcome
from bench.failover.minority import MinorityView
from bench.failover.servers import (
    ClusterServer,
    CopiesMissingError,
    ThreeServers,
    free_ports,
    until_current,
)
from bench.failover.trial import Fault, Scene, Trial
from bench.harness.command import BenchmarkError
from bench.harness.steady_job import SteadyJob
from bench.harness.tables import markdown
from bench.hosts.namespace import DIRECTORY
from tests.support import examples
from tests.support.benches import ROOT, run_bench
from tests.support.brokers import ConfiguredServer, until

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.streams.copies import StreamCopies, StreamCopy
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
    whole_after_s=1.0,
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
        "trials that could not be ended": True,
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
            minority=msgspec.structs.replace(VIEW, left_after_s=10.0, sent_while_cut=400, whole_after_s=125.0),
        ),
    ]
    (row,) = partition_summary(trials)
    assert {
        name: row[name] for name in ("fault", "trials", "median_s", "sent_while_cut", "left_after_s", "whole_after_s")
    } == {
        "fault": "minority-partition",
        "trials": 2,
        "median_s": 6.0,
        "sent_while_cut": 900,
        "left_after_s": "10.0 to 11.0",
        "whole_after_s": "63.0 (1.0 to 125.0)",
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


async def test_copies_that_stay_behind_are_named(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """This broker has one copy of each stream, and says no word of others."""
    monkeypatch.setattr(servers, "CURRENT_TIMEOUT_S", 0.6)
    with pytest.raises(CopiesMissingError, match=r"not all copies are current after 0\.6 s: JOBS: leader .*, 0 other"):
        await until_current(bus)


class LoggedServer(ClusterServer):
    """A server that has written a log and does not run."""

    def __init__(self, log: Path) -> None:
        super().__init__(1, ["a:1", "b:2"], "password")
        self._log = log

    @property
    def log_file(self) -> Path:
        return self._log

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def test_what_servers_complained_of_is_shown_when_a_measurement_ends_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"
    log.write_text("[1] [INF] Server is ready\n[1] [WRN] RAFT catchup, will retry\n")
    async with ThreeServers([LoggedServer(log)]):
        pass
    assert capsys.readouterr().err == ""
    with contextlib.suppress(CopiesMissingError):
        async with ThreeServers([LoggedServer(log)]):
            raise CopiesMissingError("FEED")
    assert capsys.readouterr().err == "broker-2: [1] [WRN] RAFT catchup, will retry\n"


def test_a_copy_that_lags_is_named_with_its_lag() -> None:
    behind = StreamCopy(name="broker-2", active=3_200_000_000, lag=41)
    found = StreamCopies(leader="broker-1", replicas=(behind, StreamCopy(name="broker-3", current=True)))
    assert not found.are_whole(3)
    assert str(found) == ("leader broker-1, 2 other copies; broker-2 is not current, lags by 41, was heard 3.2 s ago")
    assert not found.are_whole(2)
    both = tuple(StreamCopy(name=name, current=True) for name in ("a", "b"))
    assert StreamCopies(leader="broker-1", replicas=both).are_whole(3)
    assert not StreamCopies(replicas=both).are_whole(3)


def test_a_measurement_goes_on_with_the_trials_that_are_not_in_its_file(tmp_path: Path) -> None:
    path, faults = tmp_path / "kept.jsonl", list[Fault](["none", "leader-kill"])
    kept = KeptOutcomes(faults, 2, path)
    assert kept.missing == [(0, "none"), (0, "leader-kill"), (1, "none"), (1, "leader-kill")]
    kept.add_outcome(TrialOutcome(number=0, fault="leader-kill", trial=TRIAL))
    kept.add_outcome(TrialOutcome(number=0, fault="none", failed="FEED: leader unknown"))
    again = KeptOutcomes(faults, 2, path)
    assert again.missing == [(1, "none"), (1, "leader-kill")]
    assert (again.trials, again.failures) == ([TRIAL], ["none, trial 1: FEED: leader unknown"])
    fewer = KeptOutcomes(["none"], 1, path)
    assert (fewer.missing, fewer.trials, len(fewer.failures)) == ([], [], 1)
    assert len(path.read_bytes().splitlines()) == 2


def test_a_file_of_something_else_is_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "kept.jsonl").write_text('{"number": "one"}\n')
    with pytest.raises(BenchmarkError, match=r"kept\.jsonl, line 1, is no trial: .*; name another file"):
        KeptOutcomes(["none"], 1, tmp_path / "kept.jsonl")


async def test_a_trial_that_cannot_be_ended_is_kept_with_what_it_waited_for(
    server: ConfiguredServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one, and the third is not begun."""
    waits_for = CopiesMissingError("not all copies are current after 120 s: FEED: leader unknown")

    class OneServer(ThreeServers):
        settings = server.settings

        async def until_current(self, bus: Bus) -> None:
            pass

    @contextlib.asynccontextmanager
    async def no_job(*_: object) -> AsyncIterator[None]:
        yield

    async def one(_scene: Scene, _fault: Fault, count: int, _stream: str) -> Trial:
        if count == 1:
            raise waits_for
        return TRIAL

    monkeypatch.setattr(main, "NUM_SERVERS", 1)
    monkeypatch.setattr(main, "running_job", no_job)
    monkeypatch.setattr(main, "run_trial", one)
    servers_there = OneServer()
    servers_there.servers.clear()
    kept = KeptOutcomes(["leader-kill"], 3)
    with pytest.raises(CopiesMissingError):
        await main.measure(servers_there, kept)
    assert (kept.trials, kept.failures) == ([TRIAL], [f"leader-kill, trial 2: {waits_for}"])
    assert kept.missing == [(2, "leader-kill")]


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
