"""Compare policies on virtual clusters: time to a held-out target accuracy, paired by scenario and seed.

Always shown: best static (its size chosen on train scenarios), random (a baseline), goodput, the default policy and the
learned ones.
The other rows come from a TOML file (--rows, see scenarios/rows) or a list (--policies): policies by name, with options
or keys of a row after a colon, for example goodput:track=1 or static:track=1,local_batch_size=128.
rule:learning_rate_factor=best is the best of the learning rates times 0.5, 1 and 2, and oracle the best constant global
batch under a split that knows the speeds of every step.
With --exchange local every job permits lossy codecs and local steps; rule:exchange=exact is a row without them.
Interrupted, it shows the finished runs; --resume continues.
"""

import argparse
from pathlib import Path

from dynamix.cli.errors import check_counts, explained
from dynamix.cli.output import STANDARD_OUTPUT, add_json_argument, add_list, add_option, add_png_argument, write_json
from dynamix.cli.runs import add_run_arguments, command_line

POLICIES = ",".join(
    (
        *("proportional", "noise-scale", "doubling", "omnilearn", "best-static:track=1"),
        "static:track=1,local_batch_size=64",
        "goodput:hysteresis=0.05,noise_multiplier=1,track=0",
    )
)
"""Compared with the references; the last is Pollux's rule as published, with a split by measured speed."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    which = parser.add_mutually_exclusive_group()
    add_option(which, "--suite", "heldout", "shipped scenarios", choices=("heldout", "train"))
    which.add_argument("--scenarios", metavar="DIR", help="a directory of scenario files of your own instead")
    rows = parser.add_mutually_exclusive_group()
    add_option(rows, "--policies", POLICIES, "NAME[:KEY=VALUE,...], with commas between", metavar="LIST")
    rows.add_argument("--rows", metavar="FILE", help="a TOML file with a table [[row]] for each instead")
    what = "files of a learned policy, one per policy seed; may be given again"
    add_list(parser, "--policy-file", "NAME=PATH[,PATH...]", what)
    add_option(parser, "--seeds", 12, "scenario seeds, from 0")
    parser.add_argument(
        "--exchange",
        choices=("exact", "lossy", "local"),
        help="permission of every job for codecs and local steps (default: the scenario's)",
    )
    parser.add_argument(
        "--against",
        metavar="LIST",
        help="rows with which all are compared, as for --policies; or `against = true` in FILE",
    )
    parser.add_argument(
        "--crossed",
        action="store_true",
        help="run every policy seed under every scenario seed; by default each scenario seed runs with one, in turn",
    )
    parser.add_argument("--tuned", metavar="FILE", help="the baselines' settings (default: scenarios/tuned.toml)")
    add_run_arguments(parser, "dynamix-evaluate.jsonl")
    add_json_argument(parser)
    add_png_argument(parser, "draw ratios with intervals, and accuracies of one scenario")
    parser.add_argument(
        "--curves", metavar="SCENARIO", help="whose accuracies --png draws (default: the first heterogeneous one)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the comparison and show the verdict; an interrupt shows what there is and returns 130."""
    check_counts(arguments, "seeds", "jobs")
    from dynamix.lab.comparison.figure import draw
    from dynamix.lab.comparison.runs import Ledger
    from dynamix.lab.comparison.verdict import VerdictBuilder
    from dynamix.lab.simulator.episode import EpisodeError

    from .comparison import curves_of, fill_ledger, planned
    from .view import show

    with explained(OSError, ValueError, EpisodeError):
        comparison = planned(arguments)
        suite, rows, tuned, cells, against = comparison
        with Ledger(Path(arguments.results), resume=arguments.resume) as ledger:
            exit_code = fill_ledger(comparison, ledger, arguments)
            builder = VerdictBuilder(suite, rows, cells, ledger, tuned, against=against)
        verdict = builder.verdict(_command_line(arguments))
        show(verdict, stderr=arguments.json == STANDARD_OUTPUT)
        write_json(verdict, arguments.json)
        if arguments.png is not None:
            draw(verdict, builder.table, curves_of(arguments, suite), Path(arguments.png))
    return exit_code


def _command_line(arguments: argparse.Namespace) -> str:
    """The command that makes these numbers again, without options that do not change them."""
    which = ["--scenarios", arguments.scenarios] if arguments.scenarios else ["--suite", arguments.suite]
    files = [word for text in arguments.policy_file for word in ("--policy-file", text)]
    how = ["--exchange", arguments.exchange] if arguments.exchange else []
    against = ["--against", arguments.against] if arguments.against else []
    which += ["--rows", arguments.rows] if arguments.rows else ["--policies", arguments.policies]
    rows = [*files, *how, *against]
    return command_line("evaluate", *which, *rows, "--seeds", arguments.seeds)
