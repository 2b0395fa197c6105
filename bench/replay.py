"""How fast a capture replays: `python -m bench.replay [--json FILE] [--workers N] [--windows N]`, about a minute.

A generated recording (`bench.messages.recording`) of a job of nodes of eight ranks at one window a second is played
into each service at full speed, in this one process, and must come out equal. Target: 50 times real time. It is also
asked what a policy that is code alone would have decided. Each row is the best of three, beside reading the file alone.
"""

import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness.command import BenchmarkReport, Target, benchmark_parser, run_benchmark
from bench.harness.rounds import Timed
from bench.harness.tables import formatted
from bench.messages.recording import write_recording

from dynamix.recording.capture import records
from dynamix.recording.replay import OtherPolicy, ReplayRequest, ReplayTarget, replay

TARGET = 50.0
"""Times real time, of every service."""
REPEATS = 3
COLUMNS = {"into": "{into}", "seconds": "{wall_s:.2f}", "x real time": "{times_real_time:.1f}", "equal": "{equal}"}


def main() -> int:
    """Measure, print a table, write JSON; 1 when a target is missed, or a replay is not equal."""
    parser = benchmark_parser(
        *("replay", __doc__),
        ("--workers", 1000, "ranks, eight to a node"),
        ("--windows", 120, "one a second"),
        ("--policy", "rule", "which decided"),
    )
    options = parser.parse_args()
    return run_benchmark("replay", options, lambda: measure(options.workers, options.windows, options.policy))


def measure(num_workers: int, num_windows: int, policy: str) -> BenchmarkReport:
    """Write the recording and replay it into every service."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recording.dxc"
        write_recording(path, num_workers=num_workers, num_windows=num_windows, policy=policy)
        rows = [row(name, arm) for name, arm in arms(path).items()]
        size_mb = path.stat().st_size / 1e6
    title = f"{num_workers} workers, {num_windows} windows, {size_mb:.1f} MB\n"
    return BenchmarkReport(
        {
            "num_workers": num_workers,
            "num_windows": num_windows,
            "policy": policy,
            "file_mb": size_mb,
            "target_times_real_time": TARGET,
            "replays": rows,
        },
        title + formatted(rows, COLUMNS),
        [Target(name=f"{one['into']}, x real time", value=one["times_real_time"], at_least=TARGET) for one in rows],
        [f"{one['into']}: not equal" for one in rows if not one["equal"]],
    )


Arm = Callable[[], tuple[float, bool]]
"""Seconds of the recording that were played, and whether that was equal."""


def arms(path: Path) -> dict[str, Arm]:
    """What is measured, by name."""

    def playing(request: ReplayRequest) -> Arm:
        def play() -> tuple[float, bool]:
            outcome = asyncio.run(replay(request))
            return outcome.recorded_s, outcome.bytes_equal

        return play

    targets: tuple[ReplayTarget, ...] = ("collector", "reward", "arbitrator")
    services = {str(into): playing(ReplayRequest(path, into)) for into in targets}
    asked = playing(ReplayRequest(path, "arbitrator", other=OtherPolicy("proportional", {})))
    return {**services, "arbitrator, asked": asked, "(reading alone)": lambda: _read(path)}


def row(name: str, arm: Arm) -> dict[str, Any]:
    """The best of a few."""
    taken_s, outcomes = [], []
    for _ in range(REPEATS):
        with Timed() as done:
            outcomes.append(arm())
        taken_s.append(done.timing.wall_s)
    recorded_s = outcomes[-1][0]
    return {
        "into": name,
        "recorded_s": recorded_s,
        "wall_s": min(taken_s),
        "times_real_time": recorded_s / min(taken_s),
        "equal": all(equal for _, equal in outcomes),
    }


def _read(path: Path) -> tuple[float, bool]:
    times = [record.timestamp_ns for record in records(path)]
    return (times[-1] - times[0]) / 1e9, True


if __name__ == "__main__":
    sys.exit(main())
