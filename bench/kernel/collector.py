"""What the probe takes of the collector: memory, of its loader and in the kernel, and the time of its readings."""

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from bench.harness.broker import broker_with_bus
from bench.kernel.programs import Groups
from bench.kernel.traffic import Endpoints, TrafficKind
from bench.messages.load import job_of, node_window

from dynamix.cli.services import ServiceProcess, bus_environment, wait_until_ready
from dynamix.collector.ebpf.probe import SocketProbe
from dynamix.collector.ebpf.program import MAPS, PROGRAMS
from dynamix.collector.ebpf.traffic import SocketTraffic
from dynamix.collector.procfs.proc import Proc
from dynamix.runtime.bus import Bus
from dynamix.schemas.messages import Report

PROBES = ("tcp_info", "ebpf")
LOADER = "dynamix.collector.ebpf.loader"
NUM_RANKS = 8
SOCKETS_PER_RANK = (3, 127)
"""A small ring or tree, and a mesh of 128 ranks."""


async def measure_collector(group: Path, num_starts: int) -> dict[str, list[int]]:
    """Resident bytes of collectors that have just become ready, by probe, in turn."""
    found: dict[str, list[int]] = {probe: [] for probe in PROBES}
    async with broker_with_bus("bench") as (server, bus):
        environ = {**bus_environment(server.settings), "DYNAMIX_NODE": "bench"}
        for probe in PROBES * num_starts:
            own = {"DYNAMIX_COLLECTOR_PROBE": probe, "DYNAMIX_COLLECTOR_CGROUP": str(group)}
            found[probe].append(await _resident_bytes(bus, {**environ, **own}))
    return found


async def _resident_bytes(bus: Bus, environ: dict[str, str]) -> int:
    collector = ServiceProcess("collector", environ, subprocess.DEVNULL)
    collector.start()
    try:
        await wait_until_ready(bus, ["collector"])
        return Proc().resident_bytes(collector.pid)
    finally:
        collector.stop()


def measure_loader() -> dict[str, Any]:
    """Peak and lifetime of the process that compiles and loads the programs."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start_s = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", LOADER, str(theirs.fileno())], pass_fds=(theirs.fileno(),), stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - start_s
        process.returncode = os.waitstatus_to_exitcode(status)
        _, descriptors, _, _ = socket.recv_fds(ours, 1, len(PROGRAMS) + len(MAPS))
    for descriptor in descriptors:
        os.close(descriptor)
    return {"peak_bytes": 1024 * usage.ru_maxrss, "wall_s": wall_s, "cpu_s": usage.ru_utime + usage.ru_stime}


def measure_reading(ends: Endpoints, groups: Groups, num_repeats: int) -> dict[str, Any]:
    """Medians, with sockets that are open and known; both ends of each connection belong to a rank."""
    num_pairs = NUM_RANKS * max(SOCKETS_PER_RANK) // 2
    held = TrafficKind("held open", "stream", num_pairs, 1, "socket", 0)
    with SocketProbe(groups.busy) as probe:
        cookies = ends.open(held)
        try:
            return {
                "socket_us": 1e6 * _per_socket_s(probe, cookies, num_repeats),
                "windows": [_window(probe, cookies, number, num_repeats) for number in SOCKETS_PER_RANK],
            }
        finally:
            ends.close()


def _per_socket_s(probe: SocketProbe, cookies: Sequence[int], num_repeats: int) -> float:
    """Median over rounds of the mean."""
    uid, taken_s = os.getuid(), []
    for _ in range(num_repeats):
        start_s = time.perf_counter()
        for cookie in cookies:
            probe.read(cookie, uid)
        taken_s.append((time.perf_counter() - start_s) / len(cookies))
    return statistics.median(taken_s)


def _window(probe: SocketProbe, cookies: Sequence[int], num_sockets: int, num_repeats: int) -> dict[str, Any]:
    traffic, taken_s = SocketTraffic(probe), []
    batches = [tuple(cookies[rank * num_sockets :][:num_sockets]) for rank in range(NUM_RANKS)]
    for window in range(num_repeats + 1):
        report = _report(window, batches)
        start_s = time.perf_counter()
        found = traffic.window(report)
        taken_s.append(time.perf_counter() - start_s)
        if window and isinstance(found, str):
            raise RuntimeError(f"the probe does not know the sockets of the benchmark: {found}")
    return {
        "num_ranks": NUM_RANKS,
        "sockets_per_rank": num_sockets,
        "window_us": 1e6 * statistics.median(taken_s[1:]),
    }


def _report(window: int, cookies: Sequence[tuple[int, ...]]) -> Report:
    """A node's report that names these sockets."""
    job = job_of("bench", NUM_RANKS, "static")
    report = node_window(job, job.nodes[0], np.random.default_rng(0)).at(window).report
    rows = [
        msgspec.structs.replace(row, cookies=named, uid=os.getuid())
        for row, named in zip(report.rows, cookies, strict=True)
    ]
    return msgspec.structs.replace(report, rows=tuple(rows))
