"""What a kind of traffic or a job shows of the probe: by the kernel's own clock of each program, and from outside.

From outside the same work runs with the probe, without it, and with it where it sees nothing. Every round does one
block in each arm, in a random order. `placebo` attaches the very programs to a control group without processes, and
`placebo 2` does the same again: how far those two are apart is what such a measurement can show where there is nothing
to be seen. An arm is compared with the `off` of its own round.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from bench.harness.rounds import Rounds, Timing, Values, difference
from bench.kernel.programs import EMPTY, Groups, Programs, since
from bench.kernel.traffic import Endpoints, TrafficKind
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

ON, OFF, PLACEBO, PLACEBO_2 = "on", "off", "placebo", "placebo 2"
ARMS = (ON, OFF, PLACEBO, PLACEBO_2)
PLACEBOS = "both placebos"
COMPARED = ((ON, OFF), (PLACEBO, OFF), (PLACEBO_2, OFF), (ON, PLACEBOS))

Switch = Callable[[str], contextlib.AbstractContextManager[None]]
"""The probe as it is in an arm."""


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
        "programs": {
            program: {"runs_per_s": run_time.num_runs / block.wall_s, "ns_per_run": run_time.ns_per_run}
            for program, run_time in ran.items()
        },
        "empty_ns": ran[EMPTY].ns_per_run,
        "machine_percent": 100 * ours_ns / processors_ns,
    }


def compare_arms(
    switch: Switch, block: Callable[[], Timing], num_rounds: int, *, name: str, item: str
) -> dict[str, Any]:
    """Run blocks of some work in all arms; wall clock and CPU time per item, and their differences in percent."""
    rounds = Rounds(ARMS, num_rounds, label=name)
    for arm in rounds:
        with switch(arm):
            rounds.record(block())
    clocks: dict[str, Callable[[Timing], float]] = {
        "wall clock": lambda timing: 1 / timing.per_s,
        "CPU time": lambda timing: 1 / timing.per_cpu_s,
    }
    return {
        "name": name,
        "item": item,
        "num_rounds": num_rounds,
        "clocks": {clock: _differences(rounds.timings, per_item_s) for clock, per_item_s in clocks.items()},
    }


def _differences(timings: dict[str, list[Timing]], per_item_s: Callable[[Timing], float]) -> list[dict[str, Any]]:
    by_arm: dict[str, Values] = {arm: np.array([per_item_s(one) for one in found]) for arm, found in timings.items()}
    by_arm[PLACEBOS] = (by_arm[PLACEBO] + by_arm[PLACEBO_2]) / 2
    return [{"arm": arm, "against": off, **_difference(by_arm[arm], by_arm[off])} for arm, off in COMPARED]


def _difference(here: Values, there: Values) -> dict[str, Any]:
    percent = 100 * (here - there) / there.mean()
    return {
        "median_ms": 1000 * float(np.median(here)),
        "against_median_ms": 1000 * float(np.median(there)),
        **difference(here, there),
        "quartiles_percent": np.percentile(percent, [25, 75]).tolist(),
        "rounds_percent": percent.tolist(),
    }
