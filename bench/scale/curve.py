"""The curve: `make scale` measures 32, 128, 1,024 and 10,000 workers in one job each, by two policies; 8 minutes.

Writes docs/scale.json, docs/scale.png and the table of docs/scale.md. Cost must grow no faster than the number of
workers: CPU time of the arbitrator per window and the median latency over the whole range, and CPU time over its last
step, where nothing fixed flatters any more. The latency of the last step is not judged: other work on the machine
lengthens what takes long by more than what is short.
"""

import argparse
import asyncio
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import uvloop
from bench.output import exit_code
from bench.scale.document import with_table
from bench.scale.figure import draw
from bench.scale.generator import ScaleError
from bench.scale.ingest import NUM_MESSAGES
from bench.scale.measurement import measure
from bench.scale.plan import Plan
from bench.scale.result import Result, describe, missed

from dynamix.cli.output import output_directory
from dynamix.runtime import output_files

SIZES = (32, 128, 1024, 10_000)
POLICIES = ("static", "rule")
"""The one that does nothing shows what moving the messages costs; `rule` is the default of a job."""
SECONDS = 40.0
MAX_EXPONENT = 1.0
MAX_LAST_EXPONENT = 1.15
"""Of CPU time in the last step; repeated runs differ by 15 % on a shared machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when a target is missed, 2 when there is nothing to judge."""
    options = _parser().parse_args(arguments)
    plans = [
        Plan(num_workers=size, policy=policy, seconds=options.seconds)
        for policy in options.policies
        for size in options.sizes
    ]
    results = []
    for number, plan in enumerate(plans, start=1):
        sys.stderr.write(f"scale: {number} of {len(plans)}: {plan.num_workers:,} workers, {plan.policy}\n")
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                results.append(runner.run(measure(plan, ingest_messages=options.ingest_messages, say=False)))
        except ScaleError as error:
            sys.stderr.write(f"scale: {error}\n")
            return 2
        print(describe(results[-1]), flush=True)
    write(results, options.docs)
    return exit_code("scale", [*(target for one in results for target in missed(one)), *too_steep(results)], options)


def write(results: Sequence[Result], docs: Path) -> None:
    """The figures, the picture and, where there is a document, its table."""
    docs.mkdir(parents=True, exist_ok=True)
    output_files.write(docs / "scale.json", msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    draw(results, docs / "scale.png")
    document = docs / "scale.md"
    if document.exists():
        output_files.write(document, with_table(document.read_text(), results).encode())


def too_steep(results: Sequence[Result]) -> list[str]:
    """Where cost grew faster than the number of workers, in words."""
    found = []
    for policy, curve in by_policy(results):
        for what, field in (("CPU", "cpu_percent"), ("median latency", "decision_latency_p50_ms")):
            if len(curve) < 2:
                continue
            overall, last = exponent(curve[0], curve[-1], field), exponent(curve[-2], curve[-1], field)
            if not overall <= MAX_EXPONENT or (field == "cpu_percent" and not last <= MAX_LAST_EXPONENT):
                found.append(f"{policy}: {what} grows with the power {overall:.2f} of the workers, {last:.2f} last")
    return found


def by_policy(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """The results of each policy, by size."""
    for policy in dict.fromkeys(result.policy for result in results):
        yield policy, sorted((one for one in results if one.policy == policy), key=lambda one: one.workers)


def exponent(before: Result, after: Result, field: str) -> float:
    """The power of the number of workers that a figure grew with; NaN where it was 0."""
    low, high = getattr(before, field), getattr(after, field)
    return math.log(high / low) / math.log(after.workers / before.workers) if low > 0 and high > 0 else math.nan


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scale.curve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of workers (default: four)")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="(default: static rule)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="judged of each (default: %(default)s)")
    parser.add_argument("--ingest-messages", type=int, default=NUM_MESSAGES)
    parser.add_argument(
        "--docs", type=output_directory, default=Path("docs"), help="where to write (default: %(default)s)"
    )
    parser.add_argument("--no-targets", action="store_true", help="only report: exit code 0 also when one is missed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
