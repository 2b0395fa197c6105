"""Train across several hosts on this machine: `python -m bench.cluster --slow-link 3=20mbit --policy rule`. For root.

The hosts are network namespaces on a bridge, each with its link and its share of the processor; the job is a real gloo
job with one rank per host and a collector on each; broker, reward and arbitrator are at the switch. Every policy that
is named trains once, one after the other. All figures were read from the bus; those of a rank are its state's, medians
over the windows after those to warm up. Needs Linux, iproute2 and Fashion-MNIST (`make data`).

`python -m bench.cluster --target 0.8` compares times to a held-out accuracy instead; `--target 0.8 --help` lists its
options.
"""

import sys
from collections.abc import Sequence

from bench.cluster.display import describe, panels_of, text_of
from bench.cluster.plan import Arm, ClusterPlan, by_rank, cluster_parser, plan_of
from bench.cluster.runner import run_all
from bench.cluster.summary import missed
from bench.cluster.target import command
from bench.harness.command import BenchmarkReport, run_benchmark
from bench.harness.figure import draw
from bench.hosts import HostsError


def measure(plan: ClusterPlan, arms: Sequence[Arm]) -> BenchmarkReport:
    """Train once with each arm."""
    sys.stderr.write(f"cluster: {describe(plan)}; {plan.num_windows} windows of {plan.window_steps} steps each\n")
    results = run_all([(plan, arm) for arm in arms])
    return BenchmarkReport(
        {"plan": plan, "runs": results},
        "\n\n".join(map(text_of, results)),
        missed=[text for result in results for text in missed(result)],
        draw=lambda path: draw(panels_of(results, plan), path, describe(plan)),
    )


def main() -> int:
    """Run, print, write; 1 when windows were lost or nothing was decided."""
    if any(argument.partition("=")[0] == "--target" for argument in sys.argv[1:]):
        return command.main()
    parser = cluster_parser("cluster", __doc__, has_figure=True)
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
    options = parser.parse_args()
    try:
        plan = plan_of(options, slow_links=by_rank(options.slow_link, str), slow_cpus=by_rank(options.slow_cpu, float))
        arms = [Arm.parse(text, options.local_batch_size) for text in options.policy or ["rule"]]
    except ValueError as error:
        parser.error(str(error))
    return run_benchmark("cluster", options, lambda: measure(plan, arms), cannot=(HostsError, ValueError))


if __name__ == "__main__":
    sys.exit(main())
