"""All of tests/faults at full counts, several times with other seeds: `python -m bench.faults [--rounds N]`.

Real processes, a real broker, and each test ends by comparing with the reference fold
(`tests/support/reference_fold.py`). The table shows for each fault in how many rounds it passed, the longest time
that it took, and the figures that its test measured: times as the worst of all rounds, counts as their sum. The exit
code is 1 when a test failed in any round.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET  # what pytest wrote a moment ago is read, nothing foreign
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness.command import BenchmarkReport, benchmark_parser, run_benchmark

ROUNDS = 5
WORKERS = 3
FOLDER = "tests/faults"


class FaultOutcome(NamedTuple):
    """One test in one round."""

    name: str
    passed: bool
    seconds: float
    figures: dict[str, str]


def measure(options: argparse.Namespace) -> BenchmarkReport:
    """Run all rounds; a test that failed in any of them is missed."""
    begin_s, rounds = time.monotonic(), []
    seeds = [options.seed + number for number in range(options.rounds)]
    for seed in seeds:
        outcomes, output = _run(seed, options)
        rounds.append(outcomes)
        failed = [outcome.name for outcome in outcomes if not outcome.passed]
        sys.stderr.write(f"seed {seed}: {len(outcomes) - len(failed)}/{len(outcomes)} passed {' '.join(failed)}\n")
        sys.stderr.write(output if failed or not outcomes else "")
    rows = summed(rounds)
    missed = [row["name"] for row in rows if row["passed"] < options.rounds] or ([] if rows else ["no test ran"])
    figures = {"seeds": seeds, "seconds": round(time.monotonic() - begin_s, 1), "faults": rows}
    return BenchmarkReport(figures, _text(rows, options.rounds), missed=missed)


def summed(rounds: Iterable[list[FaultOutcome]]) -> list[dict[str, Any]]:
    """One row per test, over all rounds."""
    rows: dict[str, dict[str, Any]] = {}
    for outcome in (outcome for outcomes in rounds for outcome in outcomes):
        row = rows.setdefault(
            outcome.name, {"name": outcome.name, "passed": 0, "total": 0, "seconds": 0.0, "figures": {}}
        )
        row["passed"] += outcome.passed
        row["total"] += 1
        row["seconds"] = max(row["seconds"], outcome.seconds)
        for name, value in outcome.figures.items():
            row["figures"][name] = _both(name, row["figures"].get(name), value)
    return sorted(rows.values(), key=lambda row: row["name"])


def _both(name: str, old: Any, new: str) -> Any:
    """Times as the worst, counts as the sum; a share (`300/300`) as the sum of both its sides."""
    if "/" in new:
        return "/".join(str(int(a) + int(b)) for a, b in zip((old or "0/0").split("/"), new.split("/"), strict=True))
    if name.endswith("_s"):
        return max(old or 0.0, float(new))
    return (old or 0) + int(new)


def _run(seed: int, options: argparse.Namespace) -> tuple[list[FaultOutcome], str]:
    with tempfile.TemporaryDirectory(prefix="dynamix-faults-") as directory:
        results = Path(directory) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", FOLDER, f"--faults={options.faults}", f"--faults-seed={seed}"]
        command += ["-n", str(options.workers), "--dist=worksteal", "-p", "no:cacheprovider"]
        command += [f"--junitxml={results}", "-o", "junit_family=xunit1"]  # the other family has no properties
        done = subprocess.run([*command, *options.pytest], capture_output=True, text=True, check=False)
        return (_outcomes(results) if results.exists() else []), done.stdout + done.stderr


def _outcomes(results: Path) -> list[FaultOutcome]:
    return [
        FaultOutcome(
            name=case.get("name", "").removeprefix("test_"),
            passed=case.find("failure") is None and case.find("error") is None and case.find("skipped") is None,
            seconds=float(case.get("time", "0")),
            figures={one.get("name", ""): one.get("value", "") for one in case.iter("property")},
        )
        for case in ET.parse(results).iter("testcase")
    ]


def _text(rows: list[dict[str, Any]], num_rounds: int) -> str:
    lines = [f"{'passed':>7}  {'worst s':>7}  fault, and what was counted in {num_rounds} rounds"]
    for row in rows:
        lines.append(f"{row['passed']:>3}/{row['total']:<3}  {row['seconds']:>7.1f}  {row['name'].replace('_', ' ')}")
        counted = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in row["figures"].items())
        lines += [f"{'':>18}{counted}"] if counted else []
    return "\n".join(lines)


def main() -> int:
    """Run the rounds, print the table; 1 when a test failed."""
    parser = benchmark_parser(
        *("faults", __doc__),
        ("--rounds", ROUNDS, "each with its own seed"),
        ("--seed", 1, "of the first round"),
        ("--workers", WORKERS, "tests at a time"),
    )
    parser.add_argument("--faults", choices=("quick", "full"), default="full", help="how much of each fault")
    parser.add_argument("pytest", nargs="*", metavar="ARGUMENT", help="more for pytest, after --")
    options = parser.parse_args()
    return run_benchmark("faults", options, lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
