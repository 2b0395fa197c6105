"""Learned policies for tests: real networks, untrained, with weights that favour something, or after some updates."""

import json
import struct
from typing import Any

import msgspec
import numpy as np

from dynamix.arbitrator.learned.policy import metadata_of
from dynamix.arbitrator.learned.policy_file import (
    ActionSetName,
    Normalisation,
    Objective,
    PolicyFile,
    PolicyMetadata,
    PPOSettings,
)
from dynamix.arbitrator.learning.ppo import Agent
from dynamix.arbitrator.learning.rollout import Trajectory

SMALL = PPOSettings(hidden_sizes=(16, 16))


def metadata(action_set: ActionSetName = "levers", **fields: Any) -> PolicyMetadata:
    """Metadata of an untrained policy."""
    defaults: dict[str, Any] = {
        "policy": "ppo",
        "settings": SMALL,
        "reward_formula": "time-aware",
        "seeds": (11,),
    }
    return metadata_of(action_set, **(defaults | fields))


def agent(action_set: ActionSetName = "levers", **fields: Any) -> Agent:
    """Untrained."""
    return Agent.new(metadata(action_set, **fields))


def policy_file(
    action_set: ActionSetName = "levers", *, favour: tuple[int, ...] | None = None, gain: float = 1.0, **fields: Any
) -> PolicyFile:
    """An untrained policy that has seen inputs of mean 0 and deviation 1.

    `favour` makes one action of each lever the likeliest by far, whatever there is to see; with a `gain` of hundreds
    the likeliest actions depend on it.
    """
    file = agent(action_set, **fields).file()
    seen = np.full(len(file.metadata.inputs), 1000.0)
    tensors = {**file.tensors, **Normalisation(seen, 0 * seen, seen).tensors()}
    tensors["actor.4.weight"] = np.float32(gain) * tensors["actor.4.weight"]
    if favour is not None:
        biases = [50.0 * (np.arange(len(of)) == at) for of, at in zip(file.metadata.actions, favour, strict=True)]
        tensors["actor.4.bias"] = np.concatenate(biases).astype(np.float32)
    return file._replace(tensors=tensors)


def of_other_features() -> bytes:
    """A file as another version of the program would write it: its network has an input that this one does not have."""
    file = policy_file()
    names = ("ping_ms", *file.metadata.inputs[1:])
    return PolicyFile(msgspec.structs.replace(file.metadata, inputs=names), file.tensors).to_bytes()


def with_metadata(metadata: object) -> bytes:
    """A policy file with these metadata in its header, valid or not."""
    data = policy_file().to_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["dynamix"] = metadata
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def trained_policy(objective: Objective = "clipped", updates: int = 1) -> PolicyFile:
    """A policy after some updates from synthetic decisions; the simplified objective does not change the critic."""
    made = agent(settings=msgspec.structs.replace(SMALL, objective=objective))
    for _ in range(updates):
        learn_once(made)
    return made.file()


def learn_once(agent: Agent) -> PolicyFile:
    """One more update, which depends on the number of updates before it only."""
    agent.learn([trajectory(agent.metadata)])
    return agent.file()


def trajectory(metadata: PolicyMetadata, num: int = 8) -> Trajectory:
    """Synthetic decisions of a job."""
    rng = np.random.default_rng(metadata.num_updates)
    return Trajectory(
        inputs_TDI=rng.standard_normal((num, 1, len(metadata.inputs))).astype(np.float32),
        actions_TDL=rng.integers([len(each) for each in metadata.actions], size=(num, 1, len(metadata.actions))),
        logprobs_TD=np.full((num, 1), -2.0),
        values_TD=np.zeros((num, 1)),
        rewards_TD=rng.standard_normal((num, 1)),
        num_windows_T=np.ones(num, dtype=np.int64),
        next_values_D=np.zeros(1),
        terminated=True,
    )
