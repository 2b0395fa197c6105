"""Readings of /proc and the metrics made of them, from captured files with known numbers and from running processes."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import examples

from dynamix.collector.observation import reason_to_refuse
from dynamix.collector.procfs import (
    FORGET_AFTER_S,
    FamilyCounters,
    Intervals,
    NamespaceTraffic,
    Proc,
    ProcessStat,
    Readings,
    WindowId,
    parse_host_schedstat,
)
from dynamix.schemas.messages import NodeMetrics, RankRow, SystemMetrics

CAPTURED = Path(__file__).parents[1] / "data" / "proc"
GIB = 1 << 30
TASKS = [f"{pid}/task/{tid}/schedstat" for pid, tid in ((4242, 4242), (4242, 4250), (4242, 4251), (4243, 4243))]

BUSY = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(flush=True), input()
begin = time.process_time()
while time.process_time() < begin + 0.2: pass
print(flush=True), input()
"""


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def captured_row(**changes: object) -> RankRow:
    """The row of the captured process 4242."""
    fields = {
        "pid": 4242,
        "pid_start_ticks": 8812345,
        "pid_namespace": Proc(CAPTURED).owner(4242)[1],
        "uid": 1000,
    }
    return examples.row(0, **(fields | changes))


def copy_with(target: Path, changes: dict[str, tuple[str, str]], without: tuple[str, ...] = ()) -> Path:
    """The captured tree at `target`, in the named files the first `old` changed to `new`, and without some files."""
    for source in CAPTURED.rglob("*"):
        name = str(source.relative_to(CAPTURED))
        if not source.is_file() or name.startswith(without):
            continue
        text = source.read_text()
        old, new = changes.get(name, ("", ""))
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text.replace(old, new, 1) if old else text)
    return target


def at(window: int, job: str = "job", generation: int = 0) -> WindowId:
    return WindowId(job, generation, window)


def test_a_command_name_with_spaces_and_parentheses_does_not_shift_the_fields() -> None:
    assert Proc(CAPTURED).stat(4242) == ProcessStat(cpu_ticks=1500 + 250 + 30 + 20, start_ticks=8812345)


def test_without_schedstats_what_threads_waited_is_unknown_and_the_rest_known(tmp_path: Path) -> None:
    missing = Proc(copy_with(tmp_path / "missing", {}, without=tuple(TASKS)))
    assert missing.family(4242) == FamilyCounters(cpu_ticks=1800 + 150, threads=None)
    off = {name: ((CAPTURED / name).read_text(), "0 0 0\n") for name in TASKS}
    assert Proc(copy_with(tmp_path / "off", off)).family(4242).threads is None


def test_23_retransmissions_are_counted_as_23_and_loopback_bytes_as_none() -> None:
    assert Proc(CAPTURED).traffic(4242) == NamespaceTraffic(tx_bytes=7_000_200, rx_bytes=5_000_100, retransmits=23)


@pytest.mark.parametrize("version", ["14", "18", "150"])
def test_an_unknown_version_of_schedstat_is_not_guessed_at(version: str) -> None:
    text = (CAPTURED / "schedstat").read_text().replace("version 15", f"version {version}")
    assert parse_host_schedstat(text) is None


def test_the_running_kernels_proc_files_parse_like_the_captured_ones() -> None:
    proc, pid = Proc(), os.getpid()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        family = proc.family(pid)
        child.kill()
    assert family.cpu_ticks > 0
    if Path("/proc/self/schedstat").exists():
        assert family.threads[pid].num_switches > 0
        assert child.pid in family.threads
    assert proc.resident_bytes(pid) > 1 << 20
    assert proc.load_average() >= 0
    assert proc.host().num_processors >= 1
    assert proc.host().num_switches > 0
    assert proc.traffic(pid).retransmits >= 0


def own_row(**changes: object) -> RankRow:
    pid, proc = os.getpid(), Proc()
    fields = {"pid": pid, "pid_start_ticks": proc.stat(pid).start_ticks, "uid": os.getuid()}
    return examples.row(0, **(fields | {"pid_namespace": proc.owner(pid)[1]} | changes))


