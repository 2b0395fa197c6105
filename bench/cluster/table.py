"""Which action helps which host: `python -m bench.cluster.table [--repeats N] [--markdown FILE]`, for root; 20 minutes.

Conditions against actions. A rank's link is slow, or it also loses packets, or its processor is slow; the job keeps its
equal split, divides the same batch in proportion to speed, takes a larger one, or leaves both to the rule. A second
table shows what the states said of the slow rank and of the others under the equal split. Repeats go round all
conditions and actions, so that what the machine does meanwhile hits all alike.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.cluster.arguments import INTERRUPTED, add_arguments, as_json, plan_of
from bench.cluster.display import print_result
from bench.cluster.plan import Arm, Plan
from bench.cluster.runs import run_all
from bench.cluster.services import ClusterError
from bench.cluster.summary import Result, missed
from bench.hosts import HostsError
from bench.output import exit_code, write_json

from dynamix.cli.output import output_path
from dynamix.runtime import output_files
from dynamix.runtime.output_files import Kind

EQUAL = "equal split"
SIGNALS = (
    ("compute ms", "compute_time_s", 1e3, 1),
    ("sync ms", "sync_time_s", 1e3, 1),
    ("rx MB/s", "rx_bytes_per_s", 1e-6, 2),
    ("retransmits per window", "retransmits", 1.0, 0),
    ("srtt ms", "srtt_us", 1e-3, 1),
    ("CPU time ratio", "cpu_time_ratio", 1.0, 3),
    ("run-queue wait ratio", "run_queue_wait_ratio", 1.0, 3),
)
"""Heading, signal, scale and digits."""

TABLES = Kind("a file of such tables", lambda head: head.startswith(b"| one rank has |"))

Cells = dict[tuple[str, str], list[Result]]
"""By condition and action, one result per repeat."""


def conditions(options: argparse.Namespace) -> dict[str, Plan]:
    """What is slow, by name.

    Raises:
        ValueError: for a rank or a rate that is none.
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


def measure(plans: Mapping[str, Plan], arms: Mapping[str, Arm], num_repeats: int) -> Cells:
    """All of them, on the same hosts. Raises as `run_all`."""
    order = [(condition, action) for _ in range(num_repeats) for condition in plans for action in arms]
    upcoming = iter(order)

    def report(result: Result) -> None:
        sys.stderr.write("{}, {}: ".format(*next(upcoming)) + f"{1e3 * result.step_time_s.median:.0f} ms\n")

    results = run_all([(plans[condition], arms[action]) for condition, action in order], report)
    cells: Cells = {}
    for place, result in zip(order, results, strict=True):
        cells.setdefault(place, []).append(result)
    return cells


def markdown(cells: Cells, slow_rank: int) -> str:
    """Both tables."""
    return "\n".join([*_outcomes(cells), "", *_states(cells, slow_rank)]) + "\n"


def _outcomes(cells: Cells) -> Iterator[str]:
    names = list(dict.fromkeys(action for _, action in cells))
    yield "| one rank has | " + " | ".join(names) + " |"
    yield "|---" * (1 + len(names)) + "|"
    for condition in dict.fromkeys(condition for condition, _ in cells):
        first = _throughput(cells[condition, names[0]])
        row = [_outcome(cells[condition, name], first) for name in names]
        yield f"| {condition} | " + " | ".join(row) + " |"


def _outcome(results: Sequence[Result], first: float) -> str:
    """Step, throughput and what it is of the equal split's, and the last sizes."""
    steps_ms = sorted(1e3 * result.step_time_s.median for result in results)
    spread = f" ({steps_ms[0]:.0f}-{steps_ms[-1]:.0f})" if len(steps_ms) > 1 else ""
    throughput = _throughput(results)
    sizes = "/".join(map(str, results[-1].local_batch_sizes))
    return f"{statistics.median(steps_ms):.0f} ms{spread}, {throughput:.0f}/s, **{throughput / first:.2f}x** ({sizes})"


def _throughput(results: Sequence[Result]) -> float:
    return statistics.median(result.throughput.median for result in results)


def _states(cells: Cells, slow_rank: int) -> Iterator[str]:
    yield "| one rank has; slow rank / the others | " + " | ".join(heading for heading, *_ in SIGNALS) + " |"
    yield "|---" * (1 + len(SIGNALS)) + "|"
    for (condition, action), results in cells.items():
        if action == EQUAL:
            row = [_slow_and_others(results, slow_rank, *signal[1:]) for signal in SIGNALS]
            yield f"| {condition} | " + " | ".join(row) + " |"


def _slow_and_others(results: Sequence[Result], slow_rank: int, signal: str, scale: float, digits: int) -> str:
    ranks = [rank for result in results for rank in result.ranks]
    slow = [rank.medians[signal] for rank in ranks if rank.rank == slow_rank]
    others = [rank.medians[signal] for rank in ranks if rank.rank != slow_rank]
    return " / ".join(_median(values, scale, digits) for values in (slow, others))


def _median(values: Sequence[float | None], scale: float, digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known) * scale:.{digits}f}" if known else "-"


def _figures(cells: Cells) -> list[dict[str, Any]]:
    return [
        {"condition": condition, "action": action, "runs": [as_json(result) for result in results]}
        for (condition, action), results in cells.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, print and write the tables; 1 when windows were lost or nothing was decided."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        plans = conditions(options)
    except ValueError as error:
        parser.error(str(error))
    if not plans or options.repeats < 1:
        parser.error("nothing to run: name a part of a condition, and at least one repeat")
    try:
        cells = measure(plans, actions(options), options.repeats)
    except (HostsError, ClusterError, ValueError) as error:
        sys.stderr.write(f"cluster: {error}\n")
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    text = markdown(cells, options.rank)
    if options.markdown:
        output_files.write(Path(options.markdown), text.encode())
    if options.json != "-":
        for results in cells.values():
            print_result(results[-1])
        print("\n" + text)
    write_json({"plans": {name: as_json(plan) for name, plan in plans.items()}, "cells": _figures(cells)}, options.json)
    targets = [
        f"{condition}, {target}"
        for (condition, _), results in cells.items()
        for result in results
        for target in missed(result)
    ]
    return exit_code("cluster", targets, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cluster.table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--repeats", type=int, default=1, help="of everything (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=3, help="which is slow (default: %(default)s)")
    parser.add_argument("--rate", default="20mbit", help="of its slow link (default: %(default)s)")
    parser.add_argument(
        "--lossy-queue", type=int, default=10_000, metavar="BYTES", help="of the link that loses (default: %(default)s)"
    )
    parser.add_argument("--slow-cores", type=float, default=0.1, help="of its slow processor (default: %(default)s)")
    parser.add_argument("--larger", type=float, default=3.0, help="the larger batch (default: %(default)s times)")
    parser.add_argument(
        "--condition", action="append", metavar="TEXT", help="only conditions with this in their name; may be repeated"
    )
    parser.add_argument("--markdown", metavar="FILE", type=output_path(TABLES), help="write the tables here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
