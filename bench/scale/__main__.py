"""How far one arbitrator reaches: `python -m bench.scale --workers 10000 --jobs 1 --rate 1 --seconds 300 --json FILE`.

A real broker with its streams in files, the real arbitrator in one process, a generator that plays the trainers and
collectors of all nodes (8 ranks each), and this process, which reads the actions as trainers do. A decision's latency
runs from the broker's time of the last state of a window to the broker's time of the window's action. By default all
nodes send a window's states at once, as after a barrier.

The generator must keep its rate: if it does not, the exit code is 2 and no figures are written.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

import msgspec
import uvloop
from bench.output import add_output_arguments, exit_code, write_json
from bench.scale.generator import ScaleError
from bench.scale.ingest import NUM_MESSAGES
from bench.scale.measurement import measure
from bench.scale.plan import Plan
from bench.scale.result import describe, missed

DEFAULTS = Plan()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when a target is missed, 2 when there is nothing to judge."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        plan = plan_of(options)
    except ValueError as error:
        parser.error(str(error))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(measure(plan, ingest_messages=options.ingest_messages, say=sys.stderr.isatty()))
    except ScaleError as error:
        sys.stderr.write(f"scale: {error}\n")
        return 2
    if options.json != "-":
        print(describe(result))
    write_json(msgspec.to_builtins(result), options.json)
    return exit_code("scale", missed(result), options)


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan of a command line.

    Raises:
        ValueError: for what cannot be run.
    """
    return Plan(
        num_workers=options.workers,
        num_jobs=options.jobs,
        rate=options.rate,
        seconds=options.seconds,
        policy=options.policy,
        background=options.with_windows,
        spread_s=options.spread,
        seed=options.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_output_arguments(parser)
    parser.add_argument("--workers", type=int, default=DEFAULTS.num_workers, help="of all jobs (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=DEFAULTS.num_jobs, help="that share them (default: %(default)s)")
    parser.add_argument(
        "--rate", type=float, default=DEFAULTS.rate, help="windows per second of each job (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=DEFAULTS.seconds, help="judged (default: %(default)s)")
    parser.add_argument("--policy", default=DEFAULTS.policy, help="of all jobs (default: %(default)s)")
    parser.add_argument("--with-windows", action="store_true", help="also publish metric windows and rewards")
    parser.add_argument(
        "--spread",
        type=float,
        default=DEFAULTS.spread_s,
        metavar="SECONDS",
        help="over which the nodes send a window's states (default: all at once)",
    )
    parser.add_argument("--seed", type=int, default=DEFAULTS.seed)
    parser.add_argument(
        "--ingest-messages", type=int, default=NUM_MESSAGES, help="read per run of ingest (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
