"""What the collector reads of /proc, from captured files and from this very process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import made

from dynamix.collector.proc import NamespaceTraffic, Proc, parse_stat
from dynamix.collector.readings import Readings
from dynamix.collector.trust import reason_to_refuse
from dynamix.schemas.messages import RankRow, SystemMetrics

CAPTURED = Path(__file__).parents[1] / "data" / "proc"
GIB = 1 << 30


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def captured_row(**changes: object) -> RankRow:
    fields = {"pid": 4242, "pid_start_ticks": 8812345, "pid_namespace": Proc(CAPTURED).pid_namespace(4242), "uid": 1000}
    return made.row(0, **(fields | changes))


def own_row(**changes: object) -> RankRow:
    pid, proc = os.getpid(), Proc()
    fields = {
        "pid": pid,
        "pid_start_ticks": proc.stat(pid).start_ticks,
        "pid_namespace": proc.pid_namespace(pid),
        "uid": os.getuid(),
    }
    return made.row(0, **(fields | changes))


def test_a_command_name_with_spaces_and_parentheses_does_not_shift_the_fields() -> None:
    stat = parse_stat((CAPTURED / "4242" / "stat").read_text())
    assert stat.cpu_ticks == 1500 + 250 + 30 + 20
    assert stat.start_ticks == 8812345


def test_the_cpu_time_of_a_rank_includes_its_loader_workers() -> None:
    assert Proc(CAPTURED).family_cpu_ticks(4242) == 1800 + 150


def test_23_retransmissions_are_counted_as_23_and_loopback_bytes_as_none() -> None:
    assert Proc(CAPTURED).traffic(4242) == NamespaceTraffic(tx_bytes=7_000_200, rx_bytes=5_000_100, retransmits=23)


def test_memory_and_load_have_the_machines_own_units() -> None:
    proc = Proc(CAPTURED)
    assert proc.resident_bytes(4242) == GIB // 2
    assert proc.memory() == (16 * GIB, 12 * GIB)
    assert proc.load_per_cpu() == 0.75


def test_rates_are_unknown_until_there_are_two_readings_and_then_over_the_collectors_own_interval(
    tmp_path: Path,
) -> None:
    clock, proc = Clock(), Proc(CAPTURED)
    readings = Readings(proc, clock)
    assert readings.process(captured_row()).cpu_time_ratio is None
    assert readings.node(captured_row()).tx_bytes is None
    later = _copy_with(tmp_path, {"4242/stat": (" 1500 ", " 1800 "), "4242/net/snmp": (" 23 ", " 46 ")})
    clock.now_s += 2.0
    readings._proc = Proc(later)
    assert readings.process(captured_row()).cpu_time_ratio == pytest.approx(300 / proc.ticks_per_s / 2.0)
    node = readings.node(captured_row())
    assert (node.retransmits, node.tx_bytes, node.interval_s) == (23, 0, 2.0)


def test_the_memory_of_a_gpu_counts_where_there_is_one() -> None:
    readings = Readings(Proc(CAPTURED))
    assert readings.process(captured_row()).memory_ratio == 0.5 / 16
    gpu = captured_row(device_memory_bytes=GIB, device_memory_total_bytes=4 * GIB)
    assert readings.process(gpu).memory_ratio == 0.25


def test_a_process_that_is_gone_is_unknown_not_an_error() -> None:
    assert Readings(Proc(CAPTURED)).process(captured_row(pid=99999)) == SystemMetrics()


def test_the_running_kernel_is_read_as_the_captured_one() -> None:
    proc, pid = Proc(), os.getpid()
    assert proc.family_cpu_ticks(pid) >= 0
    assert proc.resident_bytes(pid) > 1 << 20
    assert proc.load_per_cpu() >= 0
    assert proc.traffic(pid).retransmits >= 0


def test_a_busy_child_counts_for_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        proc = Proc()
        assert child.pid in proc._children(os.getpid())
        child.kill()


def test_a_process_in_a_container_is_in_another_namespace(tmp_path: Path) -> None:
    nested = _copy_with(tmp_path, {"4242/status": ("NSpid:\t4242", "NSpid:\t4242\t17")})
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


def _copy_with(target: Path, changes: dict[str, tuple[str, str]]) -> Path:
    for source in CAPTURED.rglob("*"):
        if source.is_file():
            name = str(source.relative_to(CAPTURED))
            old, new = changes.get(name, ("", ""))
            text = source.read_text()
            assert old in text
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text(text.replace(old, new, 1) if old else text)
    return target
