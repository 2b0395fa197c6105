"""What an experiment found: a table, curves, and how it was found; as JSON and as the table of docs/results.md."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
from bench.harness import tables
from bench.harness.figure import Panel
from scipy.special import stdtrit

from dynamix.lab.experiments.comparison.scores import MeanInterval, RatioInterval
from dynamix.runtime import output_files

NOT_RUN = "Not measured. The command above writes the table here."


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A number with its spread over seeds: a 95 % interval, `None` where there was one seed."""

    value: float
    low: float | None = None
    high: float | None = None


Cell = Estimate | str | int | float | None


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


def mean_of(values: Sequence[float]) -> Estimate:
    """Mean of independent numbers with Student's 95 % interval; of runs of several policies see `Table.mean`."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(value=mean)
    half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(value=mean, low=mean - half, high=mean + half)


def estimate_of(ratio: RatioInterval | None) -> Estimate | None:
    """A paired ratio as a cell."""
    return None if ratio is None else Estimate(value=ratio.ratio, low=ratio.low, high=ratio.high)


def estimate_of_mean(mean: MeanInterval | None) -> Estimate | None:
    """A mean over policy seeds and scenario seeds as a cell."""
    return None if mean is None else Estimate(value=mean.value, low=mean.low, high=mean.high)


def read_result(path: Path) -> ExperimentResult:
    """The result in a JSON file.

    Raises:
        ValueError: when it is no result.
    """
    return msgspec.json.decode(path.read_bytes(), type=ExperimentResult)


def markdown(result: ExperimentResult) -> str:
    """The part of docs/results.md: the table, the seeds, the command, the notes."""
    lines = [tables.markdown(result.columns, [[_text(cell) for cell in row] for row in result.rows])]
    learned = f", learning seeds {_list(result.policy_seeds)}" if result.policy_seeds else ""
    lines += ["", f"Seeds {_list(result.seeds)}{learned}; brackets: 95 % interval. `{result.command}`"]
    lines += [line for note in result.notes for line in ("", note)]
    if result.panels:
        lines += ["", f"![{result.name}](results/{result.name}.png)"]
    return "\n".join(lines)


def write_table(document: Path, name: str, table: str) -> None:
    """Put the table of one experiment between its markers in a document.

    Raises:
        ValueError: when the document has no markers of that name.
    """
    output_files.write(document, tables.replaced(document.read_text(), *markers(name), table).encode())


def table_in(document: str, name: str) -> str:
    """What stands between the markers of one experiment."""
    begin, end = markers(name)
    return document.partition(begin)[2].partition(end)[0].strip("\n")


def markers(name: str) -> tuple[str, str]:
    """The lines around the table of an experiment."""
    return f"<!-- {name}: made by `make results` -->", f"<!-- end of {name} -->"


def _list(numbers: Sequence[int]) -> str:
    first, last = min(numbers), max(numbers)
    if list(numbers) == list(range(first, last + 1)) and len(numbers) > 2:
        return f"{first} to {last}"
    return ", ".join(map(str, numbers))


def _text(cell: Cell) -> str:
    if isinstance(cell, Estimate):
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
