"""Train across several hosts on this machine: `python -m bench.cluster --slow-link 3=20mbit --policy rule`. For root.

The hosts are network namespaces on a bridge, each with its link and its share of the processor; the job is a real gloo
job with one rank per host and a collector on each; broker, reward and arbitrator are at the switch. Every policy that
is named trains once, one after the other. All figures were read from the bus; those of a rank are its state's, medians
over the windows after those to warm up. Needs Linux, iproute2 and Fashion-MNIST (`make data`).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.cluster.arguments import INTERRUPTED, add_arguments, as_json, by_rank, plan_of
from bench.cluster.display import describe, print_result
from bench.cluster.plan import Arm
from bench.cluster.runs import run_all
from bench.cluster.services import ClusterError
from bench.cluster.summary import Result, missed
from bench.hosts import HostsError
from bench.output import add_png_argument, exit_code, write_json


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 when windows were lost or nothing was decided."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        plan = plan_of(options, slow_links=by_rank(options.slow_link, str), slow_cpus=by_rank(options.slow_cpu, float))
        arms = [Arm.parse(text, options.local_batch_size) for text in options.policy or ["rule"]]
    except ValueError as error:
        parser.error(str(error))
    sys.stderr.write(f"cluster: {describe(plan)}; {plan.num_windows} windows of {plan.window_steps} steps each\n")
    try:
        results = run_all([(plan, arm) for arm in arms], _say_nothing if options.json == "-" else print_result)
    except (HostsError, ClusterError, ValueError) as error:
        sys.stderr.write(f"cluster: {error}\n")
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    write_json({"plan": as_json(plan), "runs": [as_json(result) for result in results]}, options.json)
    if options.png:
        from bench.cluster.figure import draw  # noqa: PLC0415 - matplotlib: only once it is needed

        draw(results, plan, Path(options.png))
    return exit_code("cluster", [target for result in results for target in missed(result)], options)


def _say_nothing(result: Result) -> None:
    """Standard output is for JSON."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME[:SIZE]",
        help="a policy, and a local batch size of its own to begin with; may be given again (default: rule)",
    )
    parser.add_argument(
        "--slow-link", action="append", metavar="RANK=RATE", help="such as 3=20mbit, both directions; may be repeated"
    )
    parser.add_argument("--slow-cpu", action="append", metavar="RANK=CORES", help="such as 3=0.1; may be given again")
    add_png_argument(parser, "draw step times and the ranks' signals")
    return parser


if __name__ == "__main__":
    sys.exit(main())
