"""Learned policies for tests: real networks, untrained or with weights that favour something."""

from typing import Any

import numpy as np

from dynamix.arbitrator.learned.policy import metadata_of
from dynamix.arbitrator.learned.policy_file import LearnedSetName, PolicyFile, PolicyMetadata, PPOSettings
from dynamix.arbitrator.learning.ppo import Agent

SMALL = PPOSettings(hidden_sizes=(16, 16))


def metadata(action_set: LearnedSetName = "global", **fields: Any) -> PolicyMetadata:
    """Metadata of an untrained policy."""
    defaults: dict[str, Any] = {
        "policy": "ppo",
        "settings": SMALL,
        "reward_formula": "time-aware",
        "seeds": (11,),
    }
    return metadata_of(action_set, **(defaults | fields))


def agent(action_set: LearnedSetName = "global", **fields: Any) -> Agent:
    """Untrained."""
    return Agent.new(metadata(action_set, **fields))


def policy_file(action_set: LearnedSetName = "global", *, favour: int | None = None, **fields: Any) -> PolicyFile:
    """An untrained policy; `favour` makes one action the likeliest by far, whatever there is to see."""
    file = agent(action_set, **fields).file()
    if favour is not None:
        bias = np.zeros(len(file.metadata.actions), dtype=np.float32)
        bias[favour] = 50
        file = file._replace(tensors={**file.tensors, "actor.4.bias": bias})
    return file
