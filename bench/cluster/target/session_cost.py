"""What a session takes of a step: `python -m bench.cluster.target.session_cost [--seeds N] [--seconds S]`. For root.

Jobs on equal hosts with shares of the processor (bench.hosts), all with the script's own 32 samples per rank: plain
DDP, a session whose sizes stay with windows of two lengths, and with those of a script that does not say how long they
shall be, which last a second; and one whose ranks divide the batch, with such windows. They train in turn,
in another order each time. What is called processor time here, of the rank and of its collector, is the length of a
step times the host's share: what the host could have computed meanwhile. It includes waiting for other ranks. Beside it
stands what the hosts' control groups count, which other work on the machine disturbs less. Nothing else should run on
the machine meanwhile.

per step, per window   processor time of a host that a session adds, by the lengths of windows: what the predictions of
                       `bench.cluster --target` are charged (prediction.py)
"""

import argparse
import asyncio
import math
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness.command import BenchmarkReport, benchmark_parser, run_benchmark
from bench.harness.tables import formatted
from bench.hosts import Host, Hosts, HostsError
from bench.results.result import mean_of

from .arms import TargetArm
from .cases import CASES
from .outcomes import TargetPoint, TargetRun
from .runner import target_runner

SHORT_WINDOW, LONG_WINDOW = 3, 10
ARMS: Mapping[str, TargetArm] = {
    "plain": TargetArm(policy=None),
    f"static, windows of {LONG_WINDOW}": TargetArm(policy="static", window_steps=LONG_WINDOW),
    f"static, windows of {SHORT_WINDOW}": TargetArm(policy="static", window_steps=SHORT_WINDOW),
    "static": TargetArm(policy="static"),
    "split": TargetArm(policy="split", global_batch="fixed"),
}
INTERVAL = "{0.value:.2f} [{0.low:.2f}, {0.high:.2f}]"
COLUMNS = {
    "processor time of a step, ms": "{arm}",
    "mean": INTERVAL.replace("{0", "{time"),
    "beside plain": INTERVAL.replace("{0", "{more"),
    "counted": INTERVAL.replace("{0", "{used"),
    "beside plain, counted": INTERVAL.replace("{0", "{used_more"),
}
RunTimes = dict[str, list[float]]
GRID_S = 1.0
WARM_UP_S = 2.0
EQUAL = CASES["equal"]


def step_s(points: Sequence[TargetPoint]) -> float:
    """Mean time of a step after the warm-up."""
    first = next(point for point in points if point.trained_s >= WARM_UP_S)
    return (points[-1].trained_s - first.trained_s) / (points[-1].num_steps - first.num_steps)


def used_s(usage_s: Sequence[float], points: Sequence[TargetPoint]) -> float:
    """Mean of what the hosts used of a processor per step after the warm-up, from their sum at each point."""
    first = next(number for number, point in enumerate(points) if point.trained_s >= WARM_UP_S)
    num_steps = points[-1].num_steps - points[first].num_steps
    return (usage_s[len(points) - 1] - usage_s[first]) / num_steps / EQUAL.num_hosts


def _usage_s(hosts: Iterable[Host]) -> float:
    """Seconds of processors that all hosts have used."""
    texts = [(host.cgroup / "cpu.stat").read_text().split() for host in hosts]
    return sum(int(text[text.index("usage_usec") + 1]) for text in texts) / 1e6


def parts_of(plain_s: float, static_s: float, short_s: float) -> tuple[float, float]:
    """Processor time per step and per window, from the processor time of a step without and with sessions."""
    window_s = (short_s - static_s) / (1 / SHORT_WINDOW - 1 / LONG_WINDOW)
    return static_s - plain_s - window_s / LONG_WINDOW, window_s


async def _train_all(hosts: Hosts, options: argparse.Namespace) -> tuple[RunTimes, RunTimes]:
    """The processor time of a step in each run, by arm, in milliseconds: what passed, and what was used."""
    found: RunTimes = {name: [] for name in ARMS}
    used: RunTimes = {name: [] for name in ARMS}
    generator = random.Random(options.seeds)
    with tempfile.TemporaryDirectory(prefix="dynamix-session-cost-") as name:
        directory = Path(name)
        async with target_runner(hosts, directory, None) as runner:
            for seed in range(1, 1 + options.seeds):
                for row in generator.sample(sorted(ARMS), len(ARMS)):
                    run = TargetRun(case=EQUAL, arm=ARMS[row], seed=seed, target_accuracy=1.0, grid_s=GRID_S)
                    usage_s: list[float] = []
                    watch = partial(_note_usage, usage_s, hosts)
                    outcome = await runner.run(run, options.seconds, directory / "capture.dxc", watch)
                    found[row].append(1e3 * EQUAL.cores * step_s(outcome.points))
                    used[row].append(1e3 * used_s(usage_s, outcome.points))
                    sys.stderr.write(
                        f"seed {seed} of {options.seeds}, {row}: {found[row][-1]:.2f} ms, {used[row][-1]:.2f} counted\n"
                    )
    return found, used


def _note_usage(usage_s: list[float], hosts: Hosts, *_: object) -> None:
    usage_s.append(_usage_s(hosts))


def report(found: Mapping[str, Sequence[float]], used: Mapping[str, Sequence[float]]) -> BenchmarkReport:
    """Table and figures of processor times by arm, passed and `used`, in milliseconds, run for run of equal seeds."""
    rows: list[dict[str, Any]] = [
        {
            "arm": name,
            "time": mean_of(times),
            "more": mean_of([a - b for a, b in zip(times, found["plain"], strict=True)]),
            "used": mean_of(used[name]),
            "used_more": mean_of([a - b for a, b in zip(used[name], used["plain"], strict=True)]),
        }
        for name, times in found.items()
    ]
    static, short = (found[name] for name in list(ARMS)[1:3])
    parts = [parts_of(*times) for times in zip(found["plain"], static, short, strict=True)]
    per_step, per_window = (mean_of(list(values)) for values in zip(*parts, strict=True))
    table = formatted(rows, COLUMNS)
    text = (
        f"{table}\n\nOf a session, ms: {INTERVAL.format(per_step)} per step, {INTERVAL.format(per_window)} per window."
    )
    return BenchmarkReport(
        {"processor_ms": found, "used_ms": used, "per_step_ms": per_step, "per_window_ms": per_window}, text
    )


def measure(options: argparse.Namespace) -> BenchmarkReport:
    """Train all arms in turn.

    Raises:
        HostsError: when there can be no such hosts here, or this user may not make them.
    """
    with Hosts(EQUAL.num_hosts) as hosts, hosts.entered():
        return report(*asyncio.run(_train_all(hosts, options)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    parser = benchmark_parser(
        *("cluster.target.session_cost", __doc__),
        ("--seeds", 6, "runs of each arm"),
        ("--seconds", 8.0, f"training time of a run, of which the first {WARM_UP_S:g} s do not count"),
    )
    options = parser.parse_args(arguments)
    if options.seeds < 2 or not WARM_UP_S + 2 * GRID_S <= options.seconds < math.inf:
        parser.error(f"--seeds is at least 2, --seconds at least {WARM_UP_S + 2 * GRID_S:g}")
    return run_benchmark("session_cost", options, lambda: measure(options), cannot=(HostsError,))


if __name__ == "__main__":
    sys.exit(main())
