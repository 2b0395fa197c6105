"""Choose the baselines' settings on the train scenarios: six settings each, the same scenarios and seeds for all.

Writes the file that `dynamix evaluate` reads them from. Held-out scenarios are never read.
"""

import argparse
from pathlib import Path

from dynamix.cli.errors import MisuseError, check_counts, explained
from dynamix.cli.output import STANDARD_OUTPUT, TUNED, add_json_argument, add_option, add_output_argument, write_json
from dynamix.cli.runs import RunsProgress, add_run_arguments, command_line, suite_of
from dynamix.runtime import output_files


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    what = "a directory of scenario files (default: the train scenarios)"
    parser.add_argument("--scenarios", metavar="DIR", help=what)
    parser.add_argument("--baselines", metavar="LIST", help="separated by commas (default: all that have settings)")
    parser.add_argument(
        "--exchange",
        choices=("lossy", "local"),
        help="tune the baselines that decide how gradients travel, in jobs that permit this",
    )
    add_option(parser, "--seeds", 3, "seeds per scenario")
    what = (
        "the file to write (default, for all baselines only: tuned.toml beside the train scenarios, or "
        "tuned-exchange.toml with --exchange)"
    )
    add_output_argument(parser, TUNED, what)
    add_run_arguments(parser, "dynamix-tune.jsonl")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run all settings and choose; an interrupt chooses nothing."""
    check_counts(arguments, "seeds", "jobs")
    from dynamix.lab.comparison.rows import to_toml
    from dynamix.lab.comparison.runs import Ledger
    from dynamix.lab.comparison.tuning import EXCHANGE_GRID, FIRST_SEED, GRID, tune
    from dynamix.lab.simulator.episode import EpisodeError
    from dynamix.lab.simulator.scenario import TRAIN

    from .view import show

    scenarios = ["--scenarios", arguments.scenarios] if arguments.scenarios else []
    baselines = ["--baselines", arguments.baselines] if arguments.baselines else []
    exchange = ["--exchange", arguments.exchange] if arguments.exchange else []
    grid = EXCHANGE_GRID if arguments.exchange else GRID
    with explained(OSError, ValueError, EpisodeError):
        suite, output = suite_of(arguments, TRAIN), _output(arguments)
        with Ledger(Path(arguments.results), resume=arguments.resume) as ledger, RunsProgress() as progress:
            tuned = tune(
                suite,
                ledger,
                seeds=range(FIRST_SEED, FIRST_SEED + arguments.seeds),
                baselines=tuple(arguments.baselines.split(",")) if arguments.baselines else tuple(grid),
                exchange=arguments.exchange,
                command=command_line("tune", *scenarios, *baselines, *exchange, "--seeds", arguments.seeds),
                jobs=arguments.jobs,
                data=arguments.data,
                on_estimate=lambda found: progress.write_line(found.text(arguments.jobs)),
                on_progress=progress.show_run,
            )
        output_files.write(output, to_toml(tuned).encode())
        show(tuned, stderr=arguments.json == STANDARD_OUTPUT)
        write_json(tuned, arguments.json)
    return 0


def _output(arguments: argparse.Namespace) -> Path:
    """The file to write: choices for some baselines, or on other scenarios, never replace those for all."""
    if arguments.output:
        return Path(arguments.output)
    from dynamix.lab.simulator.scenario import TUNED_EXCHANGE_FILE, TUNED_FILE, scenario_root

    path = scenario_root() / (TUNED_EXCHANGE_FILE if arguments.exchange else TUNED_FILE)
    for option in ("baselines", "scenarios"):
        if value := getattr(arguments, option):
            what = f"{path} holds the choices for all baselines on the train scenarios"
            raise MisuseError(f"--{option} {value}: {what}; name another file with -o")
    output_files.check(path, TUNED)
    return path
