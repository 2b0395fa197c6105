"""Compare policies on virtual clusters: time to a held-out target accuracy, paired by scenario and seed.

Always shown: best static (its size chosen on train scenarios), random, goodput, the default and the learned policies.
Other rows come from a TOML file (--rows, see scenarios/rows) or a list (--policies): policies by name, with options or
keys of a row after a colon, for example goodput:track=1 or mine:files=mine.safetensors. rule:learning_rate_factor=best
is the best of the learning rates times 0.5, 1 and 2; oracle is the best constant global batch, divided by the speeds of
every step; rule:against=1 compares all rows with this one. With --exchange local every job permits lossy codecs and
local steps; rule:exchange=exact is a row without them. Interrupted, it shows the finished runs; run the same command
again to continue: no run is made twice.

  dynamix evaluate tune     choose the baselines' settings on the train scenarios
"""

import argparse

from dynamix.cli.arguments import (
    add_data_argument,
    add_json_argument,
    add_option,
    add_output_argument,
    add_png_argument,
    output_path,
)
from dynamix.cli.output import TUNED
from dynamix.lab.comparison import LEDGER

POLICIES = ",".join(
    (
        *("proportional", "noise-scale", "doubling", "omnilearn", "best-static:track=1"),
        "static:track=1,local_batch_size=64",
        "goodput:hysteresis=0.05,noise_multiplier=1,track=0",
    )
)
"""Compared with the references; the last is Pollux's rule as published, with a split by measured speed."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the comparison, and of `tune`."""
    add_option(parser, "--scenarios", "heldout", "a suite of the package, or a directory", metavar="heldout|train|DIR")
    rows = parser.add_mutually_exclusive_group()
    add_option(
        rows, "--policies", POLICIES, "policies to compare, NAME[:KEY=VALUE,...], separated by commas", metavar="LIST"
    )
    rows.add_argument("--rows", metavar="FILE", help="a TOML file with a table [[row]] for each policy")
    add_option(parser, "--seeds", 12, "scenario seeds, from 0")
    parser.add_argument(
        "--exchange",
        choices=("exact", "lossy", "local"),
        help="which codecs and local steps every job permits (default: the scenario's)",
    )
    parser.add_argument("--tuned", metavar="FILE", help="the baselines' settings (default: scenarios/tuned.toml)")
    _add_run_arguments(parser, "dynamix-evaluate.jsonl")
    add_json_argument(parser)
    add_png_argument(parser, "draw ratios with intervals, and accuracies of the first heterogeneous scenario")
    description = (
        "Choose the baselines' settings on the train scenarios: six settings each, the same scenarios and seeds for "
        "all. Writes the file that `dynamix evaluate` reads them from. Held-out scenarios are never read."
    )
    actions = parser.add_subparsers(metavar="tune", dest="action")
    tuning = actions.add_parser("tune", help="choose the baselines' settings", description=description)
    what = "a directory of scenario files (default: the train scenarios)"
    tuning.add_argument("--scenarios", metavar="DIR", help=what)
    what = (
        "a TOML file with a table [[row]] for each setting (default: six of each baseline, scenarios/rows/tune*.toml)"
    )
    tuning.add_argument("--rows", metavar="FILE", help=what)
    what = "tune the baselines that decide the gradient exchange, in jobs that permit this"
    tuning.add_argument("--exchange", choices=("lossy", "local"), help=what)
    add_option(tuning, "--seeds", 3, "seeds per scenario")
    what = (
        "the file to write (default, for all baselines only: tuned.toml beside the train scenarios, or "
        "tuned-exchange.toml with --exchange)"
    )
    add_output_argument(tuning, TUNED, what)
    _add_run_arguments(tuning, "dynamix-tune.jsonl")
    add_json_argument(tuning)


def _add_run_arguments(parser: argparse.ArgumentParser, results: str) -> None:
    add_option(parser, "--jobs", 2, "worker processes")
    add_data_argument(parser)
    what = "keeps the results of all runs, one per line: what is there is not run again"
    add_option(parser, "--results", results, what, metavar="FILE", type=output_path(LEDGER, make_parents=True))


def run(arguments: argparse.Namespace) -> int:
    """Compare or tune; an interrupt shows what there is and returns 130."""
    from .comparison import evaluate, tune_baselines

    return tune_baselines(arguments) if arguments.action == "tune" else evaluate(arguments)
