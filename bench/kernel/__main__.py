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

import argparse
import asyncio
import contextlib
import os
import platform
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bench.kernel import arms, memory, reading, run_times
from bench.kernel.endpoints import EndpointError, Endpoints, endpoints
from bench.kernel.groups import Groups, made_groups
from bench.kernel.programs import Programs, others_attached
from bench.kernel.tables import print_tables
from bench.kernel.targets import judged
from bench.kernel.training import JOBS, LARGE, training
from bench.output import add_output_arguments, exit_code, write_json

from dynamix.collector.ebpf.cgroup import v2_mount
from dynamix.collector.errors import ProbeError

CANNOT_RUN = 2
_MOUNTINFO = Path("/proc/self/mountinfo")


class Plan(NamedTuple):
    """How much of everything."""

    timed_s: float
    """Of each kind of traffic, while the kernel times the programs."""
    timed_steps: int
    num_rounds: int
    bulk_s: float
    short_s: float
    """Of small messages and connections, of which there are many."""
    block_steps: int
    num_starts: int
    """Of collectors, with and without the probe."""
    num_readings: int


FULL = Plan(3.0, 200, 24, 1.0, 0.5, 16, 3, 200)
QUICK = Plan(0.1, 2, 2, 0.05, 0.05, 1, 1, 5)


def main() -> int:
    """Measure, print, write; 1 when a target is missed, 2 where this machine or user cannot."""
    options = _parser().parse_args()
    plan = QUICK if options.quick else FULL
    try:
        summary = measure(_clean_mount(tolerant=options.no_targets), plan)
    except (ProbeError, EndpointError, OSError) as error:
        sys.stderr.write(f"kernel: {error}\n")
        return CANNOT_RUN
    if options.json != "-":
        print_tables(summary)
    write_json(summary, options.json)
    if options.png:
        from bench.kernel.figure import draw  # noqa: PLC0415 - matplotlib: only once it is needed

        draw(summary, Path(options.png))
    missed = [target["name"] for target in summary["targets"] if not target["met"]]
    return exit_code("kernel", missed, options)


def measure(mount: Path, plan: Plan) -> dict[str, Any]:
    """All four parts, one after the other."""
    loads, others = [os.getloadavg()[0]], [others_attached([mount])]
    with made_groups(mount) as groups, Programs(groups.empty) as programs:
        with endpoints(groups.busy) as ends:
            times, compared = _of_loopback(programs, ends, groups, plan)
            read = reading.of_probe(ends, groups, plan.num_readings)
        trained, difference = _of_training(programs, groups, plan)
        rows = [*times, *trained]
        found = {
            "collector_bytes": asyncio.run(memory.of_collector(groups.empty, plan.num_starts)),
            "loader": memory.of_loader(),
            "maps_bytes": programs.map_bytes(),
        }
    return {
        "kernel": platform.release(),
        "num_processors": os.cpu_count(),
        "load_average": [*loads, os.getloadavg()[0]],
        "others_attached": [*others, others_attached([mount])],
        "run_times": rows,
        "arms": [*compared, difference],
        "memory": found,
        "reading": read,
        "targets": judged(rows),
    }


def _of_loopback(programs: Programs, ends: Endpoints, groups: Groups, plan: Plan) -> tuple[list[Any], list[Any]]:
    _say("run times under loopback traffic")
    times = run_times.of_loopback(programs, ends, groups, plan.timed_s)
    switch = arms.Arms(programs, groups)
    compared = []
    for workload, duration_s in (
        (run_times.BULK, plan.bulk_s),
        (run_times.ECHO, plan.short_s),
        (run_times.CONNECTIONS, plan.short_s),
    ):
        _say(f"arms: {workload.name}")
        compared.append(arms.of_loopback(switch, ends, workload, plan.num_rounds, duration_s))
    return times, compared


def _of_training(programs: Programs, groups: Groups, plan: Plan) -> tuple[list[Any], dict[str, Any]]:
    _say("run times and arms in a gloo job")
    with contextlib.ExitStack() as stack:
        with programs.attached(groups.busy):  # so that the probe knows the sockets of the job
            ranks = stack.enter_context(training(groups.busy))
        rows = [run_times.of_training(programs, ranks, job, groups, plan.timed_steps) for job in JOBS]
        switch = arms.Arms(programs, groups)
        return rows, arms.of_training(switch, ranks, LARGE, plan.num_rounds, plan.block_steps)


def _clean_mount(*, tolerant: bool) -> Path:
    """Where version 2 is mounted, with nothing attached to it.

    Raises:
        ProbeError: when this cannot be measured here.
    """
    if os.geteuid() != 0:
        raise ProbeError("only root may time programs, make control groups and look at what is attached: use sudo")
    mount = v2_mount(_MOUNTINFO.read_text())
    if mount is None:
        raise ProbeError("no control groups of version 2 are mounted: see `dynamix doctor`")
    if num := others_attached([mount]):
        complaint = f"{num} programs are attached to {mount} and would count in every arm: stop the collectors first"
        if not tolerant:
            raise ProbeError(f"{complaint} (--no-targets measures all the same)")
        _say(complaint)
    return mount


def _say(text: str) -> None:
    sys.stderr.write(f"kernel: {text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_output_arguments(parser)
    parser.add_argument("--png", metavar="FILE", help="draw run times and arms")
    parser.add_argument(
        "--quick", action="store_true", help="a little of everything: shows that it runs, judges nothing"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
