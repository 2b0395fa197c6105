"""Rows and curves that several experiments share."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from bench.harness.figure import Curve, Panel

from dynamix.lab.experiments.comparison.figure import CURVE_POINTS, mean_curve
from dynamix.lab.experiments.comparison.outcome_table import OutcomeTable
from dynamix.lab.simulator.scenario import Scenario

from .result import Cell, Estimate, estimate_of, estimate_of_mean

COLUMNS = ["median time to target, s", "missed", "accuracy at fixed time", "test accuracy", "mean local batch"]


def numbers(table: OutcomeTable, label: str, scenario: Scenario) -> list[Cell]:
    """The cells of `COLUMNS` for a contender in a scenario."""
    families = [scenario.family]
    outcomes = table.outcomes(label, families)
    sizes = [run.samples_seen / run.num_steps / scenario.world_size for run in outcomes]
    return [
        float(np.nanmedian(table.times(label, families))),
        f"{table.num_misses(label, families)} of {len(outcomes)}",
        estimate_of_mean(table.mean(label, families, lambda run: run.accuracy_at_fixed_time)),
        estimate_of_mean(table.mean(label, families, lambda run: run.test_accuracy)),
        float(np.mean(sizes)),
    ]


def against(table: OutcomeTable, label: str, base: str, scenario: Scenario) -> Estimate | None:
    """Time to target of a contender over that of another, in pairs."""
    return estimate_of(table.ratio(label, base, [scenario.family]))


def rows_of(
    table: OutcomeTable, scenarios: Mapping[Any, Scenario], labels: Iterable[str], base: str
) -> list[list[Cell]]:
    """A row for each scenario and contender: title, label, the cells of `COLUMNS`, and the ratio to `base`."""
    return [
        [title, label, *numbers(table, label, scenario), against(table, label, base, scenario)]
        for title, scenario in scenarios.items()
        for label in labels
    ]


def accuracy_panel(table: OutcomeTable, labels: list[str], scenario: Scenario) -> Panel:
    """Mean validation accuracy over virtual time."""
    curves = []
    for label in labels:
        runs = [curve for curve in table.curves(label, scenario.name) if curve]
        times_s = np.linspace(0, max(curve[-1][0] for curve in runs), CURVE_POINTS)
        points = zip(times_s.tolist(), mean_curve(runs, times_s).tolist(), strict=True)
        curves.append(Curve(label=label, points=list(points)))
    return Panel(title=f"{scenario.name}: validation accuracy", x="virtual time [s]", y="accuracy", curves=curves)
