"""Policy files with unusual metadata, or with some updates behind them."""

import json
import struct

import msgspec
import numpy as np
from tests.support import learned

from dynamix.arbitrator.learned.policy_file import Objective, PolicyFile, PolicyMetadata
from dynamix.arbitrator.learning.ppo import Agent
from dynamix.arbitrator.learning.rollout import Trajectory


def with_metadata(metadata: object) -> bytes:
    """A policy file with these metadata in its header, valid or not."""
    data = learned.policy_file().to_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["dynamix"] = metadata
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def trained_policy(objective: Objective = "clipped", updates: int = 1) -> PolicyFile:
    """A policy after some updates from synthetic decisions; the simplified objective does not change the critic."""
    agent = learned.agent(settings=msgspec.structs.replace(learned.SMALL, objective=objective))
    for _ in range(updates):
        learn_once(agent)
    return agent.file()


def learn_once(agent: Agent) -> PolicyFile:
    """One more update, which depends on the number of updates before it only."""
    agent.learn([trajectory(agent.metadata)])
    return agent.file()


def trajectory(metadata: PolicyMetadata, num: int = 8) -> Trajectory:
    """Synthetic decisions of a job."""
    rng = np.random.default_rng(metadata.num_updates)
    return Trajectory(
        inputs_TDI=rng.standard_normal((num, 1, len(metadata.inputs))).astype(np.float32),
        actions_TD=rng.integers(len(metadata.actions), size=(num, 1)),
        logprobs_TD=np.full((num, 1), -2.0),
        values_TD=np.zeros((num, 1)),
        rewards_TD=rng.standard_normal((num, 1)),
        num_windows_T=np.ones(num, dtype=np.int64),
        next_values_D=np.zeros(1),
        terminated=True,
    )