def test_a_process_is_believed_when_it_is_what_its_row_says(tmp_path: Path) -> None:
    assert reason_to_refuse(own_row(), Proc(), ()) is None
    assert reason_to_refuse(own_row(), Proc(), (os.getuid(),)) is None
    assert reason_to_refuse(captured_row(), Proc(CAPTURED), (1000,)) is None
    in_container = Proc(copy_with(tmp_path, {"4242/status": ("NSpid:\t4242", "NSpid:\t4242\t17")}))
    assert "another pid namespace" in str(reason_to_refuse(captured_row(), in_container, ()))


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


# --- readings of consecutive windows


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(0, 12)), max_size=60))
def test_a_difference_is_known_only_after_a_reading_of_the_previous_window(
    deliveries: list[tuple[str, int, int]],
) -> None:
    clock = Clock()
    intervals = Intervals[float](clock)
    newest: dict[str, WindowId] = {}
    first_read_at_s: dict[WindowId, float] = {}
    for job, generation, window in deliveries:
        clock.now_s += 1.0
        key = WindowId(job, generation, window)
        found = intervals.exchange((job, "cpu"), clock.now_s, key)
        if job in newest and key <= newest[job]:
            assert found is None
            continue
        before = key._replace(window=window - 1)
        if newest.get(job) == before:
            assert found == (first_read_at_s[before], pytest.approx(clock.now_s - first_read_at_s[before]))
        else:
            assert found is None
        newest[job], first_read_at_s[key] = key, clock.now_s


def test_old_readings_and_of_too_many_keys_the_oldest_are_forgotten() -> None:
    clock = Clock()
    intervals = Intervals[int](clock, max_keys=2)
    intervals.exchange("old", 1, at(0))
    clock.now_s += FORGET_AFTER_S / 2
    intervals.exchange("kept", 2, at(0))
    clock.now_s += FORGET_AFTER_S / 2 + 1
    assert intervals.exchange("kept", 3, at(1)) == (2, FORGET_AFTER_S / 2 + 1)
    assert intervals.newest("old") is None
    for key in ("second", "third"):
        intervals.exchange(key, 4, at(0))
    assert intervals.newest("kept") is None
    assert intervals.newest("second") is not None


