"""Differences of what /proc counts, from captured files with known numbers and from two processes on one processor."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tests.support import examples
from tests.support.captured_proc import CAPTURED, Clock, captured_row, copy_with

from dynamix.collector.procfs.intervals import WindowId
from dynamix.collector.procfs.proc import Proc
from dynamix.collector.procfs.readings import Readings
from dynamix.schemas.features import RANK_INDEX, state_of, unpack_ranks
from dynamix.schemas.messages import NodeMetrics, RankMetrics, SystemMetrics

GIB = 1 << 30

BUSY = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(flush=True), input()
begin = time.process_time()
while time.process_time() < begin + 0.2: pass
print(flush=True), input()
"""


def at(window: int, job: str = "job") -> WindowId:
    return WindowId(job, 0, window)


class Machine:
    """The captured machine, and how its files look some seconds later."""

    def __init__(self, later: Path) -> None:
        self._clock = Clock()
        self._later = later
        self.readings = Readings(Proc(CAPTURED), self._clock)

    def passes(self, seconds: float, changes: dict[str, tuple[str, str]], without: tuple[str, ...] = ()) -> None:
        self._clock.now_s += seconds
        self.readings._proc = Proc(copy_with(self._later, changes, without))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_rates_are_unknown_until_there_are_two_readings_and_then_over_the_collectors_own_interval(
    machine: Machine,
) -> None:
    first = machine.readings.process(captured_row(), at(0))
    assert first == SystemMetrics(memory_bytes=GIB // 2, memory_ratio=0.5 / 16)
    machine.passes(
        2.0,
        {
            "4242/stat": (" 1500 ", " 1800 "),
            "4242/task/4242/schedstat": ("30000000 500", "430000000 700"),
            "4243/task/4243/schedstat": ("5000000 40", "105000000 140"),
        },
    )
    metrics = machine.readings.process(captured_row(), at(1))
    assert metrics.cpu_time_ratio == pytest.approx(300 / os.sysconf("SC_CLK_TCK") / 2.0)
    assert metrics.run_queue_wait_ratio == pytest.approx((0.4 + 0.1) / 2.0)
    assert metrics.context_switches_per_s == pytest.approx((200 + 100) / 2.0)


def test_an_ended_thread_loses_only_its_last_interval(machine: Machine) -> None:
    machine.readings.process(captured_row(), at(0))
    changes = {"4242/task/4242/schedstat": ("30000000 500", "50000000 510")}
    machine.passes(1.0, changes, without=("4242/task/4250/",))
    metrics = machine.readings.process(captured_row(), at(1))
    assert metrics.run_queue_wait_ratio == pytest.approx(0.02)
    assert metrics.context_switches_per_s == pytest.approx(10)


def test_a_thread_that_is_new_or_has_anothers_id_counts_from_zero(machine: Machine) -> None:
    machine.readings.process(captured_row(), at(0))
    changes = {
        "4242/task/4250/schedstat": ("20000000 300", "4000000 7"),
        "4242/task/4251/schedstat": ("0 0 0", "90000000 6000000 20"),
    }
    machine.passes(1.0, changes)
    metrics = machine.readings.process(captured_row(), at(1))
    assert metrics.run_queue_wait_ratio == pytest.approx(0.010)
    assert metrics.context_switches_per_s == pytest.approx(27)


def test_the_node_is_read_as_a_whole(machine: Machine) -> None:
    first = machine.readings.node(captured_row(), at(0))
    assert first == NodeMetrics(load_per_cpu=0.75, memory_used_ratio=0.25)
    machine.passes(
        2.0,
        {
            "stat": ("cpu  300 20 80 1450 50 5 5 40 60 0", "cpu  420 20 100 1490 50 5 5 60 90 0"),
            "schedstat": (" 250000000 ", " 1850000000 "),
            "4242/net/snmp": (" 23 ", " 46 "),
        },
    )
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


def test_bytes_of_another_namespace_are_not_a_difference(machine: Machine) -> None:
    machine.readings.node(captured_row(), at(0))
    machine.passes(1.0, {})
    node = machine.readings.node(captured_row(pid_start_ticks=1), at(1))
    assert (node.tx_bytes, node.retransmits, node.context_switches_per_s) == (None, None, 0.0)


def test_a_kernel_that_does_not_count_is_unknown_never_zero(machine: Machine) -> None:
    silent = ("schedstat", "4242/task/4242/schedstat", "4242/task/4250/schedstat", "4243/task/4243/schedstat")
    for window in (0, 1):
        machine.passes(1.0, {}, without=silent)
        process = machine.readings.process(captured_row(), at(window))
        node = machine.readings.node(captured_row(), at(window))
    assert (process.cpu_time_ratio, process.run_queue_wait_ratio, process.context_switches_per_s) == (0.0, None, None)
    assert (node.context_switches_per_s, node.run_queue_wait_ratio) == (0.0, None)


def test_the_memory_of_a_gpu_counts_where_there_is_one(machine: Machine) -> None:
    gpu = captured_row(device_memory_bytes=GIB, device_memory_total_bytes=4 * GIB)
    metrics = machine.readings.process(gpu, at(0))
    assert (metrics.memory_bytes, metrics.memory_ratio) == (GIB // 2, 0.25)


def test_what_is_unknown_is_masked_in_the_state(machine: Machine) -> None:
    row = captured_row()
    known_at = {}
    for window in (0, 1):
        rank = RankMetrics(rank=0, training=examples.training(), system=machine.readings.process(row, at(window)))
        node = machine.readings.node(row, at(window))
        features = unpack_ranks(state_of(replace(examples.window(), ranks=(rank,), node_metrics=node)))[0]
        known_at[window] = {name for name, index in RANK_INDEX.items() if not np.isnan(features[index])}
        machine.passes(1.0, {"stat": ("cpu  300 ", "cpu  400 ")})
    since_the_window_before = {
        *("cpu_time_ratio", "run_queue_wait_ratio", "context_switches_per_s"),
        *("node_cpu_time_ratio", "node_run_queue_wait_ratio", "node_context_switches_per_s"),
    }
    assert known_at[1] - known_at[0] == since_the_window_before
    assert {"memory_ratio", "load_per_cpu", "node_memory_used_ratio"} <= known_at[0]


@pytest.fixture
def busy() -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes on one processor: told to, each wants 0.2 s of it, and then waits to be told to end."""
    command = [sys.executable, "-c", BUSY]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    yield children
    for child in children:
        child.kill()
        child.communicate()


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel counts no waiting (CONFIG_SCHED_INFO)"
)
def test_two_processes_that_share_a_processor_are_both_seen_to_wait_for_it(busy: list[subprocess.Popen[str]]) -> None:
    readings = Readings(Proc())
    rows = [examples.row(rank, pid=child.pid, pid_start_ticks=1) for rank, child in enumerate(busy)]
    for child in busy:
        _next_line(child)
    for row in rows:
        readings.process(row, at(0))
    for child in busy:
        _tell(child)
    for child in busy:
        _next_line(child)
    for row in rows:
        metrics = readings.process(row, at(1))
        assert metrics.cpu_time_ratio is not None
        assert metrics.cpu_time_ratio > 0
        assert metrics.run_queue_wait_ratio is not None
        assert metrics.run_queue_wait_ratio > 0
        assert metrics.context_switches_per_s is not None
        assert metrics.context_switches_per_s > 0


def _tell(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def _next_line(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "\n"
