"""Compare policies on virtual clusters: time to a held-out target accuracy, paired by scenario and seed.

Always shown: best static (its size chosen on train scenarios), random (the null), goodput, the default policy and the
learned ones.
A policy is spelled NAME[+track][:option=number,...][@SIZE][/lr=RULE], for example goodput+track, static@128,
rule:noise_multiplier=2,track=0 or goodput/lr=linear. Interrupted, the command prints what is there; --resume goes on.
"""

import argparse

from dynamix.cli.errors import CommandError
from dynamix.cli.output import add_json_argument, add_png_argument, output_path
from dynamix.lab.experiments.comparison.results_file import LEDGER

POLICIES = "rule,proportional,noise-scale,doubling,goodput+track,goodput:noise_multiplier=4,track=1"
"""Rows beside those that are always there; the last shows how much of the rule's gain its weighing of noise is."""

NUM_SEEDS = 12
NUM_JOBS = 2
RESULTS = "dynamix-evaluate.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--suite", choices=("heldout", "train"), default="heldout", help="(default: %(default)s)")
    which.add_argument("--scenarios", metavar="DIR", help="a directory of scenario files of your own instead")
    parser.add_argument("--policies", metavar="LIST", default=POLICIES, help="with commas (default: %(default)s)")
    parser.add_argument(
        "--policy-file",
        metavar="NAME=PATH[,PATH...]",
        action="append",
        default=[],
        help="files of a learned policy, one per policy seed; may be given again",
    )
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="scenario seeds, from 0 (default: %(default)s)")
    parser.add_argument(
        "--crossed",
        action="store_true",
        help="run every policy seed under every scenario seed; by default each scenario seed meets one, in turn",
    )
    parser.add_argument("--tuned", metavar="FILE", help="the baselines' settings (default: scenarios/tuned.toml)")
    add_run_arguments(parser, RESULTS)
    add_json_argument(parser)
    add_png_argument(parser, "draw ratios with intervals, and accuracies of one scenario")
    parser.add_argument(
        "--curves", metavar="SCENARIO", help="whose accuracies --png draws (default: the first heterogeneous one)"
    )


def add_run_arguments(parser: argparse.ArgumentParser, results: str) -> None:
    """Declare what every command has that runs many episodes."""
    parser.add_argument("--jobs", type=int, default=NUM_JOBS, help="worker processes (default: %(default)s)")
    parser.add_argument("--data", metavar="DIR", help="directory with the data sets (default: the usual places)")
    parser.add_argument(
        "--results",
        metavar="FILE",
        type=output_path(LEDGER, streams=False, make_parents=True),
        default=results,
        help="every run's outcome, a line each; nothing but such a file is touched (default: %(default)s)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the runs that FILE has; without, an old file becomes FILE.old"
    )


def run(namespace: argparse.Namespace) -> int:
    """Run the comparison; 0, or 130 when it was interrupted."""
    check_counts(namespace)
    from .comparison import compare  # noqa: PLC0415 - torch and rich: only once they are needed

    return compare(namespace)


def check_counts(namespace: argparse.Namespace) -> None:
    """Refuse numbers of seeds and jobs that make no sense."""
    for name in ("seeds", "jobs"):
        if getattr(namespace, name) < 1:
            raise CommandError(f"--{name} {getattr(namespace, name)}: at least 1 is needed", exit_code=2)
