"""Measure training steps by exchange codec: `python -m bench.exchange.steps --workloads ncf --links 100mbit`. For root.

Each rank is a process on a host of its own, a network namespace with a shaped link, and trains under DDP. Arms are
plain DDP, DDP with `sparse=True` on every embedding, and the exchange codecs as DDP's communication hook, without a
session; all train from the same weights on the same samples, a few steps in turn. A step counts when the slowest rank
has made it. Afterwards the parameters are compared with plain DDP's, and over ranks bit for bit. Needs Linux and
iproute2, and for workloads that are not generated their data.
"""

import sys
import tempfile
from pathlib import Path

from bench.exchange.runner import joined_ranks
from bench.exchange.steps.plan import TrainingPlan, plan_of, steps_parser
from bench.exchange.steps.rank import StepsTimings
from bench.exchange.steps.result import StepsResult, missed, summarise, targets_of, text_of
from bench.harness.command import BenchmarkReport, run_benchmark
from bench.hosts import Hosts, HostsError


def run_all(plan: TrainingPlan) -> list[StepsResult]:
    """Run one case after the other.

    Raises:
        HostsError: when there can be no such hosts here, or this user may not make them.
        ClusterError: when a rank fails.
    """
    results = []
    with Hosts(max(plan.ranks)) as hosts, tempfile.TemporaryDirectory(prefix="dynamix-exchange-") as name:
        for num_ranks in plan.ranks:
            with joined_ranks(hosts[:num_ranks], "bench.exchange.steps.rank", plan.rank, Path(name)) as ranks:
                for case in plan.cases(num_ranks):
                    timings = ranks.ask(case, case.link, dict[str, StepsTimings])
                    results.append(summarise(case, plan.rank.num_steps, timings))
                    sys.stderr.write(f"  {results[-1].line}\n")
    return results


def measure(plan: TrainingPlan) -> BenchmarkReport:
    """Run all cases."""
    results = run_all(plan)
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
