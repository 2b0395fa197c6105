"""How far one arbitrator reaches: `python -m bench.scale --workers 10000 --jobs 1 --rate 1 --seconds 300 --json FILE`.

A real broker with its streams in files, the real arbitrator in one process, a generator that plays the trainers and
collectors of all nodes (8 ranks each), and this process, which reads the actions as trainers do. A decision's latency
runs from the broker's time of the last state of a window to the broker's time of the window's action. By default all
nodes send a window's states at once, as after a barrier.

The generator must keep its rate: if it does not, the exit code is 2 and no figures are written.
"""

import sys

import msgspec
from bench.harness.broker import run_with_uvloop
from bench.harness.command import BenchmarkReport, benchmark_parser, run_benchmark
from bench.scale.measurement import NUM_MESSAGES, measure
from bench.scale.plan import ScalePlan
from bench.scale.result import describe, missed, targets_of

DEFAULTS = ScalePlan()


def main() -> int:
    """Measure, print, write; 1 when a target is missed, 2 when there is nothing to judge."""
    parser = benchmark_parser(
        *("scale", __doc__),
        ("--workers", DEFAULTS.workers, "of all jobs"),
        ("--jobs", DEFAULTS.jobs, "that share them"),
        ("--rate", DEFAULTS.rate, "windows per second of each job"),
        ("--seconds", DEFAULTS.seconds, "judged"),
        ("--policy", DEFAULTS.policy, "of all jobs"),
        ("--spread", DEFAULTS.spread_s, "seconds over which the nodes send a window's states; 0: all at once"),
        ("--seed", DEFAULTS.seed, "of the load"),
        ("--ingest-messages", NUM_MESSAGES, "read per run of ingest"),
    )
    parser.add_argument("--with-windows", action="store_true", help="also publish metric windows and rewards")
    options = parser.parse_args()
    try:
        plan = ScalePlan(
            **{name: getattr(options, name) for name in ("workers", "jobs", "rate", "seconds", "policy", "seed")},
            background=options.with_windows,
            spread_s=options.spread,
        )
    except ValueError as error:
        parser.error(str(error))
    return run_benchmark("scale", options, lambda: report_of(plan, options.ingest_messages))


def report_of(plan: ScalePlan, ingest_messages: int) -> BenchmarkReport:
    """Measure one plan."""
    result = run_with_uvloop(measure(plan, ingest_messages=ingest_messages))
    return BenchmarkReport(msgspec.structs.asdict(result), describe(result), targets_of(result), missed(result))


if __name__ == "__main__":
    sys.exit(main())
