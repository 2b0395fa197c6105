"""Measure training steps by exchange codec: `python -m bench.exchange.steps --workloads ncf --links 100mbit`. For root.

Each rank is a process on a host of its own, a network namespace with a shaped link, and trains under DDP. Arms are
plain DDP, DDP with `sparse=True` on every embedding, and the exchange codecs as DDP's communication hook, without a
session; all train from the same weights on the same samples, a few steps in turn. A step counts when the slowest rank
has made it. Afterwards the parameters are compared with plain DDP's, and over ranks bit for bit. Needs Linux and
iproute2, and for workloads that are not generated their data.
"""

import sys

from bench.exchange.figures import missed
from bench.exchange.runner import run_cases
from bench.exchange.steps.plan import TrainingPlan, plan_of, steps_parser
from bench.exchange.steps.result import summarise, targets_of, text_of
from bench.harness.command import BenchmarkReport, run_benchmark
from bench.hosts import HostsError


def measure(plan: TrainingPlan) -> BenchmarkReport:
    """Run all cases."""
    results = run_cases(
        list(plan.cases()),
        "bench.exchange.steps.rank",
        plan.rank,
        lambda case, timings: summarise(case, plan.rank.num_steps, timings),
    )
    return BenchmarkReport(
        {"plan": plan.rank, "cases": results}, text_of(results), targets=targets_of(results), missed=missed(results)
    )


def main() -> int:
    """Run, print, write; 1 when a target is missed or parameters are wrong."""
    parser = steps_parser(__doc__)
    options = parser.parse_args()
    try:
        plan = plan_of(options)
    except ValueError as error:
        parser.error(str(error))
    return run_benchmark("exchange.steps", options, lambda: measure(plan), cannot=(HostsError,))


if __name__ == "__main__":
    sys.exit(main())
