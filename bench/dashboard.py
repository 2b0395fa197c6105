"""What the page costs: `python -m bench.dashboard [--jobs N] [--ranks N] [--seconds S] [--json FILE]`.

A broker, jobs whose nodes of eight ranks send a window every `--period` seconds with all that their services would send
for it, `dynamix dashboard` in a process of its own, and a headless Chromium that shows one of the jobs. It needs
Chromium. Sizes do not follow the decisions; services and training processes are not there.

server     CPU time over wall time, and resident memory at the end
renderer   the process that runs the page: its memory (PSS) at the end, and the live JavaScript objects among it
action     from the acknowledgement of an action by the broker to the row in the page, as asked every 20 ms
"""

import asyncio
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from bench.harness.broker import broker_with_bus, run_with_uvloop
from bench.harness.browser import Browser, find_browser
from bench.harness.command import BenchmarkError, BenchmarkReport, Target, benchmark_parser, run_benchmark
from bench.messages.load import Load, job_of

from dynamix.cli.services import bus_environment
from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.messages import Action, Applied, Job

SERVER_SHARE, RENDERER_MB, ACTION_S = 0.05, 150.0, 1.0
LAG = 2
MIB = 1 << 20
ASK_EVERY_S = 0.02
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
NEWEST = "document.querySelector('tbody td')?.textContent"


class WatchedJobs:
    """Jobs that send a window each, and remember when the first one's action was stored."""

    def __init__(self, bus: Bus, num_jobs: int, num_ranks: int, period_s: float) -> None:
        self._bus = bus
        self._period_s = period_s
        self.jobs = [job_of(f"bench-{number:08x}", num_ranks, "rule", seed=number) for number in range(num_jobs)]
        self._loads = [Load(job, seed=number) for number, job in enumerate(self.jobs)]
        self.stored_s: dict[int, float] = {}
        """When the broker acknowledged the newest job's action, by window."""

    async def send(self) -> None:
        """Send windows until cancelled; the jobs take turns within a period."""
        for job in self.jobs:
            await self._bus.publish(job)
        begin_s, window = time.monotonic(), 0
        while True:
            for number, (job, load) in enumerate(zip(self.jobs, self._loads, strict=True)):
                due_s = begin_s + self._period_s * (window + number / len(self.jobs))
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                await self._send_window(job, load, window)
            window += 1

    async def _send_window(self, job: Job, load: Load, window: int) -> None:
        for message in (*load.windows(window), *load.rewards(window)):
            await self._bus.publish_soon(message)
        await self._bus.publish(_action(job, window))
        if job is self.jobs[-1]:
            self.stored_s[window] = time.monotonic()
        if window >= LAG:
            await self._bus.publish_soon(_applied(job, window - LAG))


def _action(job: Job, window: int) -> Action:
    sizes = job.initial_local_batch_sizes
    return Action(
        job=job.job,
        generation=0,
        window=window,
        local_batch_sizes=sizes,
        deltas=(0,) * len(sizes),
        policy=job.policy,
        policy_version=3,
        watermark=0,
        carry=bytes(32 * len(sizes)),
    )


def _applied(job: Job, decided: int) -> Applied:
    return Applied(
        job=job.job,
        generation=0,
        decided_window=decided,
        effective_window=decided + LAG,
        effective_step=(decided + LAG) * job.window_steps,
        local_batch_sizes=job.initial_local_batch_sizes,
    )


