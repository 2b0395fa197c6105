"""How soon a restarted arbitrator decides an honest job beside a crowd of jobs that never end, and what it holds.

`python -m bench.floods.restart [--json FILE] [--document FILE]`, some 10 minutes. For each crowd a broker, the real
services and a job that reports a window every 0.2 s; then the crowd's specifications and one report of each job, all of
which the arbitrator opens and keeps. It is killed and started again at once, some times. Shown are the time from the
kill to the next decision of the honest job, that until all jobs wait no longer to be opened, and the resident memory of
the processes. Without a crowd it is what a restart costs by itself.

10,000 jobs of 4 ranks are the crowd of `bench.floods --flood jobs`, and as many jobs as an arbitrator holds by default
(`max_jobs`); 1,000 of 1,000 ranks are as many ranks (`max_ranks`).
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from bench.floods.senders import SMALL_RANKS, job_on_one_node, measured_of
from bench.harness.broker import broker_with_bus, run_with_uvloop
from bench.harness.command import BenchmarkError, BenchmarkReport, Target, benchmark_parser, run_benchmark
from bench.harness.document import TablePlace
from bench.harness.steady_job import SteadyJob, running_services
from bench.harness.tables import aligned
from bench.messages.load import Parcel, parcel

from dynamix.arbitrator.service import ArbitratorSettings
from dynamix.cli.services import SERVICES, ServiceProcess, hear
from dynamix.runtime.bus import Bus, BusError
from dynamix.runtime.embedded import EmbeddedServerError
from dynamix.schemas.messages import Live

BEGIN, END = "<!-- this table is made by `python -m bench.floods.restart` -->", "<!-- end of the table -->"
HEADINGS = [
    "jobs beside the honest one",
    "decided again after: median, longest [s]",
    "all opened after: median [s]",
    "arbitrator before / after a restart [MiB]",
    "collector [MiB]",
    "reward [MiB]",
]
CROWDS = ((0, SMALL_RANKS), (10_000, SMALL_RANKS), (1_000, 1_000))
"""Jobs, and ranks of each."""
MAX_DECIDED_S = 5.0
"""Target of a restart with any crowd: a new process is most of it, some 2 s beside other work."""
OPENED_TIMEOUT_S = 400.0
DECIDED_TIMEOUT_S = 120.0
STEADY_S = 3.0


class RestartResult(msgspec.Struct, frozen=True, kw_only=True):
    """What restarts beside one crowd came to."""

    num_jobs: int
    ranks_of_each: int
    decided_s: tuple[float, ...]
    """From each kill to the next decision of the honest job."""
    opened_s: tuple[float, ...]
    """From each kill until as many jobs are held as before and none waits."""
    held: tuple[int, int]
    """Jobs that the arbitrator held before the restarts, and after the last one."""
    resident_bytes: dict[str, int]
    """Resident memory of each service before the restarts."""
    resident_after_bytes: int
    """The arbitrator's after the last one."""
    num_out_of_chain: int


