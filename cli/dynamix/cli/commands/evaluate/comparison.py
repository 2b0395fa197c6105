"""What `dynamix evaluate` and `dynamix tune` do: plan runs, run them under a progress view, tell what came of it."""

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from dynamix.cli.errors import CommandError
from dynamix.cli.output import STANDARD_OUTPUT, TUNED, write_json
from dynamix.cli.runs_view import RunsView
from dynamix.lab.experiments.comparison.contenders import Contender, parse_contenders, untuned_families, with_references
from dynamix.lab.experiments.comparison.evaluation import ComparisonCell, fill, plan
from dynamix.lab.experiments.comparison.figure import draw
from dynamix.lab.experiments.comparison.pool import RunFailedError
from dynamix.lab.experiments.comparison.runs import Ledger
from dynamix.lab.experiments.comparison.tuned import Tuned, read_tuned, to_toml
from dynamix.lab.experiments.comparison.tuning import FIRST_SEED, GRID, tune
from dynamix.lab.experiments.comparison.verdict import VerdictBuilder, note_on
from dynamix.lab.experiments.episodes.provenance import code_digest
from dynamix.lab.experiments.episodes.suite import TRAIN, TUNED_FILE, Suite, read_suite, scenario_root, suite_named
from dynamix.runtime import output_files
from dynamix.runtime.output_files import RefusedOutputError

from .view import show, show_tuned

INTERRUPTED = 130


class Comparison(NamedTuple):
    """What is compared with what."""

    suite: Suite
    contenders: list[Contender]
    tuned: Tuned
    cells: list[ComparisonCell]


def compare(namespace: argparse.Namespace) -> int:
    """Run a comparison and tell its verdict; an interrupt tells what there is."""
    with _sentences():
        comparison = _planned(namespace)
        with _ledger(namespace) as ledger:
            exit_code = _fill(comparison, ledger, namespace)
            suite, contenders, tuned, cells = comparison
            judge = VerdictBuilder(suite, contenders, cells, ledger, tuned)
        verdict = judge.verdict(_evaluate_command(namespace))
        show(verdict, stderr=namespace.json == STANDARD_OUTPUT)
        if namespace.json is not None:
            write_json(verdict, namespace.json)
        if namespace.png is not None:
            draw(verdict, judge.table, _curves_of(namespace, suite), Path(namespace.png))
    return exit_code


def choose(namespace: argparse.Namespace) -> int:
    """Tune the baselines and write the file of their settings."""
    with _sentences():
        suite = read_suite(Path(namespace.scenarios)) if namespace.scenarios else suite_named(TRAIN)
        output = _tuned_output(namespace)
        baselines = tuple(namespace.baselines.split(",")) if namespace.baselines else tuple(GRID)
        with _ledger(namespace) as ledger, RunsView() as view:
            tuned = tune(
                suite,
                ledger,
                seeds=range(FIRST_SEED, FIRST_SEED + namespace.seeds),
                baselines=baselines,
                command=_tune_command(namespace),
                jobs=namespace.jobs,
                data=_data(namespace),
                on_progress=view.show,
            )
        output_files.write(output, to_toml(tuned).encode())
        show_tuned(tuned, stderr=namespace.json == STANDARD_OUTPUT)
        if namespace.json is not None:
            write_json(tuned, namespace.json)
    return 0


def _tuned_output(namespace: argparse.Namespace) -> Path:
    """Where the choices go; those of some baselines, or on other scenarios, never take the place of all."""
    if namespace.output:
        return Path(namespace.output)
    path = scenario_root() / TUNED_FILE
    for option in ("baselines", "scenarios"):
        if getattr(namespace, option):
            raise CommandError(
                f"--{option} {getattr(namespace, option)}: {path} holds the choices for all baselines on the train "
                "scenarios; name another file with -o",
                exit_code=2,
            )
    output_files.check(path, TUNED)
    return path