class PageCost(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured while the page was open."""

    num_jobs: int
    num_ranks: int
    period_s: float
    measured_s: float
    server_cpu_share: float
    server_rss_mb: float
    renderer_pss_mb: float
    browser_pss_mb: float
    """All processes of the browser."""
    js_heap_mb: float
    num_actions: int
    action_median_s: float
    action_max_s: float


async def measure(num_jobs: int, num_ranks: int, period_s: float, seconds: float) -> BenchmarkReport:
    """Run everything for so long. Raises BenchmarkError without a browser."""
    if find_browser() is None:
        raise BenchmarkError("no Chromium is installed: apt-get install chromium")
    async with broker_with_bus("dashboard") as (server, bus):
        watched = WatchedJobs(bus, num_jobs, num_ranks, period_s)
        sending = asyncio.create_task(watched.send())
        try:
            found = await _measured(watched, server.settings, period_s, seconds)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    targets = [
        Target(name="server, share of a core", value=found.server_cpu_share, at_most=SERVER_SHARE),
        Target(name="renderer, MB", value=found.renderer_pss_mb, at_most=RENDERER_MB),
        Target(name="an action on the page, s, at most", value=found.action_max_s, at_most=ACTION_S),
    ]
    figures: dict[str, Any] = msgspec.structs.asdict(found)
    text = "\n".join(f"{name:18} {value:.4g}" for name, value in figures.items())
    return BenchmarkReport(figures, text, targets)


async def _measured(watched: WatchedJobs, settings: BusSettings, period_s: float, seconds: float) -> PageCost:
    command = [sys.executable, "-m", "dynamix.cli.main", "dashboard", "--port", "0"]
    environ = {**os.environ, **bus_environment(settings)}
    process = await asyncio.create_subprocess_exec(*command, env=environ, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        url = (await process.stderr.readline()).decode().split()[0]
        with Browser() as browser:
            browser.resize(1400, 1000)
            browser.open(url)
            await asyncio.to_thread(browser.wait_for, f"{NEWEST} !== undefined")
            begin_s, cpu_before_s = time.monotonic(), _cpu_s(process.pid)
            delays = await _delays(browser, watched, seconds)
            measured_s = time.monotonic() - begin_s
            cpu_s = _cpu_s(process.pid) - cpu_before_s
            browser.call("HeapProfiler.collectGarbage")
            heap = {one["name"]: one["value"] for one in browser.call("Performance.getMetrics")["metrics"]}
            memory = {pid: _pss_mb(pid) for pid in browser.processes()}
            renderers = [memory[pid] for pid, kind in browser.processes().items() if kind == "renderer"]
            rss_mb = _status_kb(process.pid, "VmRSS") / 1024
    finally:
        process.terminate()
        await process.wait()
    return PageCost(
        num_jobs=len(watched.jobs),
        num_ranks=watched.jobs[0].world_size,
        period_s=period_s,
        measured_s=measured_s,
        server_cpu_share=cpu_s / measured_s,
        server_rss_mb=rss_mb,
        renderer_pss_mb=max(renderers, default=0.0),
        browser_pss_mb=sum(memory.values()),
        js_heap_mb=heap["JSHeapUsedSize"] / MIB,
        num_actions=len(delays),
        action_median_s=statistics.median(delays) if delays else float("nan"),
        action_max_s=max(delays, default=float("nan")),
    )


async def _delays(browser: Browser, watched: WatchedJobs, seconds: float) -> list[float]:
    """How long after their acknowledgement the newest job's actions were seen, for so many seconds."""
    found: dict[int, float] = {}
    end_s = time.monotonic() + seconds
    seen = -1
    while (now_s := time.monotonic()) < end_s:
        text = await asyncio.to_thread(browser.evaluate, NEWEST)
        window = int(text) if text else -1
        if window > seen >= 0 and window in watched.stored_s:
            found[window] = max(0.0, now_s - watched.stored_s[window])
        seen = max(seen, window)
        await asyncio.sleep(ASK_EVERY_S)
    return list(found.values())


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _status_kb(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _pss_mb(pid: int) -> float:
    """Memory of a process, shared pages in equal parts; 0 of one that ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def main() -> int:
    """Run from the command line; exit code 1 when a target is missed."""
    parser = benchmark_parser(
        "dashboard",
        __doc__,
        ("--jobs", 10, "jobs that run"),
        ("--ranks", 32, "ranks of each, eight to a node"),
        ("--period", 1.0, "seconds between two windows of a job"),
        ("--seconds", 60.0, "how long the page is watched"),
    )
    options = parser.parse_args()
    if min(options.jobs, options.ranks) < 1 or min(options.period, options.seconds) <= 0:
        parser.error("--jobs, --ranks, --period and --seconds must be above 0")
    measured = measure(options.jobs, options.ranks, options.period, options.seconds)
    return run_benchmark("dashboard", options, lambda: run_with_uvloop(measured))


if __name__ == "__main__":
    sys.exit(main())
