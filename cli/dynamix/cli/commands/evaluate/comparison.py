"""What an evaluation runs, and reasons to doubt its verdict."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dynamix.cli.errors import INTERRUPTED, MisuseError
from dynamix.cli.runs import RunsProgress, suite_of
from dynamix.lab.comparison.rows import (
    Row,
    Tuned,
    parse_rows,
    read_rows,
    read_tuned,
    untuned_families,
    with_references,
)
from dynamix.lab.comparison.runs import ComparisonCell, Ledger, estimate, fill, plan
from dynamix.lab.comparison.tuning import EXCHANGE_GRID, GRID
from dynamix.lab.comparison.verdict import note_on
from dynamix.lab.simulator.episode import code_digest
from dynamix.lab.simulator.scenario import (
    TRAIN,
    TUNED_EXCHANGE_FILE,
    TUNED_FILE,
    Suite,
    scenario_root,
    suite_named,
)

HOW_TO_FIX = "run `dynamix tune`"


class PlannedComparison(NamedTuple):
    """The policies to compare, and the runs that this takes."""

    suite: Suite
    rows: list[Row]
    tuned: Tuned
    cells: list[ComparisonCell]
    against: list[str]
    """Labels of rows that all are compared with."""


def planned(arguments: argparse.Namespace) -> PlannedComparison:
    """The comparison that the arguments ask for. Raises ValueError when a policy or scenario cannot be used."""
    suite = suite_of(arguments, arguments.suite)
    files = _policy_files(arguments.policy_file)
    asked = read_rows(Path(arguments.rows), files) if arguments.rows else parse_rows(arguments.policies, files)
    against = parse_rows(arguments.against, files) if arguments.against else ()
    learned = parse_rows(",".join(files), files) if files else ()
    rows = with_references([*asked, *learned, *against], files)
    if arguments.exchange is not None:
        rows = [row.permitted(arguments.exchange) for row in rows]
    tuned = read_tuned(Path(arguments.tuned) if arguments.tuned else scenario_root() / TUNED_FILE)
    of_exchanges = scenario_root() / TUNED_EXCHANGE_FILE
    if arguments.exchange is not None and not arguments.tuned and of_exchanges.exists():
        tuned = tuned.with_choices(read_tuned(of_exchanges))
    if arguments.png is not None:
        curves_of(arguments, suite)
    cells = plan(suite, rows, range(arguments.seeds), tuned, crossed=arguments.crossed)
    labels = [row.label for row in (*asked, *against) if row.against or row in against]
    return PlannedComparison(suite, rows, tuned, cells, list(dict.fromkeys(labels)))


def fill_ledger(comparison: PlannedComparison, ledger: Ledger, arguments: argparse.Namespace) -> int:
    """Run what the ledger does not have; the command's exit code."""
    with RunsProgress() as progress:
        for warning in _warnings(comparison):
            progress.write_line(warning)
        progress.write_line(estimate(comparison.cells, ledger).text(arguments.jobs))
        try:
            fill(comparison.cells, ledger, jobs=arguments.jobs, data=arguments.data, on_progress=progress.show_run)
        except KeyboardInterrupt:
            progress.write_line("Interrupted: the verdict is on the finished runs; --resume continues.")
            return INTERRUPTED
    return 0


def _warnings(comparison: PlannedComparison) -> Iterator[str]:
    """Why baselines may be worse than they could be, and learned policies better than they are."""
    suite, rows, tuned, cells, _ = comparison
    if tuned.scenarios != suite_named(TRAIN).digest:
        yield f"The train scenarios have changed since the baselines were tuned: {HOW_TO_FIX}."
    if tuned.code != code_digest():
        yield f"The code has changed since the baselines were tuned: {HOW_TO_FIX}."
    unfit = [scenario.name for scenario in suite.scenarios if not scenario.permits_any_exchange]
    if unfit and any(cell.task.setting.exchange for cell in cells):
        yield f"Workers of {', '.join(unfit)} support neither codecs nor local steps: training is exact there."
    for row in rows:
        has_grid = row.policy in {**GRID, **EXCHANGE_GRID}
        families = untuned_families(row, suite.families, tuned) if has_grid else []
        if families:
            yield f"{row.label} is not tuned for {', '.join(families)} and runs with defaults: {HOW_TO_FIX}."
        if row.policy_files and (note := note_on(row, suite)):
            yield f"{row.label}: {note}"


def curves_of(arguments: argparse.Namespace, suite: Suite) -> str:
    """The scenario whose accuracies are drawn."""
    names = [scenario.name for scenario in suite.scenarios]
    drawn = [*suite.heterogeneous_families, *suite.families][0]
    name: str = arguments.curves or suite.families[drawn][0].name
    if name not in names:
        raise MisuseError(f"--curves {name!r}: suite {suite.name} has {', '.join(names)}")
    return name


def _policy_files(texts: list[str]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for text in texts:
        name, equals, paths = text.partition("=")
        if not equals or not name or not paths:
            raise MisuseError(f"--policy-file {text!r}: write NAME=PATH[,PATH...]")
        files.setdefault(name, []).extend(paths.split(","))
    return files
