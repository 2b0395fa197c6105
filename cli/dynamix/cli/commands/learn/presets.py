"""What the arguments of `dynamix learn` change of a preset."""

import argparse
from typing import Any

import msgspec

from dynamix.cli.errors import MISUSED, CommandError

WEIGHTS = ("accuracy", "alpha", "beta", "delta", "eta")
"""Weights of the reward that are arguments."""


def changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of the preset that the arguments change."""
    given = {
        "seed": arguments.seed,
        "num_episodes": arguments.episodes,
        "episodes_per_update": arguments.episodes_per_update,
        "validate_every": arguments.validate_every,
        "action_set": arguments.actions,
        "episode_end": arguments.episode_end,
        "select": arguments.select,
    }
    return {name: value for name, value in given.items() if value is not None}


def settings_given(arguments: argparse.Namespace) -> dict[str, Any]:
    """PPO's settings among the arguments.

    Raises:
        CommandError: when one is not NAME=VALUE.
    """
    given: dict[str, Any] = {} if arguments.objective is None else {"objective": arguments.objective}
    for text in arguments.ppo:
        name, separator, value = text.partition("=")
        if not separator:
            raise CommandError(f"--ppo {text!r}: write NAME=VALUE, for example clip_coef=0.1", exit_code=MISUSED)
        try:
            given[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            given[name] = value
    return given