class Machine:
    """The captured machine, and how its files look some seconds later."""

    def __init__(self, later: Path) -> None:
        self._clock = Clock()
        self._later = later
        self.readings = Readings(Proc(CAPTURED), self._clock)

    def passes(self, seconds: float, changes: dict[str, tuple[str, str]], without: tuple[str, ...] = ()) -> None:
        self._clock.now_s += seconds
        self.readings._proc = Proc(copy_with(self._later / str(self._clock.now_s), changes, without))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_rates_are_unknown_until_there_are_two_readings_and_then_over_the_collectors_own_interval(
    machine: Machine,
) -> None:
    first = machine.readings.process(captured_row(), at(0))
    assert first == SystemMetrics(memory_bytes=GIB // 2, memory_ratio=0.5 / 16)
    changes = {
        "4242/stat": (" 1500 ", " 1800 "),
        "4242/task/4242/schedstat": ("30000000 500", "430000000 700"),
        "4243/task/4243/schedstat": ("5000000 40", "105000000 140"),
    }
    machine.passes(2.0, changes)
    metrics = machine.readings.process(captured_row(), at(1))
    assert metrics.cpu_time_ratio == pytest.approx(300 / os.sysconf("SC_CLK_TCK") / 2.0)
    assert metrics.run_queue_wait_ratio == pytest.approx((0.4 + 0.1) / 2.0)
    assert metrics.context_switches_per_s == pytest.approx((200 + 100) / 2.0)


def test_an_ended_thread_loses_its_last_interval_and_a_new_one_counts_from_zero(machine: Machine) -> None:
    machine.readings.process(captured_row(), at(0))
    begun = {
        "4242/task/4250/schedstat": ("20000000 300", "4000000 7"),  # another thread with the id
        "4242/task/4251/schedstat": ("0 0 0", "90000000 6000000 20"),
    }
    machine.passes(1.0, begun)
    metrics = machine.readings.process(captured_row(), at(1))
    assert metrics.run_queue_wait_ratio == pytest.approx(0.010)
    assert metrics.context_switches_per_s == pytest.approx(27)
    ended = {"4242/task/4242/schedstat": ("30000000 500", "50000000 510")}
    machine.passes(1.0, ended, without=("4242/task/4250/", "4242/task/4251/"))
    metrics = machine.readings.process(captured_row(), at(2))
    assert metrics.run_queue_wait_ratio == pytest.approx(0.020)
    assert metrics.context_switches_per_s == pytest.approx(10)


def test_the_node_is_read_as_a_whole(machine: Machine) -> None:
    first = machine.readings.node(captured_row(), at(0))
    assert first == NodeMetrics(load_per_cpu=0.75, memory_used_ratio=0.25)
    changes = {
        "stat": ("cpu  300 20 80 1450 50 5 5 40 60 0", "cpu  420 20 100 1490 50 5 5 60 90 0"),
        "schedstat": (" 250000000 ", " 1850000000 "),
        "4242/net/snmp": (" 23 ", " 46 "),
    }
    machine.passes(2.0, changes)
    assert machine.readings.node(captured_row(), at(1)) == NodeMetrics(
        load_per_cpu=0.75,
        memory_used_ratio=0.25,
        tx_bytes=0,
        rx_bytes=0,
        retransmits=23,
        interval_s=2.0,
        cpu_time_ratio=pytest.approx(160 / 200),
        run_queue_wait_ratio=pytest.approx(1.6 / 2.0 / 2),
        context_switches_per_s=0.0,
    )
    machine.passes(1.0, {})
    node = machine.readings.node(captured_row(pid_start_ticks=1), at(2))  # of another network namespace
    assert (node.tx_bytes, node.retransmits, node.context_switches_per_s) == (None, None, 0.0)


def test_a_kernel_that_does_not_count_is_unknown_never_zero(machine: Machine) -> None:
    for window in (0, 1):
        machine.passes(1.0, {}, without=("schedstat", *TASKS))
        process = machine.readings.process(captured_row(), at(window))
        node = machine.readings.node(captured_row(), at(window))
    assert (process.cpu_time_ratio, process.run_queue_wait_ratio, process.context_switches_per_s) == (0.0, None, None)
    assert (node.context_switches_per_s, node.run_queue_wait_ratio) == (0.0, None)


def test_the_memory_of_a_gpu_counts_where_there_is_one(machine: Machine) -> None:
    gpu = captured_row(device_memory_bytes=GIB, device_memory_total_bytes=4 * GIB)
    metrics = machine.readings.process(gpu, at(0))
    assert (metrics.memory_bytes, metrics.memory_ratio) == (GIB // 2, 0.25)


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel counts no waiting (CONFIG_SCHED_INFO)"
)
def test_two_processes_that_share_a_processor_are_both_seen_to_wait_for_it() -> None:
    """Told to, each wants 0.2 s of it, and then waits to be told to end."""
    command = [sys.executable, "-c", BUSY]
    readings = Readings(Proc())
    with ExitStack() as stack:
        children = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(2)
        ]
        for child in children:
            stack.callback(child.kill)
        rows = [examples.row(rank, pid=child.pid, pid_start_ticks=1) for rank, child in enumerate(children)]
        for window in (0, 1):
            for child in children:
                if window:
                    child.stdin.write("\n")
                    child.stdin.flush()
            for child in children:
                assert child.stdout.readline() == "\n"
            metrics = [readings.process(row, at(window)) for row in rows]
    for one in metrics:
        assert (one.cpu_time_ratio or 0) > 0
        assert (one.run_queue_wait_ratio or 0) > 0
        assert (one.context_switches_per_s or 0) > 0
