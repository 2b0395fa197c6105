"""Which action helps which host: `python -m bench.cluster.table [--repeats N] [--markdown FILE]`, for root; 20 minutes.

Conditions against actions. A rank's link is slow, or it also loses packets, or its processor is slow; the job keeps its
equal split, divides the same batch in proportion to speed, takes a larger one, or leaves both to the rule. A second
table shows the states of the slow rank and of the others under the equal split. Repeats go round all conditions and
actions, so that other work on the machine meets all alike.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.cluster.display import COLUMNS, scaled, text_of
from bench.cluster.plan import Arm, ClusterPlan, cluster_parser, plan_of
from bench.cluster.runner import run_all
from bench.cluster.summary import ClusterResult, missed
from bench.harness.command import BenchmarkReport, run_benchmark
from bench.harness.rounds import median_of
from bench.harness.tables import markdown
from bench.hosts import HostsError

from dynamix.cli.output import output_path
from dynamix.runtime import output_files
from dynamix.runtime.output_files import FileKind

TABLES = FileKind("a file of such tables", lambda head: head.startswith(b"| one rank has |"))
EQUAL = "equal split"
NOT_SHOWN = ("local_batch_size", "tx_bytes_per_s")
SIGNALS = [column for column in COLUMNS if column[1] not in NOT_SHOWN]

Cells = dict[tuple[str, str], list[ClusterResult]]
"""By condition and action, one result per repeat."""


def conditions(options: argparse.Namespace) -> dict[str, ClusterPlan]:
    """What is slow, by name.

    Raises:
        ValueError: for a rank that does not exist or a text that is not a rate.
    """
    rank, rate, cores = options.rank, options.rate, options.slow_cores
    lossy = argparse.Namespace(**{**vars(options), "queue_limit": options.lossy_queue})
    plans = {
        "nothing slow": plan_of(options),
        f"link of {rate}": plan_of(options, slow_links={rank: rate}),
        f"link of {rate} that loses packets": plan_of(lossy, slow_links={rank: rate}),
        f"{cores:g} cores": plan_of(options, slow_cpus={rank: cores}),
    }
    wanted = options.condition or list(plans)
    return {name: plan for name, plan in plans.items() if any(text in name for text in wanted)}


def actions(options: argparse.Namespace) -> dict[str, Arm]:
    """How the job is steered, by name."""
    size = options.local_batch_size
    return {
        EQUAL: Arm("static", size),
        "proportional split": Arm("proportional", size),
        f"equal split, batch x {options.larger:g}": Arm("static", round(size * options.larger)),
        "rule": Arm("rule", size),
    }


def measure(plans: Mapping[str, ClusterPlan], arms: Mapping[str, Arm], num_repeats: int) -> Cells:
    """Run all of them on the same hosts. Raises as `run_all`."""
    order = [(condition, action) for _ in range(num_repeats) for condition in plans for action in arms]
    results = run_all([(plans[condition], arms[action]) for condition, action in order])
    cells: Cells = {}
    for place, result in zip(order, results, strict=True):
        cells.setdefault(place, []).append(result)
    return cells


def report_of(plans: Mapping[str, ClusterPlan], cells: Cells, slow_rank: int) -> BenchmarkReport:
    """Both tables, after the last run of each cell."""
    runs = [
        {"condition": condition, "action": action, "runs": results} for (condition, action), results in cells.items()
    ]
    complaints = [
        f"{condition}, {text}" for (condition, _), found in cells.items() for one in found for text in missed(one)
    ]
    figures = {"plans": plans, "cells": runs}
    texts = [text_of(results[-1]) for results in cells.values()]
    return BenchmarkReport(figures, "\n\n".join([*texts, tables_of(cells, slow_rank)]), missed=complaints)


def tables_of(cells: Cells, slow_rank: int) -> str:
    """Both tables in Markdown: what each action makes of each condition, and what the states show of the slow rank."""
    names = list(dict.fromkeys(action for _, action in cells))
    found = dict.fromkeys(condition for condition, _ in cells)
    outcomes = [
        [condition, *(_outcome(cells[condition, name], _throughput(cells[condition, names[0]])) for name in names)]
        for condition in found
    ]
    states = [
        [condition, *(_slow_and_others(results, slow_rank, *signal[1:]) for signal in SIGNALS)]
        for (condition, action), results in cells.items()
        if action == EQUAL
    ]
    headings = ["one rank has; slow rank / the others", *(heading for heading, *_ in SIGNALS)]
    return f"{markdown(['one rank has', *names], outcomes)}\n\n{markdown(headings, states)}\n"


def _outcome(results: Sequence[ClusterResult], first: float) -> str:
    """Step, throughput and its ratio to the equal split's, and the last sizes."""
    steps_ms = sorted(1e3 * result.step_time_s.median for result in results)
    spread = f" ({steps_ms[0]:.0f}-{steps_ms[-1]:.0f})" if len(steps_ms) > 1 else ""
    throughput = _throughput(results)
    sizes = "/".join(map(str, results[-1].local_batch_sizes))
    return f"{statistics.median(steps_ms):.0f} ms{spread}, {throughput:.0f}/s, **{throughput / first:.2f}x** ({sizes})"


def _throughput(results: Sequence[ClusterResult]) -> float:
    return statistics.median(result.throughput.median for result in results)


def _slow_and_others(results: Sequence[ClusterResult], slow_rank: int, signal: str, scale: float, digits: int) -> str:
    ranks = [rank for result in results for rank in result.ranks]
    groups = ([rank.medians[signal] for rank in ranks if (rank.rank == slow_rank) == slow] for slow in (True, False))
    return " / ".join(scaled(median_of(values), scale, digits) for values in groups)


def main() -> int:
    """Run all, print and write the tables; 1 when windows were lost or nothing was decided."""
    parser = cluster_parser(
        *("cluster.table", __doc__),
        ("--repeats", 1, "of everything"),
        ("--rank", 3, "which is slow"),
        ("--rate", "20mbit", "of its slow link"),
        ("--lossy-queue", 10_000, "bytes, of the link that loses packets"),
        ("--slow-cores", 0.1, "of its slow processor"),
        ("--larger", 3.0, "times, the larger batch"),
    )
    parser.add_argument(
        "--condition", action="append", metavar="TEXT", help="only conditions with this in their name; may be repeated"
    )
    parser.add_argument("--markdown", metavar="FILE", type=output_path(TABLES), help="write the tables here")
    options = parser.parse_args()
    try:
        plans = conditions(options)
    except ValueError as error:
        parser.error(str(error))
    if not plans or options.repeats < 1:
        parser.error("nothing to run: name a part of a condition, and at least one repeat")

    def run() -> BenchmarkReport:
        cells = measure(plans, actions(options), options.repeats)
        if options.markdown:
            output_files.write(Path(options.markdown), tables_of(cells, options.rank).encode())
        return report_of(plans, cells, options.rank)

    return run_benchmark("cluster", options, run, cannot=(HostsError, ValueError))


if __name__ == "__main__":
    sys.exit(main())
