"""Measure how fast ranks sum a gradient: `python -m bench.exchange --links 100mbit,1gbit`. For root.

Each rank is a process on a host of its own, a network namespace with a shaped link. Arms are PyTorch's all-reduce of
the dense gradient, its all-reduce of the same gradient as a sparse tensor, and the exchange codecs. An exchange lasts
until the slowest rank has the sum; shown is the median over rounds, in which all arms run once. Throughput is the dense
gradient's bits over that time, whatever travelled; bytes are the kernel's. Sums are compared with the all-reduce's, and
over ranks bit for bit. Needs Linux and iproute2.
"""

import sys

from bench.exchange.figures import missed
from bench.exchange.plan import ExchangePlan, exchange_parser, plan_of
from bench.exchange.result import panels_of, summarise, targets_of, text_of
from bench.exchange.runner import run_cases
from bench.harness.command import BenchmarkReport, run_benchmark
from bench.harness.figure import draw
from bench.hosts import HostsError


def measure(plan: ExchangePlan) -> BenchmarkReport:
    """Run all cases."""
    results = run_cases(
        list(plan.cases()),
        "bench.exchange.rank",
        plan.rank,
        lambda case, timings: summarise(case, plan.rank.num_elements, timings),
    )
    return BenchmarkReport(
        {"plan": plan.rank, "cases": results},
        text_of(results),
        targets=targets_of(results),
        missed=missed(results),
        draw=lambda path: draw(panels_of(results, plan), path),
    )


def main() -> int:
    """Run, print, write; 1 when a target is missed or a sum is wrong."""
    parser = exchange_parser(__doc__)
    options = parser.parse_args()
    try:
        plan = plan_of(options)
    except ValueError as error:
        parser.error(str(error))
    return run_benchmark("exchange", options, lambda: measure(plan), cannot=(HostsError,))


if __name__ == "__main__":
    sys.exit(main())
