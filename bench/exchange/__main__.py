"""Measure how fast ranks sum a gradient: `python -m bench.exchange --links 100mbit,1gbit`. For root.

Each rank is a process on a host of its own, a network namespace with a shaped link. Arms are PyTorch's all-reduce of
the dense gradient, its all-reduce of the same gradient as a sparse tensor, and the exchange codecs. An exchange lasts
until the slowest rank has the sum; shown is the median over rounds, in which all arms run once. Throughput is the dense
gradient's bits over that time, whatever travelled; bytes are the kernel's. Sums are compared with the all-reduce's, and
over ranks bit for bit. Needs Linux and iproute2.
"""

import sys
import tempfile
from pathlib import Path

from bench.exchange.plan import ExchangePlan, exchange_parser, plan_of
from bench.exchange.rank import ArmTimings
from bench.exchange.result import CaseResult, missed, panels_of, summarise, targets_of, text_of
from bench.exchange.runner import joined_ranks
from bench.harness.command import BenchmarkReport, run_benchmark
from bench.harness.figure import draw
from bench.hosts import Hosts, HostsError


def run_all(plan: ExchangePlan) -> list[CaseResult]:
    """Run one case after the other.

    Raises:
        HostsError: when there can be no such hosts here, or this user may not make them.
        ClusterError: when a rank fails.
    """
    results = []
    with Hosts(max(plan.ranks)) as hosts, tempfile.TemporaryDirectory(prefix="dynamix-exchange-") as name:
        for num_ranks in plan.ranks:
            with joined_ranks(hosts[:num_ranks], "bench.exchange.rank", plan.rank, Path(name)) as ranks:
                for case in plan.cases(num_ranks):
                    timings = ranks.ask(case, case.link, dict[str, ArmTimings])
                    results.append(summarise(case, plan.rank.num_elements, timings))
                    sys.stderr.write(f"  {results[-1].line}\n")
    return results


def measure(plan: ExchangePlan) -> BenchmarkReport:
    """Run all cases."""
    results = run_all(plan)
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
