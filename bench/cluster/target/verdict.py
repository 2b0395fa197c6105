"""The result: a row per case and arm, paired ratios with intervals, predictions beside them, and the targets. Pure."""

import math
from collections.abc import Mapping, Sequence

from bench.harness.command import Target
from bench.harness.figure import Curve, Panel
from bench.results.result import Cell, ExperimentResult, mean_of

from dynamix.lab.experiments.comparison.scores import MeanInterval
from dynamix.lab.experiments.episodes.provenance import code_digest, versions

from .arms import GOODPUT, PROPORTIONAL, RULE, RULE_LOCAL, SPLIT, STATIC
from .campaign import CaseOutcomes
from .outcomes import TargetOutcome
from .prediction import Predicted

NAME = "cluster"
SHORT = "cluster-short"
"""Cases of short runs apart, with more seeds and looks."""
HARM = "cluster-equal"
"""The harm check alone, with more seeds still: what it measures is a few percent."""
BASES = (STATIC, GOODPUT, PROPORTIONAL, RULE)
STEADY_POINTS = (5, 4, 3, 2, 1, 0)
"""How many points below the target the accuracies are whose mean time varies less between seeds than that of one."""
COLUMNS = [
    *("case", "arm", "setting", "time to target, s"),
    *(f"vs {row}" for row in BASES),
    f"vs static, {len(STEADY_POINTS)} accuracies",
    *("predicted vs static", "error"),
]
LIMITS: Mapping[str, Mapping[tuple[str, str], float]] = {
    "unequal-processors": {(RULE, STATIC): 0.70, (RULE, GOODPUT): 0.95, (RULE, PROPORTIONAL): 1.0},
    "slow-link": {(RULE, STATIC): 1.0},
    "slow-links": {(RULE, STATIC): 1.0, (RULE_LOCAL, RULE): 0.6},
    "slow-down": {(RULE, STATIC): 0.65},
    "equal": {(RULE, STATIC): 1.03, (SPLIT, STATIC): 1.03, (RULE_LOCAL, RULE): 1.03},
}
"""Targets: at most this ratio of one row's time to another's."""
PREDICTION_LIMIT = 0.15
"""Target: relative error of a predicted ratio."""


class ClusterTargets(ExperimentResult, frozen=True, kw_only=True):
    """The result, with every run that it was made of."""

    target_accuracy: float
    runs: list[TargetOutcome]
    """Those of the search included."""
    predicted: dict[str, Predicted]


def result_of(
    found: Sequence[CaseOutcomes],
    predicted: Mapping[str, Predicted],
    *,
    target_accuracy: float,
    grid_s: float,
    seeds: Sequence[int],
    command: str,
    name: str = NAME,
) -> ClusterTargets:
    """Put all cases together."""
    return ClusterTargets(
        name=name,
        command=command,
        scale="full",
        seeds=list(seeds),
        columns=COLUMNS,
        rows=[
            cells
            for case in found
            for cells in _rows(case, predicted.get(case.case.name, Predicted()), target_accuracy)
        ],
        panels=[_panel(case, target_accuracy) for case in found],
        notes=list(_notes(found, predicted, target_accuracy, grid_s)),
        code=code_digest(),
        versions=versions(),
        target_accuracy=target_accuracy,
        runs=_runs(found),
        predicted=dict(predicted),
    )


def targets_of(found: Sequence[CaseOutcomes], predicted: Mapping[str, Predicted]) -> list[Target]:
    """The targets of the cases and rows that were run."""
    targets = []
    for case in found:
        name = case.case.name
        for (row, base), limit in LIMITS.get(name, {}).items():
            ratio = ratio_of(case, row, base)
            if ratio is not None:
                targets.append(Target(name=f"{name}: {row} / {base}", value=ratio.value, at_most=limit))
        for row in case.outcomes:
            error = error_of(case, predicted.get(name, Predicted()), row)
            if row != STATIC and error is not None:
                title = f"{name}: error of the predicted ratio {row} / {STATIC}"
                targets.append(Target(name=title, value=abs(error), at_most=PREDICTION_LIMIT))
    return targets


def ratio_of(case: CaseOutcomes, row: str, base: str) -> MeanInterval | None:
    """Geometric mean of a row's times over another's, in pairs of one seed; `None` where one of them was not run."""
    if row not in case.outcomes or base not in case.outcomes:
        return None
    times_s, bases_s = ([run.counted_s for run in case.outcomes[name]] for name in (row, base))
    return geometric_mean([time_s / base_s for time_s, base_s in zip(times_s, bases_s, strict=True)])


