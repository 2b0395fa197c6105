"""What a running job loses and how long it has no decisions when a broker of three servers loses one.

`python -m bench.failover [--trials N] [--json FILE] [--keep FILE]`, some 30 minutes for 20 trials of each fault. Three
real nats-servers with three copies of each stream and an fsync per message, the real services, a job that reports a
window every 0.2 s, and a bystander that stores 200 to 400 messages a second:

none                the same without a fault
leader-kill         SIGKILL for the server that leads FEED, or in turn ACTIONS; it starts again once decisions are back
leader-freeze       the same server is frozen with its connections open, and goes on once decisions are back
rolling-restart     every server is stopped by SIGTERM and started again, one after the other
minority-partition  the link of the same server is cut, and healed once decisions are back and a client beside it, which
                    publishes and follows decisions, has left it; only with `--fault minority-partition`, as root: the
                    servers, job and services then live in network namespaces of their own

Lost is an acknowledged message (bystander's, report, action) that is not in its stream afterwards, or is another one.
The time without decisions is the longest from a window's report to its action at the reader. Judged are the messages;
the time has no target: nats-server waits for 4 to 9 s, which cannot be set, before others elect a leader in the place
of one that was killed. A trial that cannot be ended, because copies stay behind or a service ended, ends the
measurement and names what it waited for; with `--keep` the same command then goes on with the next trial, and counts
that one as failed.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from bench.failover.kept import KEPT, KeptOutcomes, TrialOutcome
from bench.failover.partition import servers_on
from bench.failover.servers import NUM_SERVERS, CopiesMissingError, ThreeServers
from bench.failover.trial import FAULTS, PARTITION, Fault, Scene, Trial, run_trial
from bench.harness.broker import run_with_uvloop
from bench.harness.command import BenchmarkError, BenchmarkReport, Target, benchmark_parser, run_benchmark
from bench.harness.document import TablePlace
from bench.harness.steady_job import SteadyJobError, running_job
from bench.harness.tables import formatted
from bench.hosts import Hosts, HostsError

from dynamix.cli.output import output_path
from dynamix.runtime.bus import Bus, BusError
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import EmbeddedServerError
from dynamix.schemas.streams import ACTIONS, FEED

BEGIN, END = "<!-- the table is made by `make failover` -->", "<!-- end of the table -->"
COLUMNS = {
    "fault": "{fault}",
    "trials": "{trials}",
    "acknowledged": "{acknowledged:,}",
    "lost": "{lost}",
    "without decisions, median [s]": "{median_s:.2f}",
    "shortest to longest [s]": "{shortest_s:.2f} to {longest_s:.2f}",
    "within 5 s": "{within_5_s} of {trials}",
}
SOON_S = 5.0
BEGIN_PARTITION = "<!-- this table is made by `python -m bench.failover --fault minority-partition` -->"
PARTITION_COLUMNS = {
    **COLUMNS,
    "link cut for [s]": "{cut_for_s}",
    "sent beside the server while cut": "{sent_while_cut:,}",
    "acknowledged there": "{acknowledged_while_cut:,}",
    "stored in the end": "{stored_of_these:,}",
    "left it after [s]": "{left_after_s}",
    "served again after the healing [s]": "{back_after_s}",
}


CANNOT_END = (SteadyJobError, CopiesMissingError, BenchmarkError, BusError, asyncio.TimeoutError)
"""Errors of a trial that was not ended."""


async def measure(servers: ThreeServers, kept: KeptOutcomes) -> None:
    """Run the trials that are missing, the faults in turn. Raises what one could not be ended for; that is kept."""
    under_way: tuple[int, Fault] | None = None
    try:
        async with servers, _bus(servers) as bus:
            await provision(bus, num_replicas=NUM_SERVERS)
            await servers.until_current(bus)
            async with running_job(servers.settings, bus) as job:
                for count, under_way in enumerate(kept.missing):
                    number, fault = under_way
                    stream = (FEED, ACTIONS)[number % 2].name
                    trial = await run_trial(Scene(servers, bus, job), fault, count, stream)
                    kept.add_outcome(TrialOutcome(number=number, fault=fault, trial=trial))
                    sys.stderr.write(f"{number + 1} {describe(trial)}\n")
                under_way = None
    except CANNOT_END as error:
        if under_way is not None:
            kept.add_outcome(TrialOutcome(number=under_way[0], fault=under_way[1], failed=str(error) or repr(error)))
        raise


@contextlib.asynccontextmanager
async def _bus(servers: ThreeServers) -> AsyncIterator[Bus]:
    bus = await Bus.connect(servers.settings, name="trainer")
    try:
        yield bus
    finally:
        await bus.close()


def describe(trial: Trial) -> str:
    """One trial in a line."""
    return (
        f"{trial.fault} ({trial.server}, {trial.stream}): {trial.lost} of {trial.acknowledged:,} lost, "
        f"without decisions for {trial.longest_wait_s:.2f} s"
    )


def summary(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """One row per fault."""
    rows = []
    for fault in dict.fromkeys(trial.fault for trial in trials):
        own = [trial for trial in trials if trial.fault == fault]
        times = [trial.longest_wait_s for trial in own]
        row = {
            "fault": fault,
            "trials": len(own),
            "acknowledged": sum(trial.acknowledged for trial in own),
            "lost": sum(trial.lost for trial in own),
            "median_s": statistics.median(times),
            "shortest_s": min(times),
            "longest_s": max(times),
            "within_5_s": sum(time <= SOON_S for time in times),
        }
        rows.append(row)
    return rows


def partition_summary(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The row of those trials in which a link was cut."""
    seen = [trial.minority for trial in trials if trial.minority is not None]
    (row,) = summary([trial for trial in trials if trial.minority is not None])
    sums = ("sent_while_cut", "acknowledged_while_cut", "stored_of_these")
    ranges = ("cut_for_s", "left_after_s", "back_after_s")
    row |= {name: sum(getattr(view, name) for view in seen) for name in sums}
    row |= {name: _range([getattr(view, name) for view in seen]) for name in ranges}
    whole = [view.whole_after_s for view in seen if view.whole_after_s is not None]
    row["whole_after_s"] = f"{statistics.median(whole):.1f} ({_range(whole)})" if whole else "-"
    return [row]


