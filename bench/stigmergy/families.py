"""Control without a centre on the scenarios of a suite: `python -m bench.stigmergy.families [--suite heldout]`.

Every worker is a node of its own, so that a scenario has as many agents as workers: scenario files say nothing of
nodes, and would have one agent for eight workers. Shown is the virtual time to the target over that of each base on
the same seeds, a miss counted as the time limit: by family, and as the geometric mean of all families, with 95 %
intervals over the seeds (braces: with the families as a sample of those there could be, as `dynamix evaluate` has
them). All policies run with their default options. Runs are kept in --ledger: a second start goes on where the first
one was stopped.
"""

import sys
from pathlib import Path

import msgspec
import numpy as np
from bench.harness.command import BenchmarkError, BenchmarkReport, benchmark_parser, run_benchmark
from bench.harness.figure import new_figure, save
from bench.harness.tables import markdown
from bench.results.verdict_table import interval_text

from dynamix.lab.experiments.comparison.contenders import parse_contenders
from dynamix.lab.experiments.comparison.evaluation import ComparisonProgress, fill, plan
from dynamix.lab.experiments.comparison.outcomes import OutcomeTable
from dynamix.lab.experiments.comparison.runs import Ledger
from dynamix.lab.experiments.comparison.scores import RatioInterval
from dynamix.lab.experiments.comparison.tuned import Tuned
from dynamix.lab.experiments.episodes.provenance import code_digest
from dynamix.lab.experiments.episodes.suite import HELD_OUT, Suite, suite_named

POLICIES = "rule,proportional,ppo,stigmergy,stigmergy:learned=1"
BASES = "rule,proportional,stigmergy"
OVERALL = "all families"


class FamilyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in one family, or in all of them."""

    family: str
    num_workers: list[int]
    """In each scenario; as many agents take part."""
    policy: str
    against: dict[str, RatioInterval | None]
    """Time over that of each base."""
    median_s: float
    num_missed: int
    num_runs: int


class FamilyComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What docs/results/stigmergy-heldout.json holds, beside the machine."""

    suite: str
    ranks_per_node: int
    policies: list[str]
    bases: list[str]
    seeds: list[int]
    core_minutes: float
    code: str
    rows: list[FamilyRow]


def with_agents(suite: Suite) -> Suite:
    """The suite with one rank per node."""
    scenarios = tuple(msgspec.structs.replace(scenario, ranks_per_node=1) for scenario in suite.scenarios)
    return Suite(name=suite.name, scenarios=scenarios)


def compare(
    suite: Suite, policies: str, bases: str, num_seeds: int, *, num_processes: int = 1, ledger_path: str = ""
) -> FamilyComparison:
    """Run what is not in the ledger, and compare.

    Raises:
        BenchmarkError: when a base is none of the policies, or there is no seed.
    """
    contenders = parse_contenders(policies)
    labels, against = [each.label for each in contenders], bases.split(",")
    if unknown := [name for name in against if name not in labels]:
        raise BenchmarkError(f"--bases {unknown[0]!r}: it must be one of --policies {policies}")
    if num_seeds < 1:
        raise BenchmarkError(f"--seeds {num_seeds}: at least 1")
    suite, seeds = with_agents(suite), list(range(num_seeds))
    cells = plan(suite, contenders, seeds, Tuned(), crossed=False)
    with Ledger(Path(ledger_path) if ledger_path else None) as ledger:
        fill(cells, ledger, jobs=num_processes, on_progress=_print_progress)
        table = OutcomeTable(suite.scenarios, cells, ledger, contenders)
    names = list(suite.families)
    parts = {OVERALL: names, **{name: [name] for name in names}}
    return FamilyComparison(
        suite=suite.name,
        ranks_per_node=1,
        policies=labels,
        bases=against,
        seeds=seeds,
        core_minutes=sum(run.wall_s for label in labels for run in table.outcomes(label, names)) / 60,
        code=code_digest(),
        rows=[
            FamilyRow(
                family=part,
                num_workers=[scenario.world_size for scenario in suite.scenarios if scenario.family in families],
                policy=label,
                against={base: table.ratio(label, base, families) for base in against},
                median_s=float(np.nanmedian(table.times(label, families))),
                num_missed=table.num_misses(label, families),
                num_runs=len(table.outcomes(label, families)),
            )
            for part, families in parts.items()
            for label in labels
        ],
    )


