"""What an evaluation runs, and reasons to doubt its verdict."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dynamix.cli.errors import INTERRUPTED, MisuseError
from dynamix.cli.runs import RunsProgress, suite_of
from dynamix.lab.experiments.comparison.contenders import Contender, parse_contenders, untuned_families, with_references
from dynamix.lab.experiments.comparison.evaluation import ComparisonCell, estimate, fill, plan
from dynamix.lab.experiments.comparison.runs import Ledger
from dynamix.lab.experiments.comparison.tuned import Tuned, read_tuned
from dynamix.lab.experiments.comparison.tuning import EXCHANGE_GRID, GRID
from dynamix.lab.experiments.comparison.verdict import note_on
from dynamix.lab.experiments.episodes.provenance import code_digest
from dynamix.lab.experiments.episodes.suite import (
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
    contenders: list[Contender]
    tuned: Tuned
    cells: list[ComparisonCell]
    against: list[str]
    """Labels of rows that all are compared with."""


def planned(arguments: argparse.Namespace) -> PlannedComparison:
    """The comparison that the arguments ask for. Raises ValueError when a policy or scenario cannot be used."""
    suite = suite_of(arguments, arguments.suite)
    files = _policy_files(arguments.policy_file)
    named = parse_contenders(",".join(filter(None, (arguments.policies, *files, arguments.against))), files)
    contenders = with_references(named, files)
    if arguments.exchange is not None:
        contenders = [contender.permitted(arguments.exchange) for contender in contenders]
    tuned = read_tuned(Path(arguments.tuned) if arguments.tuned else scenario_root() / TUNED_FILE)
    of_exchanges = scenario_root() / TUNED_EXCHANGE_FILE
    if arguments.exchange is not None and not arguments.tuned and of_exchanges.exists():
        tuned = tuned.with_choices(read_tuned(of_exchanges))
    if arguments.png is not None:
        curves_of(arguments, suite)
    cells = plan(suite, contenders, range(arguments.seeds), tuned, crossed=arguments.crossed)
    against = parse_contenders(arguments.against, files) if arguments.against else ()
    return PlannedComparison(suite, contenders, tuned, cells, [contender.label for contender in against])


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
    suite, contenders, tuned, cells, _ = comparison
    if tuned.scenarios != suite_named(TRAIN).digest:
        yield f"The train scenarios have changed since the baselines were tuned: {HOW_TO_FIX}."
    if tuned.code != code_digest():
        yield f"The code has changed since the baselines were tuned: {HOW_TO_FIX}."
    unfit = [scenario.name for scenario in suite.scenarios if not scenario.permits_any_exchange]
    if unfit and any(cell.task.setting.exchange for cell in cells):
        yield f"Gradients travel as they are in {', '.join(unfit)}: no other exchange can be carried out there."
    for contender in contenders:
        has_grid = contender.policy in {**GRID, **EXCHANGE_GRID}
        families = untuned_families(contender, suite.families, tuned) if has_grid else []
        if families:
            yield f"{contender.label} is not tuned for {', '.join(families)} and runs with defaults: {HOW_TO_FIX}."
        if contender.files and (note := note_on(contender, suite)):
            yield f"{contender.label}: {note}"


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
