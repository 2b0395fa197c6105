"""How fast a capture replays: `python -m bench.replay [--json FILE] [--workers N] [--windows N]`, about a minute.

A made-up recording of a job of nodes of eight ranks at one window a second (`bench.recording`) is played into each
service at full speed, in this one process, and must come out equal. Target: 50 times real time. It is also asked what a
policy that is code alone would have decided. Each row is the best of three, beside the reading of the file alone.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.output import add_output_arguments, exit_code, write_json
from bench.recording import write_recording

from dynamix.recording.capture import records
from dynamix.recording.replay import OtherPolicy, Outcome, Replay, replay

TARGET = 50.0
"""Times real time, of every service."""
REPEATS = 3


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write JSON; 1 when a target is missed, or a replay is not equal."""
    parser = argparse.ArgumentParser(prog="bench.replay", description=__doc__.splitlines()[0])
    add_output_arguments(parser)
    parser.add_argument("--workers", type=int, default=1000, help="ranks, eight to a node (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=120, help="one a second (default: %(default)s)")
    parser.add_argument("--policy", default="rule", help="who decided (default: %(default)s)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recording.dxc"
        write_recording(path, num_workers=given.workers, num_windows=given.windows, policy=given.policy)
        rows = [row(name, arm) for name, arm in arms(path).items()]
        size_mb = path.stat().st_size / 1e6
    figures = {"num_workers": given.workers, "num_windows": given.windows, "policy": given.policy, "file_mb": size_mb}
    if given.json != "-":
        print_table(figures, rows)
    write_json({**figures, "target_times_real_time": TARGET, "replays": rows}, given.json)
    slow = [f"{one['into']}: {one['times_real_time']:.0f}" for one in rows if one["times_real_time"] < TARGET]
    return exit_code("replay", slow + [f"{one['into']}: not equal" for one in rows if not one["equal"]], given)


Arm = Callable[[], tuple[float, bool]]
"""Seconds of the recording that were played, and whether that was equal."""


def arms(path: Path) -> dict[str, Arm]:
    """What is measured, by name."""

    def playing(asked: Replay) -> Arm:
        return lambda: _played(asyncio.run(replay(asked)))

    services: dict[str, Arm] = {into: playing(Replay(path, into)) for into in ("collector", "reward", "arbitrator")}
    asked = playing(Replay(path, "arbitrator", other=OtherPolicy("proportional", {})))
    return {**services, "arbitrator, asked": asked, "(reading alone)": lambda: _read(path)}


def row(name: str, arm: Arm) -> dict[str, Any]:
    """The best of a few."""
    taken_s, recorded_s, equal = [], 0.0, True
    for _ in range(REPEATS):
        begun_s = time.perf_counter()
        recorded_s, was_equal = arm()
        taken_s.append(time.perf_counter() - begun_s)
        equal = equal and was_equal
    return {
        "into": name,
        "recorded_s": recorded_s,
        "wall_s": min(taken_s),
        "times_real_time": recorded_s / min(taken_s),
        "equal": equal,
    }


def print_table(figures: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """For reading."""
    print(f"{figures['num_workers']} workers, {figures['num_windows']} windows, {figures['file_mb']:.1f} MB")
    print(f"{'into':<20}{'seconds':>10}{'x real time':>14}  equal")
    for one in rows:
        print(f"{one['into']:<20}{one['wall_s']:>10.2f}{one['times_real_time']:>14.1f}  {one['equal']}")


def _played(outcome: Outcome) -> tuple[float, bool]:
    return outcome.recorded_s, outcome.bytes_equal


def _read(path: Path) -> tuple[float, bool]:
    times = [record.timestamp_ns for record in records(path)]
    return (times[-1] - times[0]) / 1e9, True


if __name__ == "__main__":
    sys.exit(main())
