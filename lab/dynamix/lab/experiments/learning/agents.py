"""Learned agents of `stigmergy` while they learn: what each of them saw and chose, as a trajectory.

All agents have one network and choose each for itself, by what it sees. While they learn they draw, and all agents of a
job draw by the same number in a window: those that see the same choose the same. The job's batch is the mean of their
appetites, in which the draws of many agents alone would cancel out and teach nothing.

Every agent earns the reward of the job: what each does is worth what it does to all of them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.learning.rollout import End, Trajectory
from dynamix.collector.agent_network import AgentNetwork
from dynamix.lab.experiments.episodes.episode import Episode
from dynamix.schemas.messages import Reward
from dynamix.schemas.networks.forward import log_softmax, sample
from dynamix.schemas.networks.sight import Array32, Sight

POLICY_OPTIONS = {"learned": 1.0}


class AgentChoice(NamedTuple):
    """What one agent chose in one window."""

    inputs_I: Array32
    action: int
    logprob: float
    value: float


class ExploringAgents:
    """All agents of one job, which draw their factors and remember what they saw."""

    def __init__(self, file: PolicyFile, seed: int) -> None:
        self._network = AgentNetwork(file.to_bytes(), "policy")
        self._seed = seed
        self.choices: dict[int, list[AgentChoice]] = {}
        """By window, in the order of nodes."""

    def factor(self, seen: Sight) -> float:
        """Draw one agent's factor."""
        window, network = seen.report.window, self._network
        inputs_I = network.inputs(seen)
        normalised = network.normalised(inputs_I)
        logprobs_DA = log_softmax(network.forward.logits(normalised))
        drawn = np.random.default_rng((self._seed, window)).random(1)
        action = int(sample(logprobs_DA, drawn)[0])
        value = float(network.forward.values(normalised)[0])
        choice = AgentChoice(inputs_I, action, float(logprobs_DA[0, action]), value)
        self.choices.setdefault(window, []).append(choice)
        return network.actions[action]


def trajectory_of_agents(agents: ExploringAgents, episode: Episode, end: End) -> Trajectory | None:
    """The trajectory of an episode; `None` when it was over before a choice ruled a window.

    The trace of window t rules from window t + 1 + lag on, until that of the next window in which agents chose. A
    transition collects the rewards of the windows in between.
    """
    rewards = _mean_rewards(episode.rewards)
    last = max(rewards, default=-1) if end.last_window is None else end.last_window
    if end.last_share < 1 and last in rewards:
        rewards[last] *= end.last_share
    begins = {window + 1 + episode.scenario.lag_windows: window for window in sorted(agents.choices)}
    edges = [*(begin for begin in begins if begin <= last), last + 1]
    spans = [(agents.choices[begins[begin]], range(begin, following)) for begin, following in pairwise(edges)]
    if not spans:
        return None
    num_agents, newest = len(episode.job.nodes), agents.choices[max(agents.choices)]
    earned = np.array([sum(rewards.get(window, 0.0) for window in span) for _, span in spans])
    return Trajectory(
        inputs_TDI=np.stack([[choice.inputs_I for choice in choices] for choices, _ in spans]),
        actions_TD=np.array([[choice.action for choice in choices] for choices, _ in spans], dtype=np.int64),
        logprobs_TD=np.array([[choice.logprob for choice in choices] for choices, _ in spans]),
        values_TD=np.array([[choice.value for choice in choices] for choices, _ in spans]),
        rewards_TD=np.repeat(earned[:, None], num_agents, axis=1),
        num_windows_T=np.array([len(span) for _, span in spans], dtype=np.int64),
        next_values_D=np.zeros(num_agents) if end.terminated else np.array([choice.value for choice in newest]),
        terminated=end.terminated,
    )


def _mean_rewards(rewards: Sequence[Reward]) -> dict[int, float]:
    """The mean over all ranks, by window."""
    by_window: dict[int, list[float]] = {}
    for reward in rewards:
        by_window.setdefault(reward.window, []).extend(rank.reward for rank in reward.ranks)
    return {window: float(np.mean(each)) for window, each in by_window.items()}
