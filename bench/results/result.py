"""What an experiment found: rows, curves, and how it was found; as JSON and as the table of docs/results.md."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from bench.harness import tables
from bench.harness.figure import Curve, Panel, draw
from scipy.special import stdtrit

from dynamix.lab.experiments.comparison.figure import CURVE_POINTS, mean_curve
from dynamix.lab.experiments.comparison.outcomes import OutcomeTable
from dynamix.lab.experiments.comparison.scores import MeanInterval
from dynamix.lab.simulator.scenario import Scenario
from dynamix.runtime import output_files

BASE = "static@64"
"""What every time to a target is compared with."""
COLUMNS = [
    *("median time to target, s", "missed", "accuracy at fixed time", "test accuracy", "mean local batch"),
    f"time vs {BASE}",
]
NOT_RUN = "Not measured. The command above writes the table here."

MADE_BY = {
    "adaptdl": "adaptdl",
    "cluster": "cluster",
    "cluster-short": "cluster-short",
    "cluster-equal": "cluster-equal",
    "exchange-heldout": "heldout-exchange",
    "paper-vgg11": "paper",
    "paper-resnet20": "paper",
    "paper-transformer": "paper",
}
"""Tables that `make results` does not make, and the targets that do."""

Cell = MeanInterval | str | int | float | None


class ExperimentResult(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment, as docs/results/NAME.json holds it."""

    name: str
    command: str
    scale: str
    seeds: list[int]
    policy_seeds: list[int] = []
    """Seeds of the learning, where something was learned."""
    columns: list[str]
    rows: list[list[Cell]]
    panels: list[Panel] = []
    notes: list[str] = []
    """What a reader must know of this run: what stands in for what, what was left out."""
    code: str
    versions: dict[str, str]
    core_minutes: float | None = None
    """What its runs and its learning took, of one core; `None` where it was not noted."""


def mean_of(values: Sequence[float]) -> MeanInterval:
    """Mean of independent numbers with Student's 95 % interval; of runs of several policies see `OutcomeTable.mean`."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return MeanInterval(mean, None, None)
    half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return MeanInterval(mean, mean - half, mean + half)


def trend_of(values: Sequence[float], *, per: int = 1) -> MeanInterval | None:
    """Rise of a straight line through values in turn, over `per` of them, with Student's 95 % interval.

    `None` for less than three values, which have no scatter about a line.
    """
    num_free = len(values) - 2
    if num_free < 1:
        return None
    numbers = np.arange(len(values)) - (len(values) - 1) / 2
    spread = float((numbers**2).sum())
    slope = float(numbers @ np.asarray(values)) / spread
    rest = np.asarray(values) - statistics.fmean(values) - slope * numbers
    half = float(stdtrit(num_free, 0.975)) * math.sqrt(float((rest**2).sum()) / num_free / spread)
    return MeanInterval(per * slope, per * (slope - half), per * (slope + half))


def cells_of(table: OutcomeTable, label: str, scenario: Scenario) -> list[Cell]:
    """The cells of `COLUMNS` for a contender in a scenario; the last one is `ratio_of`."""
    families = [scenario.family]
    outcomes = table.outcomes(label, families)
    sizes = [run.samples_seen / run.num_steps / scenario.world_size for run in outcomes]
    return [
        float(np.nanmedian(table.times(label, families))),
        f"{table.num_misses(label, families)} of {len(outcomes)}",
        table.mean(label, families, lambda run: run.accuracy_at_fixed_time),
        table.mean(label, families, lambda run: run.test_accuracy),
        float(np.mean(sizes)),
        ratio_of(table, label, scenario),
    ]


def ratio_of(table: OutcomeTable, label: str, scenario: Scenario) -> MeanInterval | None:
    """Time to target of a contender over that of `BASE`, in pairs."""
    found = table.ratio(label, BASE, [scenario.family])
    return None if found is None else MeanInterval(found.ratio, found.low, found.high)


def rows_of(table: OutcomeTable, scenarios: Mapping[Any, Scenario], labels: Iterable[str]) -> list[list[Cell]]:
    """A row for each scenario and contender: title, label, and the cells of `COLUMNS`."""
    return [
        [title, label, *cells_of(table, label, scenario)] for title, scenario in scenarios.items() for label in labels
    ]


def accuracy_panel(table: OutcomeTable, labels: list[str], scenario: Scenario) -> Panel:
    """Mean validation accuracy over virtual time."""
    curves = []
    for label in labels:
        runs = [curve for curve in table.curves(label, scenario.name) if curve]
        times_s = np.linspace(0, max(curve[-1][0] for curve in runs), CURVE_POINTS)
        points = zip(times_s.tolist(), mean_curve(runs, times_s).tolist(), strict=True)
        curves.append(Curve(label=label, points=list(points)))
    return Panel(
        title=f"{scenario.name}: validation accuracy",
        x="virtual time [s]",
        y="accuracy",
        curves=curves,
        limit=scenario.target_accuracy,
    )


def markdown(result: ExperimentResult) -> str:
    """The part of docs/results.md: the table, the seeds, the command, the notes."""
    lines = [tables.markdown(result.columns, [[_text(cell) for cell in row] for row in result.rows])]
    learned = f", learning seeds {_list(result.policy_seeds)}" if result.policy_seeds else ""
    lines += ["", f"Seeds {_list(result.seeds)}{learned}; brackets: 95 % interval. `{result.command}`"]
    lines += [line for note in result.notes for line in ("", note)]
    if result.panels:
        lines += ["", f"![{result.name}](results/{result.name}.png)"]
    return "\n".join(lines)


def write(result: ExperimentResult, docs: Path) -> None:
    """Write JSON and picture, and the table into the document.

    Raises:
        ValueError: when the document has no markers of that name.
    """
    directory = docs / "results"
    directory.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(result), indent=1).decode()
    output_files.write(directory / f"{result.name}.json", (text + "\n").encode())
    if result.panels:
        draw([result.panels], directory / f"{result.name}.png")
    write_table(docs / "results.md", result.name, markdown(result))


def write_table(document: Path, name: str, table: str) -> None:
    """Put the table of one experiment between its markers in a document.

    Raises:
        ValueError: when the document has no markers of that name.
    """
    output_files.write(document, tables.replaced(document.read_text(), *markers(name), table).encode())


def markers(name: str) -> tuple[str, str]:
    """The lines around the table of an experiment."""
    return f"<!-- {name}: made by `make {MADE_BY.get(name, 'results')}` -->", f"<!-- end of {name} -->"


def _list(numbers: Sequence[int]) -> str:
    first, last = min(numbers), max(numbers)
    if list(numbers) == list(range(first, last + 1)) and len(numbers) > 2:
        return f"{first} to {last}"
    return ", ".join(map(str, numbers))


def _text(cell: Cell) -> str:
    if isinstance(cell, MeanInterval):
        spread = "" if cell.low is None or cell.high is None else f" [{_number(cell.low)}, {_number(cell.high)}]"
        return _number(cell.value) + spread
    if cell is None:
        return "-"
    return _number(cell) if isinstance(cell, float) else str(cell)


def _number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"
