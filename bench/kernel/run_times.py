"""What the kernel's own clock says of each program under each kind of traffic."""

import os
from collections.abc import Callable
from typing import Any

from bench.harness.rounds import Timing
from bench.kernel import bpf
from bench.kernel.endpoints import Endpoints
from bench.kernel.groups import Groups
from bench.kernel.programs import Programs, RunTime, since
from bench.kernel.traffic import TrafficKind
from bench.kernel.training import Training, TrainingKind

from dynamix.collector.ebpf.program import INGRESS, SOCKETS

GBIT = 1e9 / 8
BULK = TrafficKind("bulk", "stream", 4, 1 << 17, "Gbit", GBIT)
SHORT = TrafficKind("segments of 536 bytes", "stream", 4, 1 << 17, "Gbit", GBIT, max_segment_bytes=536)
ECHO = TrafficKind("64 bytes to and fro", "echo", 2, 64, "message", 0)
DATAGRAMS = TrafficKind("UDP datagrams", "datagram", 1, 1400, "Gbit", GBIT)
CONNECTIONS = TrafficKind("connections", "connection", 2, 1, "connection", 0)
TRAFFIC = (BULK, SHORT, ECHO, CONNECTIONS, DATAGRAMS)
UNKNOWN = "bulk, sockets older than the probe"


def measure_loopback(programs: Programs, ends: Endpoints, groups: Groups, duration_s: float) -> list[dict[str, Any]]:
    """A row for each kind of traffic, and for sockets that the probe does not know."""

    def row(kind: TrafficKind) -> dict[str, Any]:
        with programs.measured(groups.busy):
            return _row(programs, kind.name, kind.item, lambda: ends.block(kind, duration_s))

    rows = [row(kind) for kind in TRAFFIC]
    ends.open(BULK)
    with programs.measured(groups.busy):
        rows.append(_row(programs, UNKNOWN, BULK.item, lambda: ends.run(BULK, duration_s)))
    return rows


def measure_training(
    programs: Programs, ranks: Training, kind: TrainingKind, groups: Groups, num_steps: int
) -> dict[str, Any]:
    """The row of a job whose sockets the probe knows."""
    with programs.measured(groups.busy):
        return _row(programs, kind.name, "step", lambda: ranks.block(kind, num_steps))


def _row(programs: Programs, name: str, item: str, traffic: Callable[[], Timing]) -> dict[str, Any]:
    before = programs.run_times()
    block = traffic()
    ran = since(before, programs.run_times())
    processors_ns = 1e9 * block.wall_s * (os.cpu_count() or 1)
    ours_ns = ran[INGRESS].time_ns + ran[SOCKETS].time_ns
    return {
        "name": name,
        "item": item,
        "items_per_s": block.num_items / block.wall_s,
        "gbit_per_s": block.num_bytes / block.wall_s / GBIT,
        "wall_s": block.wall_s,
        "programs": {program: _figures(run_time, block.wall_s) for program, run_time in ran.items()},
        "empty_ns": ran[bpf.EMPTY].ns_per_run,
        "machine_percent": 100 * ours_ns / processors_ns,
    }


def _figures(ran: RunTime, wall_s: float) -> dict[str, float | None]:
    return {"runs_per_s": ran.num_runs / wall_s, "ns_per_run": ran.ns_per_run}
