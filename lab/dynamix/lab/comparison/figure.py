"""The picture of a verdict: ratios with intervals by policy and family, and accuracy over time in one scenario."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamix.lab.simulator.cluster import Evaluation
from dynamix.lab.simulator.exchange import Array64
from dynamix.runtime.output_files import whole

from .rows import BEST_STATIC
from .verdict import OutcomeTable, Verdict, VerdictRow

CURVE_POINTS = 200
NUM_COLUMNS = 5
_COLOURS = ("#c44e52", "#4c72b0", "#dd8452", "#8172b3", "#937860", "#da8bc3", "#64b5cd", "#ccb974")
_FIXED = {"best-static": "#000000", "random": "#999999"}
_DEFAULT_COLOUR = "#0b6e4f"


def draw(verdict: Verdict, table: OutcomeTable, scenario: str, path: Path) -> None:
    """Write a PNG of the verdict to `path`; `scenario` is the one whose accuracies are drawn.

    Ratios are those to the first row that all were asked to be compared with, else to best static.
    """
    base = verdict.against[0] if verdict.against else BEST_STATIC
    labels, fixed = [row.policy for row in verdict.policies], _FIXED | {verdict.default_policy: _DEFAULT_COLOUR}
    others = [label for label in labels if label not in fixed]
    colours = {label: fixed.get(label) or _COLOURS[others.index(label) % len(_COLOURS)] for label in labels}
    number = len(verdict.heterogeneous_families)
    panels = [(f"{number} heterogeneous families together" if number else "all families together", verdict.policies)]
    for name, family in verdict.families.items():
        panels.append((f"{name} (control)" if family.control else name, family.policies))
    num_rows = math.ceil(len(panels) / NUM_COLUMNS)
    height = num_rows * (0.9 + 0.26 * len(colours))
    figure = Figure(figsize=(16, height + 4.8), layout="constrained")
    subfigures = figure.subfigures(2, 1, squeeze=False, height_ratios=(height, 4.2))
    upper, lower = subfigures[0, 0], subfigures[1, 0]
    grid = upper.subplots(num_rows, min(NUM_COLUMNS, len(panels)), squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, rows) in zip(grid.flat, panels, strict=False):
        _intervals(axes, rows, colours, base)
        axes.set_title(title, fontsize="medium")
    axes = lower.subplots()  # mean accuracy over virtual time, until the slowest run ended
    for label, colour in colours.items():
        if curves := [curve for curve in table.curves(label, scenario) if curve]:
            times_s = np.linspace(0, max(curve[-1].time_s for curve in curves), CURVE_POINTS)
            axes.plot(times_s, mean_curve(curves, times_s), color=colour, label=label, linewidth=1.4)
    axes.axhline(table.target_accuracy(scenario), color="black", linewidth=0.8, linestyle=":")
    axes.set(
        title=f"Scenario {scenario}: validation accuracy, mean of all runs (dotted: the target)",
        xlabel="virtual time [s]",
        ylabel="accuracy",
    )
    axes.set_ylim(bottom=max(0.0, table.target_accuracy(scenario) - 0.15))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2, loc="lower right")
    figure.suptitle(
        f"Suite {verdict.suite}: time to target against {base}, geometric mean of paired ratios with "
        f"95 % interval, {len(verdict.seeds)} seeds; left of 1 is faster"
    )
    with whole(path) as file:
        figure.savefig(file, dpi=110, format="png")


def mean_curve(curves: Sequence[Sequence[Evaluation]], times_s: Array64) -> Array64:
    """Return the mean accuracy of several runs at given times; a finished run keeps its last accuracy."""
    points = [np.array(curve, dtype=np.float64) for curve in curves if curve]
    mean: Array64 = np.mean([np.interp(times_s, curve[:, 0], curve[:, 1]) for curve in points], axis=0)
    return mean


def _intervals(axes: Axes, rows: Sequence[VerdictRow], colours: dict[str, str], base: str) -> None:
    for place, row in enumerate(rows):
        found = row.ratios[base]
        if found is None:
            axes.annotate(row.note or "no runs", (1, place), va="center", fontsize="x-small", color="#777777")
            continue
        if found.low is not None and found.high is not None:
            axes.plot([found.low, found.high], [place, place], color=colours[row.policy], linewidth=1.6)
        axes.plot([found.value], [place], "o", markersize=4.5, color=colours[row.policy])
        missed = f"\n{row.misses} missed" if row.misses else ""
        axes.annotate(
            f"{found.value:.2f}{missed}",
            (1.005, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize="x-small",
        )
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(range(len(rows)), [row.policy for row in rows], fontsize="small")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
