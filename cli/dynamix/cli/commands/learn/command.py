"""Learn a policy on virtual clusters: episodes, updates, validation, and a policy file at the end.

`ppo` is a bounded residual on `rule`; `ppo-paper` is as published. Only scenarios with learn = true are learned from.
Killed or interrupted, the same command goes on where it was, to the same bits. The policy that is written is the best
by validation (time to the target against `rule`), scored on seeds that chose nothing; judge it with `dynamix evaluate`.
"""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from dynamix.cli.errors import CommandError
from dynamix.cli.output import POLICY, add_json_argument, output_directory, output_path

WEIGHTS = ("accuracy", "alpha", "beta", "delta", "eta")
NUM_WORKERS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--scenarios",
        metavar="train|DIR",
        default="train",
        help="the train suite, or a directory (default: %(default)s)",
    )
    parser.add_argument("--policy", default="ppo", help="ppo, ppo-paper, or another name for ppo's preset")
    parser.add_argument("--seed", type=int, default=0, help="of the learning (default: %(default)s)")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=output_path(POLICY, streams=False),
        help="default: POLICY-SEED.safetensors",
    )
    parser.add_argument("--episodes", type=int, help="to play (default: the preset's)")
    parser.add_argument("--minutes", type=float, help="stop sooner, after this time; the same command goes on")
    parser.add_argument("--workers", type=int, default=NUM_WORKERS, help="processes (default: %(default)s)")
    parser.add_argument("--data", metavar="DIR", help="directory with the data sets (default: the usual places)")
    parser.add_argument("--log", metavar="DIR", type=output_directory, help="write TensorBoard curves")
    parser.add_argument("--restart", action="store_true", help="forget what an interrupted learning had reached")
    parser.add_argument("--publish", action="store_true", help="put failure signatures and the policy on the bus")
    add_json_argument(parser)
    how = parser.add_argument_group("what the preset says otherwise")
    how.add_argument("--objective", choices=("clipped", "simplified"), help="PPO's objective, or the paper's")
    how.add_argument("--actions", choices=("deltas", "global"), help="one choice per rank, or one for the job")
    how.add_argument("--reward", choices=("auto", "paper-sgd", "paper-adam", "time-aware"), help="auto: as published")
    for name in WEIGHTS:
        how.add_argument(f"--{name}", type=float, metavar="X", help=f"weight {name} of the reward")
    how.add_argument("--episode-end", choices=("target", "fixed"), help="end with the target, or after a fixed time")
    how.add_argument("--episodes-per-update", type=int, metavar="N", help="episodes in a batch")
    how.add_argument("--validate-every", type=int, metavar="N", help="updates between two validations")
    how.add_argument("--select", choices=("best", "last"), help="which version is written")
    how.add_argument(
        "--ppo", metavar="NAME=VALUE", action="append", default=[], help="a setting of PPO, e.g. clip_coef=0.1"
    )


def run(namespace: argparse.Namespace) -> int:
    """Learn; 0 when the plan is done, 130 when it was interrupted."""
    from .learning import learn_and_tell  # noqa: PLC0415 - torch: only once it is needed

    return learn_and_tell(namespace, _changes(namespace))


def output_of(namespace: argparse.Namespace) -> Path:
    """The file to write."""
    return Path(namespace.output or f"{namespace.policy}-{namespace.seed}.safetensors")


def _changes(namespace: argparse.Namespace) -> dict[str, Any]:
    """What the arguments change of the preset; values as text where only the settings know their type."""
    for name in ("workers", "episodes"):
        if (value := getattr(namespace, name)) is not None and value < 1:
            raise CommandError(f"--{name} {value}: at least 1 is needed", exit_code=2)
    given = {
        "seed": namespace.seed,
        "num_episodes": namespace.episodes,
        "episodes_per_update": namespace.episodes_per_update,
        "validate_every": namespace.validate_every,
        "action_set": namespace.actions,
        "episode_end": namespace.episode_end,
        "select": namespace.select,
    }
    return {name: value for name, value in given.items() if value is not None}


def settings_given(namespace: argparse.Namespace) -> dict[str, Any]:
    """PPO's settings among the arguments.

    Raises:
        CommandError: when one is not NAME=VALUE.
    """
    given: dict[str, Any] = {} if namespace.objective is None else {"objective": namespace.objective}
    for text in namespace.ppo:
        name, separator, value = text.partition("=")
        if not separator:
            raise CommandError(f"--ppo {text!r}: write NAME=VALUE, for example clip_coef=0.1", exit_code=2)
        try:
            given[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            given[name] = value
    return given
