"""What the kernel probe costs: `python -m bench.kernel [--json FILE] [--png FILE]`, some five minutes, as root.

Everything is over loopback on this machine, in a control group of its own. Four parts:

run times  the kernel times each program (as kernel.bpf_stats_enabled does) under several kinds of traffic and in a
           gloo job. Beside them runs a program that does nothing: it shows what the clock takes of each figure. What it
           takes to get to a program is in none of them. The targets are judged on these.
arms       the same work with the probe, without, and with it attached where it sees nothing, twice: by wall clock and
           CPU time, see `bench.kernel.arms`. Everything is in it, and so is the noise of the machine.
memory     of the collector with and without the probe, of the process that compiles, of the maps.
reading    what the collector's own readings take.
"""

import asyncio
import contextlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness.command import BenchmarkError, BenchmarkReport, Target, benchmark_parser, run_benchmark
from bench.hosts import HostsError
from bench.kernel.arms import BULK, CONNECTIONS, ECHO, OFF, ON, Switch, compare_arms, measure_loopback, measure_training
from bench.kernel.collector import measure_collector, measure_loader, measure_reading
from bench.kernel.display import MAX_NS_PER_RUN, draw, text_of
from bench.kernel.programs import Groups, Programs, made_groups, others_attached
from bench.kernel.traffic import Endpoints, endpoints
from bench.kernel.training import LARGE, PACED, TRAINING, training

from dynamix.collector.ebpf.attachment import v2_mount
from dynamix.collector.ebpf.program import INGRESS
from dynamix.collector.ebpf.syscall import ProbeError

MIN_GBIT_PER_S = 10.0
MAX_BULK_PERCENT = 1.0
MAX_TRAINING_PERCENT = 0.1
_MOUNTINFO = Path("/proc/self/mountinfo")


class KernelPlan(NamedTuple):
    """How much of everything."""

    timed_s: float
    """Duration of each kind of traffic while the kernel times the programs."""
    timed_steps: int
    num_rounds: int
    bulk_s: float
    short_s: float
    """Duration of a block of small messages or connections, which are many."""
    block_steps: int
    num_starts: int
    """Starts of collectors, with and without the probe."""
    num_readings: int


FULL = KernelPlan(3.0, 200, 24, 1.0, 0.5, 16, 3, 200)
QUICK = KernelPlan(0.1, 2, 2, 0.05, 0.05, 1, 1, 5)


def measure(mount: Path, plan: KernelPlan) -> BenchmarkReport:
    """Measure all four parts, one after the other."""
    others = others_attached(mount)
    with made_groups(mount) as groups, Programs(groups.empty) as programs:
        with endpoints(groups.busy) as ends:
            times, compared = _measure_loopback(programs, ends, groups, plan)
            read = measure_reading(ends, groups, plan.num_readings)
        trained, difference = _measure_training(programs, groups, plan)
        found = {
            "collector_bytes": asyncio.run(measure_collector(groups.empty, plan.num_starts)),
            "loader": measure_loader(),
            "maps_bytes": programs.map_bytes(),
        }
    rows = [*times, *trained]
    figures = {
        "others_attached": [others, others_attached(mount)],
        "run_times": rows,
        "arms": [*compared, difference],
        "memory": found,
        "reading": read,
    }
    return BenchmarkReport(figures, text_of(figures), targets_of(rows), draw=lambda path: draw(figures, path))


def targets_of(rows: list[dict[str, Any]]) -> list[Target]:
    """The targets, judged on the rows of `run_times`: bulk traffic, and the job of bench.overhead."""
    by_name = {row["name"]: row for row in rows}
    bulk, paced = by_name[BULK.name], by_name[PACED.name]
    ns_per_run = bulk["programs"][INGRESS]["ns_per_run"]
    return [
        Target(name="ns of a run of cgroup_skb, bulk", value=ns_per_run, at_most=MAX_NS_PER_RUN),
        Target(name="Gbit/s over loopback, bulk", value=bulk["gbit_per_s"], at_least=MIN_GBIT_PER_S),
        Target(name="percent of the machine, bulk", value=bulk["machine_percent"], at_most=MAX_BULK_PERCENT),
        Target(name="percent of the machine, DDP job", value=paced["machine_percent"], at_most=MAX_TRAINING_PERCENT),
    ]


def _switch(programs: Programs, groups: Groups) -> Switch:
    """Enters an arm: the probe on the busy group, nowhere, or on the empty one."""

    def enter(arm: str) -> contextlib.AbstractContextManager[None]:
        if arm == OFF:
            return contextlib.nullcontext()
        return programs.attached(groups.busy if arm == ON else groups.empty)

    return enter


def _measure_loopback(
    programs: Programs, ends: Endpoints, groups: Groups, plan: KernelPlan
) -> tuple[list[Any], list[Any]]:
    """Run times, and arms with new connections in each block, opened within the arm."""
    _say("run times under loopback traffic")
    times = measure_loopback(programs, ends, groups, plan.timed_s)
    compared = []
    for kind, duration_s in ((BULK, plan.bulk_s), (ECHO, plan.short_s), (CONNECTIONS, plan.short_s)):
        _say(f"arms: {kind.name}")
        block = partial(ends.block, kind, duration_s)
        switch = _switch(programs, groups)
        compared.append(compare_arms(switch, block, plan.num_rounds, name=kind.name, item=kind.item))
    return times, compared


def _measure_training(programs: Programs, groups: Groups, plan: KernelPlan) -> tuple[list[Any], dict[str, Any]]:
    """Run times, and arms that the same ranks go through; their sockets are opened under the probe."""
    _say("run times and arms in a gloo job")
    with contextlib.ExitStack() as stack:
        with programs.attached(groups.busy):  # so that the probe knows the sockets of the job
            ranks = stack.enter_context(training(groups.busy))
        rows = [measure_training(programs, ranks, kind, groups, plan.timed_steps) for kind in TRAINING]
        block = partial(ranks.block, LARGE, plan.block_steps)
        arms = compare_arms(_switch(programs, groups), block, plan.num_rounds, name=LARGE.name, item="step")
        return rows, arms


def _clean_mount(*, tolerant: bool) -> Path:
    """Where version 2 is mounted, with nothing attached to it.

    Raises:
        BenchmarkError: when this cannot be measured here.
    """
    if os.geteuid() != 0:
        raise BenchmarkError("only root may time programs, make control groups and look at what is attached: use sudo")
    mount = v2_mount(_MOUNTINFO.read_text())
    if mount is None:
        raise BenchmarkError("no control groups of version 2 are mounted: see `dynamix doctor`")
    if num := others_attached(mount):
        complaint = f"{num} programs are attached to {mount} and would count in every arm: stop the collectors first"
        if not tolerant:
            raise BenchmarkError(f"{complaint} (--no-targets measures all the same)")
        _say(complaint)
    return mount


def _say(text: str) -> None:
    sys.stderr.write(f"kernel: {text}\n")


def main() -> int:
    """Measure, print, write; 1 when a target is missed, 2 where this machine or user cannot."""
    parser = benchmark_parser("kernel", __doc__, has_figure=True)
    parser.add_argument(
        "--quick", action="store_true", help="a little of everything: shows that it runs, judges nothing"
    )
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    return run_benchmark(
        "kernel",
        options,
        lambda: measure(_clean_mount(tolerant=options.no_targets), plan),
        cannot=(ProbeError, HostsError, OSError),
    )


if __name__ == "__main__":
    sys.exit(main())
