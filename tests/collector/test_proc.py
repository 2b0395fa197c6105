"""What the collector reads of /proc, from captured files and from this very process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import examples
from tests.support.captured_proc import CAPTURED, captured_row, copy_with

from dynamix.collector.observation import reason_to_refuse
from dynamix.collector.procfs.proc import (
    FamilyCounters,
    HostCounters,
    NamespaceTraffic,
    Proc,
    ThreadCounters,
    parse_host_schedstat,
    parse_stat,
)
from dynamix.schemas.messages import RankRow

GIB = 1 << 30


def own_row(**changes: object) -> RankRow:
    pid, proc = os.getpid(), Proc()
    fields = {
        "pid": pid,
        "pid_start_ticks": proc.stat(pid).start_ticks,
        "pid_namespace": proc.pid_namespace(pid),
        "uid": os.getuid(),
    }
    return examples.row(0, **(fields | changes))


def test_a_command_name_with_spaces_and_parentheses_does_not_shift_the_fields() -> None:
    stat = parse_stat((CAPTURED / "4242" / "stat").read_text())
    assert stat.cpu_ticks == 1500 + 250 + 30 + 20
    assert stat.start_ticks == 8812345


def test_the_cpu_time_of_a_rank_includes_its_loader_workers() -> None:
    assert Proc(CAPTURED).family(4242).cpu_ticks == 1800 + 150


def test_every_thread_of_a_rank_and_its_loader_workers_is_counted_by_itself() -> None:
    assert Proc(CAPTURED).family(4242).threads == {
        4242: ThreadCounters(wait_ns=30_000_000, num_switches=500),
        4250: ThreadCounters(wait_ns=20_000_000, num_switches=300),
        4243: ThreadCounters(wait_ns=5_000_000, num_switches=40),
    }


def test_without_schedstats_what_threads_waited_is_unknown_and_the_rest_known(tmp_path: Path) -> None:
    tasks = [f"{pid}/task/{tid}/schedstat" for pid, tid in ((4242, 4242), (4242, 4250), (4242, 4251), (4243, 4243))]
    missing = Proc(copy_with(tmp_path / "missing", {}, without=tuple(tasks)))
    assert missing.family(4242) == FamilyCounters(cpu_ticks=1950, threads=None)
    off = {name: ((CAPTURED / name).read_text(), "0 0 0\n") for name in tasks}
    assert Proc(copy_with(tmp_path / "off", off)).family(4242).threads is None


def test_23_retransmissions_are_counted_as_23_and_loopback_bytes_as_none() -> None:
    assert Proc(CAPTURED).traffic(4242) == NamespaceTraffic(tx_bytes=7_000_200, rx_bytes=5_000_100, retransmits=23)


def test_memory_and_load_have_the_machines_own_units() -> None:
    proc = Proc(CAPTURED)
    assert proc.resident_bytes(4242) == GIB // 2
    assert proc.memory() == (16 * GIB, 12 * GIB)
    assert proc.load_average() == 1.5


def test_the_host_is_read_over_all_its_processors() -> None:
    assert Proc(CAPTURED).host() == HostCounters(
        num_processors=2, busy_ticks=450, idle_ticks=1500, num_switches=70_000, wait_ns=400_000_000
    )


@pytest.mark.parametrize("version", ["14", "18", "150"])
def test_an_unknown_version_of_schedstat_is_not_guessed_at(version: str) -> None:
    text = (CAPTURED / "schedstat").read_text().replace("version 15", f"version {version}")
    assert parse_host_schedstat(text) is None


def test_the_running_kernels_proc_files_parse_like_the_captured_ones() -> None:
    proc, pid = Proc(), os.getpid()
    family = proc.family(pid)
    assert family.cpu_ticks > 0
    if Path("/proc/self/schedstat").exists():
        assert family.threads is not None
        assert family.threads[pid].num_switches > 0
    assert proc.resident_bytes(pid) > 1 << 20
    assert proc.load_average() >= 0
    assert proc.host().num_processors >= 1
    assert proc.host().num_switches > 0
    assert proc.traffic(pid).retransmits >= 0


def test_a_busy_child_counts_for_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in Proc()._add_threads(os.getpid(), {})
        child.kill()


def test_a_process_in_a_container_is_in_another_namespace(tmp_path: Path) -> None:
    nested = copy_with(tmp_path, {"4242/status": ("NSpid:\t4242", "NSpid:\t4242\t17")})
    assert Proc(nested).pid_namespace(4242) is None
    assert "another pid namespace" in str(reason_to_refuse(captured_row(), Proc(nested), ()))


def test_a_process_is_believed_when_it_is_what_its_row_says() -> None:
    assert reason_to_refuse(own_row(), Proc(), ()) is None
    assert reason_to_refuse(own_row(), Proc(), (os.getuid(),)) is None
    assert reason_to_refuse(captured_row(), Proc(CAPTURED), (1000,)) is None


@pytest.mark.parametrize(
    ("changes", "uids", "reason"),
    [
        ({"pid_start_ticks": 1}, (), "another process now"),
        ({"pid_namespace": 1}, (), "another pid namespace"),
        ({"uid": 12345}, (), "not to 12345"),
        ({"pid": 2**22 - 1}, (), "not running here"),
        ({}, (54321,), "DYNAMIX_COLLECTOR_UIDS"),
    ],
)
def test_a_row_that_names_another_process_is_not_believed(
    changes: dict[str, int], uids: tuple[int, ...], reason: str
) -> None:
    assert reason in str(reason_to_refuse(own_row(**changes), Proc(), uids))