class Crowd(NamedTuple):
    """Jobs that never end."""

    num_jobs: int
    ranks_of_each: int

    @property
    def num_held(self) -> int:
        """How many jobs an arbitrator then holds at most, with the honest one."""
        bounds = ArbitratorSettings()
        return min(self.num_jobs + 1, bounds.max_jobs, bounds.max_ranks // self.ranks_of_each)

    def parcels(self) -> Iterator[Parcel]:
        """Specifications, and a report of each job to the honest job's collector."""
        measured = measured_of(job_on_one_node("fake-0", self.ranks_of_each)).report
        rows = tuple(msgspec.structs.replace(row, sockets=None, sockets_before=None) for row in measured.rows)
        report = msgspec.structs.replace(measured, rows=rows)  # so that FEED has room for those of all
        for number in range(self.num_jobs):
            job = job_on_one_node(f"fake-{number}", self.ranks_of_each)
            yield parcel(job)
            yield parcel(msgspec.structs.replace(report, job=job.job))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


async def measure(crowd: Crowd, num_restarts: int) -> RestartResult:
    """Let the arbitrator open a crowd, and start it again some times.

    Raises:
        SteadyJobError: when a service ended by itself, or a window was not decided at all.
        BenchmarkError: when the crowd was not opened in time.
    """
    async with (
        broker_with_bus("trainer") as (server, bus),
        running_services(lambda _: server.settings, bus) as services,
    ):
        processes = {service.name: service for service in services}
        arbitrator, job = processes["arbitrator"], SteadyJob(bus)
        async with job.running():
            await asyncio.gather(*[await bus.publish_bytes_soon(*one) for one in crowd.parcels()])
            held = await _opened(bus, crowd.num_held, since_s=0.0)
            await asyncio.sleep(STEADY_S)
            before = {name: resident_bytes(processes[name].pid) for name in SERVICES}
            decided_s, opened_s = [], []
            for _ in range(num_restarts):
                killed_s, decided = await _restarted(arbitrator, job)
                decided_s.append(decided)
                again = await _opened(bus, held, since_s=killed_s)
                opened_s.append(time.monotonic() - killed_s)
                await asyncio.sleep(STEADY_S)
            after = resident_bytes(arbitrator.pid)
            async with job.paused(DECIDED_TIMEOUT_S):
                return RestartResult(
                    num_jobs=crowd.num_jobs,
                    ranks_of_each=crowd.ranks_of_each,
                    decided_s=tuple(decided_s),
                    opened_s=tuple(opened_s),
                    held=(held, again),
                    resident_bytes=before,
                    resident_after_bytes=after,
                    num_out_of_chain=job.num_out_of_chain(),
                )


async def _restarted(arbitrator: ServiceProcess, job: SteadyJob) -> tuple[float, float]:
    """Kill it and start it again; when, and how long the honest job then waits for its next decision."""
    arbitrator.kill()
    killed_s = time.monotonic()
    await asyncio.sleep(0.1)  # what was decided before is read by then
    num_before = len(job.actions)
    arbitrator.start()
    async with asyncio.timeout(DECIDED_TIMEOUT_S):
        while len(job.actions) == num_before:  # noqa: ASYNC110 - tells more than the newest window's event
            await asyncio.sleep(0.01)
    return killed_s, time.monotonic() - killed_s


async def _opened(bus: Bus, num_jobs: int, since_s: float) -> int:
    """Wait until the arbitrator that was started since holds so many jobs and none waits; how many it holds."""
    newest: dict[str, int] = {}

    def is_done(beat: Live) -> bool:
        if since_s and beat.uptime_s > time.monotonic() - since_s:
            return False  # of the one that was killed
        newest.update(beat.counters)
        return newest.get("jobs", 0) >= num_jobs and not newest.get("jobs_waiting", 0)

    try:
        async with asyncio.timeout(OPENED_TIMEOUT_S):
            await hear(bus, is_done, "arbitrator")
    except TimeoutError:
        found = f"{newest.get('jobs', 0)} held, {newest.get('jobs_waiting', 0)} wait"
        raise BenchmarkError(f"of {num_jobs} jobs not all are opened after {OPENED_TIMEOUT_S:g} s: {found}") from None
    return newest["jobs"]


def cells_of(result: RestartResult) -> list[str]:
    """One row of the table."""
    middle, resident = len(result.decided_s) // 2, result.resident_bytes
    decided, opened = sorted(result.decided_s), sorted(result.opened_s)
    mib = {name: f"{size / 2**20:,.0f}" for name, size in resident.items()}
    return [
        f"{result.num_jobs:,} of {result.ranks_of_each:,} ranks" if result.num_jobs else "none",
        f"{decided[middle]:.1f}, {decided[-1]:.1f}",
        f"{opened[middle]:.1f}",
        f"{mib['arbitrator']} / {result.resident_after_bytes / 2**20:,.0f}",
        mib["collector"],
        mib["reward"],
    ]


def targets_of(results: Sequence[RestartResult]) -> list[Target]:
    """What each crowd is judged by."""
    return [
        target
        for one in results
        for target in (
            Target(
                name=f"{one.num_jobs:,} jobs: decided again after, s", value=max(one.decided_s), at_most=MAX_DECIDED_S
            ),
            Target(name=f"{one.num_jobs:,} jobs: actions out of their chain", value=one.num_out_of_chain, at_most=0),
        )
    ]


def report_of(options: argparse.Namespace) -> BenchmarkReport:
    """Measure each crowd, and write the table into a document that has a place for it."""
    place = TablePlace(options.document, BEGIN, END)
    results = []
    for num_jobs, ranks_of_each in CROWDS:
        crowd = Crowd(round(num_jobs * options.size), ranks_of_each)
        results.append(run_with_uvloop(measure(crowd, options.restarts)))
        sys.stderr.write(f"floods.restart: {' | '.join(cells_of(results[-1]))}\n")
    cells = [cells_of(result) for result in results]
    place.write(HEADINGS, cells, num_left=1)
    figures = {"restarts": [msgspec.to_builtins(result) for result in results]}
    return BenchmarkReport(figures, aligned(HEADINGS, cells), targets_of(results))


def main() -> int:
    """Measure; 1 when a restart took too long, 2 when a service failed."""
    parser = benchmark_parser(
        *("floods.restart", __doc__),
        ("--size", 1.0, "of each crowd, over the full one"),
        ("--restarts", 5, "of the arbitrator beside each crowd"),
    )
    parser.add_argument("--document", metavar="FILE", help="write the table into this Markdown file, between its marks")
    options = parser.parse_args()
    return run_benchmark("floods.restart", options, lambda: report_of(options), cannot=(BusError, EmbeddedServerError))


if __name__ == "__main__":
    sys.exit(main())
