"""The tables of docs/recurring.md, as Markdown made from the figures in docs/."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
from bench.harness.command import Target
from bench.harness.tables import markdown

from .chains import FamilyChain
from .energy import EnergyChain, SpentRun
from .means import GeometricMean, mean_of


class ChainFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m bench.recurring --json FILE` wrote, beside the machine."""

    summary: dict[str, GeometricMean | int]
    targets: list[Target]
    chains: list[FamilyChain]


class EnergyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The same with `--objective energy`."""

    chains: list[EnergyChain]


MEANS = {
    "second_over_cold": "second run, no exploration",
    "second_exploring_over_cold": "second run that explores",
    "runs_over_cold": "all runs in a row",
    "changed_over_cold": "second run on a changed cluster",
}
"""Rows of the table of means, by their name in the figures; their targets come in the same order."""


def means_table(figures: ChainFigures) -> str:
    """Geometric means over all chains beside their targets."""
    rows = []
    for (name, title), target in zip(MEANS.items(), figures.targets, strict=False):
        mean = figures.summary[name]
        assert isinstance(mean, GeometricMean), "counts have other names"
        rows.append([title, *_mean_cells(mean), f"{target.at_most:.2f}, {_verdict(mean, target)}"])
    head = [f"geometric mean of {len(figures.chains)} chains", "value", "times or over, one standard error", "target"]
    return markdown(head, rows)


def _verdict(mean: GeometricMean, target: Target) -> str:
    if not target.met:
        return "missed"
    assert target.at_most is not None, "no ratio has another limit"
    return "met" if mean.value * math.exp(mean.error) <= target.at_most else "met, by less than the error"


def families_table(chains: Sequence[FamilyChain]) -> str:
    """Times over those of cold starts, by family: geometric means over its chains."""
    columns: dict[str, Callable[[FamilyChain], float]] = {
        "second run": lambda chain: chain.second_s / chain.cold_s[1],
        "second, exploring": lambda chain: chain.exploring_s[1] / chain.cold_s[1],
        "all runs": lambda chain: sum(chain.exploring_s) / sum(chain.cold_s),
        "last three": lambda chain: sum(chain.exploring_s[-3:]) / sum(chain.cold_s[-3:]),
    }
    rows = []
    for family in dict.fromkeys(chain.family for chain in chains):
        own = [chain for chain in chains if chain.family == family]
        means = [f"{mean_of([value(chain) for chain in own]).value:.2f}" for value in columns.values()]
        rows.append([family, *means, _arms([chain.arms[-1] for chain in own])])
    return markdown(["family", *columns, "last run of each chain"], rows)


def explored_table(found: dict[str, EnergyFigures]) -> str:
    """Seconds of chains that are compared by time, over those of cold starts; by what their runs may try out."""
    columns: dict[str, Callable[[EnergyChain], float]] = {
        "second run": lambda chain: _seconds(chain.by_time[1:2]) / _seconds(chain.cold[1:2]),
        "third run": lambda chain: _seconds(chain.by_time[2:3]) / _seconds(chain.cold[2:3]),
        "last three": lambda chain: _seconds(chain.by_time[-3:]) / _seconds(chain.cold[-3:]),
        "all runs": lambda chain: _seconds(chain.by_time) / _seconds(chain.cold),
    }
    rows = []
    for title, figures in found.items():
        means = [mean_of([value(chain) for chain in figures.chains]) for value in columns.values()]
        cells = [" x/ ".join(_mean_cells(mean)) for mean in means]
        rows.append([title, str(len(figures.chains)), str(len(figures.chains[0].cold)), *cells])
    return markdown(["runs try out", "chains", "runs of each", *columns], rows, num_left=1)


def _mean_cells(mean: GeometricMean) -> list[str]:
    return [f"{mean.value:.2f}", f"{math.exp(mean.error):.2f}"]


def _seconds(runs: Sequence[SpentRun]) -> float:
    return sum(run.time_s for run in runs)


def _arms(arms: Sequence[str]) -> str:
    counted = Counter(arms).most_common()
    return ", ".join(arm if len(arms) == 1 else f"{count}: {arm}" for arm, count in counted)
