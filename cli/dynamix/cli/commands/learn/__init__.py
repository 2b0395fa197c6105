"""Learn a policy by PPO on virtual clusters, and write it to a file.

`ppo` learns a bounded correction of `rule`, `ppo-paper` the published method, `stigmergy` a bounded correction of each
agent's wish. Only scenarios with learn = true are used. Killed or interrupted, the same command continues to the same
bits. The version that is written is the best by validation (time to the target against `rule`), scored on other seeds;
judge it with `dynamix evaluate`.
"""

import argparse

from dynamix.cli.arguments import (
    add_data_argument,
    add_json_argument,
    add_list,
    add_option,
    add_output_argument,
    count,
    number,
    seed,
)
from dynamix.cli.output import POLICY

WEIGHTS = ("accuracy", "alpha", "beta", "delta", "eta")
"""Weights of the reward that are arguments."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_option(parser, "--scenarios", "train", "the train suite, or a directory", metavar="train|DIR")
    parser.add_argument(
        "--policy", default="ppo", help="ppo, ppo-paper, stigmergy (its agents), or another name: ppo's preset"
    )
    add_option(parser, "--seed", 0, "of the learning", type=seed)
    add_output_argument(parser, POLICY, "default: POLICY-SEED.safetensors")
    parser.add_argument("--episodes", type=count(), help="to play (default: the preset's)")
    parser.add_argument("--minutes", type=number(0), help="stop sooner, after this time; the same command continues")
    add_option(parser, "--workers", 2, "processes")
    add_data_argument(parser)
    parser.add_argument("--restart", action="store_true", help="discard the checkpoint of an interrupted run")
    parser.add_argument("--publish", action="store_true", help="put failure signatures and the policy on the bus")
    add_json_argument(parser)
    how = parser.add_argument_group("overrides of the preset")
    how.add_argument("--objective", choices=("clipped", "simplified"), help="PPO's objective, or the paper's")
    how.add_argument(
        "--actions", choices=("deltas", "global", "levers"), help="per rank, one for the job, or levers on the rule"
    )
    how.add_argument("--reward", choices=("auto", "paper-sgd", "paper-adam", "time-aware"), help="auto: as published")
    for name in WEIGHTS:
        how.add_argument(f"--{name}", type=number(), metavar="X", help=f"weight {name} of the reward")
    how.add_argument("--episode-end", choices=("target", "fixed"), help="end with the target, or after a fixed time")
    how.add_argument("--episodes-per-update", type=count(), metavar="N", help="episodes in a batch")
    how.add_argument("--curriculum", type=worker_numbers, metavar="N,...", help="workers of each stage of learning")
    how.add_argument("--validate-every", type=count(), metavar="N", help="updates between two validations")
    how.add_argument("--select", choices=("best", "last"), help="which version is written")
    add_list(how, "--ppo", "NAME=VALUE", "a setting of PPO, e.g. clip_coef=0.1")


def worker_numbers(text: str) -> tuple[int, ...]:
    """An argument's type: whole numbers from 1, with commas."""
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) >= 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers of workers with commas, as in 2,8,32")
    return tuple(map(int, numbers))


def run(arguments: argparse.Namespace) -> int:
    """Learn; 0 when the plan is done, 130 when it was interrupted."""
    from .learning import learn_policy

    return learn_policy(arguments)