@contextmanager
def _sentences() -> Iterator[None]:
    """What a person can put right is said in a sentence."""
    try:
        yield
    except RefusedOutputError as error:
        raise CommandError(str(error), exit_code=2) from error
    except (OSError, ValueError, RunFailedError) as error:
        raise CommandError(str(error)) from error


def _planned(namespace: argparse.Namespace) -> Comparison:
    suite = read_suite(Path(namespace.scenarios)) if namespace.scenarios else suite_named(namespace.suite)
    files = _policy_files(namespace.policy_file)
    named = parse_contenders(",".join(filter(None, (namespace.policies, *files))), files)
    contenders = with_references(named, files)
    tuned = read_tuned(Path(namespace.tuned) if namespace.tuned else scenario_root() / TUNED_FILE)
    if namespace.png is not None:
        _curves_of(namespace, suite)
    cells = plan(suite, contenders, range(namespace.seeds), tuned, crossed=namespace.crossed)
    return Comparison(suite, contenders, tuned, cells)


def _fill(comparison: Comparison, ledger: Ledger, namespace: argparse.Namespace) -> int:
    """Run what is missing; the command's exit code."""
    with RunsView() as view:
        for warning in _doubts(comparison):
            view.say(warning)
        try:
            fill(comparison.cells, ledger, jobs=namespace.jobs, data=_data(namespace), on_progress=view.show)
        except KeyboardInterrupt:
            view.say("Interrupted: this is what there is; --resume goes on.")
            return INTERRUPTED
    return 0


def _doubts(comparison: Comparison) -> Iterator[str]:
    """Why the baselines may be worse than they could be, and a learned policy better than it is."""
    suite, contenders, tuned, _ = comparison
    mend = "`dynamix tune` mends that."
    if tuned.scenarios != suite_named(TRAIN).digest:
        yield f"The train scenarios have changed since the baselines were tuned: {mend}"
    if tuned.code != code_digest():
        yield f"The code has changed since the baselines were tuned: {mend}"
    for contender in contenders:
        families = untuned_families(contender, suite.families, tuned) if contender.policy in GRID else []
        if families:
            yield f"{contender.label} runs with defaults in {', '.join(families)}, nothing was chosen for it: {mend}"
        if contender.files and (note := note_on(contender, suite)):
            yield f"{contender.label}: {note}"


def _ledger(namespace: argparse.Namespace) -> Ledger:
    return Ledger(Path(namespace.results), resume=namespace.resume)


def _data(namespace: argparse.Namespace) -> Path | None:
    return None if namespace.data is None else Path(namespace.data)


def _curves_of(namespace: argparse.Namespace, suite: Suite) -> str:
    names = [scenario.name for scenario in suite.scenarios]
    drawn = [*suite.heterogeneous_families, *suite.families][0]
    name: str = namespace.curves or suite.families[drawn][0].name
    if name not in names:
        raise CommandError(f"--curves {name!r}: suite {suite.name} has {', '.join(names)}", exit_code=2)
    return name


def _policy_files(texts: list[str]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for text in texts:
        name, equals, paths = text.partition("=")
        if not equals or not name or not paths:
            raise CommandError(f"--policy-file {text!r}: write NAME=PATH[,PATH...]", exit_code=2)
        files.setdefault(name, []).extend(paths.split(","))
    return files


def _evaluate_command(namespace: argparse.Namespace) -> str:
    """The command that makes these numbers again, without what does not matter for them."""
    which = ["--scenarios", namespace.scenarios] if namespace.scenarios else ["--suite", namespace.suite]
    files = [word for text in namespace.policy_file for word in ("--policy-file", text)]
    return _words("evaluate", *which, "--policies", namespace.policies, *files, "--seeds", namespace.seeds)


def _tune_command(namespace: argparse.Namespace) -> str:
    which = ["--scenarios", namespace.scenarios] if namespace.scenarios else []
    baselines = ["--baselines", namespace.baselines] if namespace.baselines else []
    return _words("tune", *which, *baselines, "--seeds", namespace.seeds)


def _words(*words: object) -> str:
    return shlex.join(["dynamix", *map(str, words)])