def _range(times: Sequence[float]) -> str:
    return f"{min(times):.1f} to {max(times):.1f}"


@contextlib.contextmanager
def _servers_for(faults: Sequence[Fault]) -> Iterator[ThreeServers]:
    """On loopback; or on hosts, among which this process then lives, too."""
    if PARTITION not in faults:
        yield ThreeServers()
        return
    with Hosts(NUM_SERVERS) as hosts, hosts.entered():
        yield servers_on(hosts)


def report_of(options: argparse.Namespace) -> BenchmarkReport:
    """Measure, and write the table into a document that has a place for it."""
    faults = options.fault or [fault for fault in FAULTS if fault != PARTITION]
    is_partition = list(faults) == [PARTITION]
    place = TablePlace(options.document, BEGIN_PARTITION if is_partition else BEGIN, END)
    kept = KeptOutcomes(faults, options.trials, Path(options.keep) if options.keep else None)
    if kept.missing:
        with _servers_for(faults) as servers:
            run_with_uvloop(measure(servers, kept))
    trials = kept.trials
    if not trials:
        raise BenchmarkError("; ".join(["no trial could be ended", *kept.failures]))
    rows, columns = (partition_summary(trials), PARTITION_COLUMNS) if is_partition else (summary(trials), COLUMNS)
    cells = [[cell.format_map(row) for cell in columns.values()] for row in rows]
    place.write([*columns], cells, num_left=1)
    lost = sum(trial.lost for trial in trials)
    targets = [
        Target(name="acknowledged messages lost", value=lost, at_most=0),
        Target(name="actions out of their chain", value=sum(trial.out_of_chain for trial in trials), at_most=0),
        Target(name="trials that could not be ended", value=len(kept.failures), at_most=0),
    ]
    figures = {"summary": rows, "trials": [msgspec.to_builtins(trial) for trial in trials], "failures": kept.failures}
    return BenchmarkReport(figures, "\n".join([formatted(rows, columns), *kept.failures]), targets)


def main() -> int:
    """Run the trials; 1 when a message was lost, 2 when a service or a server failed."""
    parser = benchmark_parser("failover", __doc__, ("--trials", 20, "of each fault"))
    parser.add_argument("--fault", choices=FAULTS, action="append", help="only this one (may be repeated)")
    parser.add_argument("--document", metavar="FILE", help="write the table into this Markdown file, between its marks")
    what = "keep each trial's result in this file, and run none again that is in it; a fresh name begins again"
    parser.add_argument("--keep", metavar="FILE", type=output_path(KEPT, make_parents=True), help=what)
    options = parser.parse_args()
    cannot = (*CANNOT_END, EmbeddedServerError, HostsError)
    return run_benchmark("failover", options, lambda: report_of(options), cannot=cannot)


if __name__ == "__main__":
    sys.exit(main())