def _print_progress(progress: ComparisonProgress) -> None:
    left = "" if progress.left_s is None else f", {progress.left_s / 60:.0f} minutes left"
    sys.stderr.write(f"  {progress.num_done}/{progress.num_total}{left}: {progress.newest}\n")


def tables_of(found: FamilyComparison) -> str:
    """The tables of docs/stigmergy.md: all families against each base, then each family against the first base."""
    base = found.bases[0]
    overall = [row for row in found.rows if row.family == OVERALL]
    first = [
        [f"`{row.policy}`", *(_ratio_text(row, name) for name in found.bases), f"{row.num_missed}"] for row in overall
    ]
    others = [policy for policy in found.policies if policy != base]
    families = list(dict.fromkeys(row.family for row in found.rows if row.family != OVERALL))
    by_place = {(row.family, row.policy): row for row in found.rows}
    second = []
    for family in families:
        workers = ", ".join(map(str, by_place[family, base].num_workers))
        cells = [_cell(by_place[family, policy], base) for policy in others]
        second.append([family, workers, f"{by_place[family, base].median_s:.1f}", *cells])
    runs = overall[0].num_runs
    return "\n\n".join(
        [
            markdown([OVERALL, *(f"over `{name}`" for name in found.bases), f"missed, of {runs}"], first),
            markdown(["family", "agents", f"`{base}`, median s", *(f"`{policy}`" for policy in others)], second),
        ]
    )


def _ratio_text(row: FamilyRow, base: str) -> str:
    return "1" if row.policy == base else interval_text(row.against[base])


def _cell(row: FamilyRow, base: str) -> str:
    missed = f", {row.num_missed} missed" if row.num_missed else ""
    return _ratio_text(row, base) + missed


def draw_families(found: FamilyComparison, path: Path) -> None:
    """Write a PNG: the ratio of each policy to the first base with its interval, by family."""
    base = found.bases[0]
    families = list(dict.fromkeys(row.family for row in found.rows))
    others = [policy for policy in found.policies if policy != base]
    by_place = {(row.family, row.policy): row.against[base] for row in found.rows}
    figure = new_figure(9.0, 1.0 + 0.18 * len(families) * len(others))
    axes = figure.subplots()
    for number, policy in enumerate(others):
        known = [(place, ratio) for place, name in enumerate(families) if (ratio := by_place[name, policy]) is not None]
        ratios = [ratio.ratio for _, ratio in known]
        ends = [(ratio.low or ratio.ratio, ratio.high or ratio.ratio) for _, ratio in known]
        places = [place + 0.8 * ((number + 0.5) / len(others) - 0.5) for place, _ in known]
        lengths = [
            [ratio - low for ratio, (low, _) in zip(ratios, ends, strict=True)],
            [high - ratio for ratio, (_, high) in zip(ratios, ends, strict=True)],
        ]
        axes.errorbar(ratios, places, xerr=lengths, fmt="o", markersize=3.5, linewidth=1.2, label=policy)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(range(len(families)), families)
    axes.invert_yaxis()
    axes.set(xlabel=f"time to the target over that of {base}", title=f"Suite {found.suite}, an agent per worker")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize="small")
    save(figure, path)


def report_of(found: FamilyComparison) -> BenchmarkReport:
    """Tables, figures and picture."""
    return BenchmarkReport(msgspec.to_builtins(found), tables_of(found), draw=lambda path: draw_families(found, path))


def main() -> int:
    """Run, print, write."""
    parser = benchmark_parser(
        *("stigmergy.families", __doc__),
        ("--suite", HELD_OUT, "heldout or train"),
        ("--policies", POLICIES, "rows, as `dynamix evaluate` spells them"),
        ("--bases", BASES, "rows that the others are compared with"),
        ("--seeds", 6, "runs of each row in each scenario"),
        ("--processes", 1, "episodes at a time"),
        ("--ledger", "", "file that keeps the runs; all are made again without"),
        has_figure=True,
    )
    options = parser.parse_args()

    def measure() -> BenchmarkReport:
        suite = suite_named(options.suite)
        places = {"num_processes": options.processes, "ledger_path": options.ledger}
        return report_of(compare(suite, options.policies, options.bases, options.seeds, **places))

    return run_benchmark("stigmergy.families", options, measure, cannot=(ValueError, OSError))


if __name__ == "__main__":
    sys.exit(main())
