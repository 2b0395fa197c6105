"""Recurring jobs on virtual clusters: `python -m bench.recurring [--suite train] [--json FILE] [--png FILE]`.

With `--objective energy` chains that are compared by energy instead, beside such by time (no figure is drawn).

One scenario of each family of a suite, each run with a seed of its own and compared with a cold start of `rule` under
that seed. `second`: the second run begins with the first one's profile, and explores nothing. `runs`: that many runs in
a row that may try out a factor on the learning rate and one on the noise scale, at most twice; the sum of their times.
`changed`: the second run meets workers of half the speed, or links of a fifth of the rate; how many windows it takes to
drop the profile, and the time over that of a cold start there. Geometric means over families, with the standard error
of the mean logarithm; times to the scenario's held-out accuracy, a miss counted as the time limit.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.harness.command import BenchmarkError, BenchmarkReport, Target, benchmark_parser, run_benchmark
from bench.harness.figure import Curve, Panel, draw
from bench.harness.tables import formatted

from dynamix.lab.experiments.episodes.pool import EpisodePool
from dynamix.lab.experiments.episodes.suite import HELD_OUT, suite_named

from .chains import EXPLORES, ChainTask, FamilyChain, run_chain
from .energy import EnergyChain, energy_report, run_energy_chain
from .kept import KeptChains
from .means import mean_of

MOST_SECOND, MOST_ALL, MOST_CHANGED, MOST_WINDOWS = 0.95, 0.90, 1.02, 3
COLUMNS = {
    "family": "{family}",
    "seed": "{seed}",
    "second/cold": "{second:.2f}",
    "runs/cold": "{all:.2f}",
    "last three/cold": "{last:.2f}",
    "half speed": "{slower}",
    "fifth of links": "{narrower}",
    "arms": "{arms}",
}


def row_of(chain: FamilyChain) -> dict[str, object]:
    """One line of the table."""
    slower, narrower = (
        f"{each.time_s / each.cold_s:.2f} ({'never' if each.noticed is None else each.noticed})"
        for each in chain.changed
    )
    return {
        "family": chain.family,
        "seed": chain.seed,
        "second": chain.second_s / chain.cold_s[1],
        "all": sum(chain.exploring_s) / sum(chain.cold_s),
        "last": sum(chain.exploring_s[-3:]) / sum(chain.cold_s[-3:]),
        "slower": slower,
        "narrower": narrower,
        "arms": ", ".join(chain.arms[1:4]),
    }


def report_of(chains: Sequence[FamilyChain]) -> BenchmarkReport:
    """Means over all chains, with their targets."""
    second = mean_of([chain.second_s / chain.cold_s[1] for chain in chains])
    exploring = mean_of([chain.exploring_s[1] / chain.cold_s[1] for chain in chains])
    every = mean_of([sum(chain.exploring_s) / sum(chain.cold_s) for chain in chains])
    changed = [each for chain in chains for each in chain.changed]
    noticed = [each for each in changed if each.noticed is not None]
    cost = mean_of([each.time_s / each.cold_s for each in changed])
    summary = {
        "second_over_cold": second,
        "second_exploring_over_cold": exploring,
        "runs_over_cold": every,
        "changed_over_cold": cost,
        "changes_noticed": len(noticed),
        "changes": len(changed),
    }
    targets = [
        Target(name="second run over a cold one", value=second.value, at_most=MOST_SECOND),
        Target(name="second run that explores over a cold one", value=exploring.value, at_most=MOST_SECOND),
        Target(name="all runs over cold ones", value=every.value, at_most=MOST_ALL),
        Target(name="second run on a changed cluster over a cold one", value=cost.value, at_most=MOST_CHANGED),
        Target(
            name="windows until the last noticed change",
            value=max((each.noticed or 0 for each in noticed), default=None),
            at_most=MOST_WINDOWS,
        ),
    ]
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in summary.items()]
    text = "\n".join([formatted([row_of(chain) for chain in chains], COLUMNS), "", *lines])
    return BenchmarkReport(
        {"summary": summary, "chains": chains}, text, targets, draw=lambda path: draw_chains(chains, path)
    )


def draw_chains(chains: Sequence[FamilyChain], path: Path) -> None:
    """Time of each run over that of a cold start, by family and in the mean over all chains."""
    families = list(dict.fromkeys(chain.family for chain in chains))
    curves = [
        Curve(label=family, points=_mean_ratios([chain for chain in chains if chain.family == family]), style="-")
        for family in families
    ]
    means = _mean_ratios(chains)
    mean = Curve(label="geometric mean", points=means, style="ko-")
    by_family = Panel(
        title="by family", x="run", y="time over that of a cold start", curves=curves, limit=1.0, counts=True
    )
    in_mean = Panel(
        title="all families", x="run", y="time over that of a cold start", curves=[mean], limit=1.0, counts=True
    )
    draw([[by_family, in_mean]], path, "Runs of a family that begin with what those before taught, and explore")


def _mean_ratios(chains: Sequence[FamilyChain]) -> list[tuple[float, float]]:
    """Geometric mean over chains of each run over a cold start, by the number of the run."""
    numbers = range(min(len(chain.cold_s) for chain in chains))
    return [
        (number + 1.0, mean_of([chain.exploring_s[number] / chain.cold_s[number] for chain in chains]).value)
        for number in numbers
    ]


def tasks_of(suite: str, families: str, explores: str, num_runs: int, num_seeds: int) -> list[ChainTask]:
    """The first scenario of each family, under each seed."""
    known = suite_named(suite).families
    wanted = families.split(",") if families else [*known]
    if unknown := [name for name in wanted if name not in known]:
        raise BenchmarkError(f"--families {unknown[0]!r}: there are {', '.join(known)}")
    tried = tuple(each for each in EXPLORES if each in explores.split(","))
    if ",".join(sorted(tried)) != ",".join(sorted(explores.split(","))):
        raise BenchmarkError(f"--explores {explores!r}: name some of {', '.join(EXPLORES)}")
    return [
        ChainTask(scenario=known[name][0], seed=seed, num_runs=num_runs, explores=tried)
        for seed in range(1, num_seeds + 1)
        for name in wanted
    ]


def measure(tasks: Sequence[ChainTask], objective: str, num_processes: int, ledger: str = "") -> BenchmarkReport:
    """All chains, and their report; those that are in the ledger are not run again."""
    path = Path(ledger) if ledger else None
    if objective not in ("time", "energy"):
        raise BenchmarkError(f"--objective {objective!r}: use time or energy")
    with EpisodePool(num_processes) as pool:
        if objective == "energy":
            return energy_report(KeptChains(EnergyChain, path).run_all(pool, run_energy_chain, tasks))
        return report_of(KeptChains(FamilyChain, path).run_all(pool, run_chain, tasks))


def main() -> int:
    """Run, print, write."""
    parser = benchmark_parser(
        *("recurring", __doc__),
        ("--suite", HELD_OUT, "heldout or train"),
        ("--families", "", "families of it, with commas; all without"),
        ("--runs", 10, "runs of each family in a row"),
        ("--seeds", 1, "chains of each family"),
        ("--processes", 1, "chains at a time"),
        ("--explores", ",".join(EXPLORES), "what runs try out, with commas"),
        ("--objective", "time", "what runs are compared by: time or energy"),
        ("--ledger", "", "file that keeps the chains; all are run again without"),
        has_figure=True,
    )
    options = parser.parse_args()

    def run() -> BenchmarkReport:
        tasks = tasks_of(options.suite, options.families, options.explores, options.runs, options.seeds)
        return measure(tasks, options.objective, options.processes, options.ledger)

    return run_benchmark(
        *("recurring", options, run),
        cannot=(ValueError, OSError),
    )


if __name__ == "__main__":
    sys.exit(main())
