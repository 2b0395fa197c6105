"""Memory: of the collector with and without the probe, of the process that compiles, and of the maps in the kernel."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.harness.broker import broker_with_bus

from dynamix.cli.services import ServiceProcess, bus_environment, wait_until_ready
from dynamix.collector.ebpf.program import MAPS, PROGRAMS
from dynamix.collector.procfs.proc import Proc
from dynamix.runtime.bus import Bus

PROBES = ("tcp_info", "ebpf")
LOADER = "dynamix.collector.ebpf.loader"


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