def steady_ratio_of(case: CaseOutcomes, row: str, base: str, target_accuracy: float) -> MeanInterval | None:
    """The same of the mean times to several accuracies up to the target."""
    if row not in case.outcomes or base not in case.outcomes:
        return None
    accuracies = [target_accuracy - points / 100 for points in STEADY_POINTS]
    times_s, bases_s = ([run.mean_time_s(accuracies) for run in case.outcomes[name]] for name in (row, base))
    return geometric_mean([time_s / base_s for time_s, base_s in zip(times_s, bases_s, strict=True)])


def geometric_mean(ratios: Sequence[float]) -> MeanInterval:
    """Geometric mean with Student's 95 % interval of the logarithms; a bootstrap is too narrow for two or three."""
    found = mean_of([math.log(ratio) for ratio in ratios])
    low, high = (None if bound is None else math.exp(bound) for bound in (found.low, found.high))
    return MeanInterval(math.exp(found.value), low, high)


def predicted_ratio_of(predicted: Predicted, row: str) -> float | None:
    """The same of a virtual cluster, against the best static size."""
    if row not in predicted.times_s or STATIC not in predicted.times_s:
        return None
    pairs = zip(predicted.times_s[row], predicted.times_s[STATIC], strict=True)
    return geometric_mean([time_s / base_s for time_s, base_s in pairs]).value


def error_of(case: CaseOutcomes, predicted: Predicted, row: str) -> float | None:
    """Relative error of the predicted ratio."""
    measured, expected = ratio_of(case, row, STATIC), predicted_ratio_of(predicted, row)
    return None if measured is None or expected is None else expected / measured.value - 1


def _rows(case: CaseOutcomes, predicted: Predicted, target_accuracy: float) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for row, runs in case.outcomes.items():
        error = error_of(case, predicted, row)
        rows.append(
            [
                case.case.name,
                row,
                f"`{case.arms[row].label}`",
                " / ".join(map(_time, runs)),
                *(None if row == base else ratio_of(case, row, base) for base in BASES),
                None if row == STATIC else steady_ratio_of(case, row, STATIC, target_accuracy),
                None if row == STATIC else predicted_ratio_of(predicted, row),
                None if row == STATIC or error is None else f"{error:+.0%}",
            ]
        )
    return rows


def _time(run: TargetOutcome) -> str:
    return f"> {run.limit_s:.0f}" if run.time_to_target_s is None else f"{run.time_to_target_s:.1f}"


def _panel(case: CaseOutcomes, target_accuracy: float) -> Panel:
    curves = [
        Curve(label=row, points=[(point.trained_s, point.accuracy) for point in runs[0].points], style="-")
        for row, runs in case.outcomes.items()
    ]
    return Panel(
        title=case.case.title, x="training time [s]", y="held-out accuracy", curves=curves, limit=target_accuracy
    )


def _runs(found: Sequence[CaseOutcomes]) -> list[TargetOutcome]:
    """Each once: the best of a search is also a row's."""
    every = [run for case in found for some in (case.searched, case.outcomes) for runs in some.values() for run in runs]
    return list({(run.case, run.arm, run.seed, run.limit_s): run for run in every}.values())


def _notes(
    found: Sequence[CaseOutcomes], predicted: Mapping[str, Predicted], target_accuracy: float, grid_s: float
) -> list[str]:
    cases = "; ".join(f"`{case.case.name}`: {case.case.title}" for case in found)
    first = target_accuracy - max(STEADY_POINTS) / 100
    what = (
        f"Training time to {target_accuracy:.0%} held-out accuracy in the mean of three looks, one every {grid_s:g} s "
        f"of it while the job stands still. {cases}. `> N`: missed at N s, counted as N. {len(STEADY_POINTS)} "
        f"accuracies: mean of the times to {first:.0%} ... {target_accuracy:.0%}."
    )
    notes = [what]
    if any(case.searched for case in found):
        searches = "; ".join(
            f"`{case.case.name}`: "
            + ", ".join(f"`{run.arm}` {_time(run)}" for runs in case.searched.values() for run in runs)
            for case in found
            if case.searched
        )
        notes.append(
            "Searched under the first seed, each setting until the best one so far had been there or its accuracy was "
            f"5 points below: {searches}."
        )
    errors = [
        f"`{name}` {one.reason or ('-' if one.median_error is None else f'{one.median_error:.1%}')}"
        for name, one in predicted.items()
    ]
    if errors:
        num_seeds = max((len(times) for one in predicted.values() for times in one.times_s.values()), default=0)
        notes.append(
            f"Predicted: {num_seeds} seeds, on virtual clusters that `dynamix calibrate` fitted to a captured run of "
            f"`random`; median error of their step times: {', '.join(errors)}."
        )
    return notes
