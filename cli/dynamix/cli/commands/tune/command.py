"""Choose the baselines' settings on train scenarios: six settings each, the same scenarios and seeds for all.

Writes the file that `dynamix evaluate` reads them from. Held-out scenarios are never read.
"""

import argparse

from dynamix.cli.commands.evaluate.command import add_run_arguments, check_counts
from dynamix.cli.output import TUNED, add_json_argument, output_path

NUM_SEEDS = 2
RESULTS = "dynamix-tune.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--scenarios", metavar="DIR", help="a directory of scenario files (default: the train scenarios)"
    )
    parser.add_argument("--baselines", metavar="LIST", help="with commas (default: all that have settings)")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="seeds per scenario (default: %(default)s)")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=output_path(TUNED),
        help="the file to write (default: tuned.toml beside the train scenarios, for all baselines only)",
    )
    add_run_arguments(parser, RESULTS)
    add_json_argument(parser)


def run(namespace: argparse.Namespace) -> int:
    """Run all settings and choose; 0, or 130 when it was interrupted: then nothing is chosen."""
    check_counts(namespace)
    from dynamix.cli.commands.evaluate.comparison import choose  # noqa: PLC0415 - torch and rich: only once they are needed

    return choose(namespace)
