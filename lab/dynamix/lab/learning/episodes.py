"""Episodes to learn from, and their trajectories; also those of the learned agents of `stigmergy`.

All agents of a job have one network and choose each for itself, by what it sees. While they learn they draw, and all by
the same number in a window: those that see the same choose the same. The job's batch is the mean of their appetites, in
which the draws of many agents alone would cancel out and teach nothing.

Every agent earns the reward of the job: what each does is worth what it does to all of them.
"""

import contextlib
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from dynamix.arbitrator.learned.policy import LearnedPolicy, action_set_of
from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.learning.rollout import End, NothingDecidedError, Recording, Trajectory, trajectory_of
from dynamix.arbitrator.policies.policy import Policy
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.collector.agent import AgentNetwork, Chooser
from dynamix.lab.simulator.episode import Episode, run_episode, workload_data
from dynamix.lab.simulator.scenario import Scenario
from dynamix.reward.formula import Formula, Weights
from dynamix.schemas.networks import log_softmax, sample
from dynamix.schemas.policies import DIVIDED_BY_RANKS, STIGMERGY
from dynamix.schemas.sight import Array32, Sight, inputs_of


class AgentChoice(NamedTuple):
    """Choice of one agent in one window."""

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
        """Choices by window, in the order of nodes."""

    def factor(self, seen: Sight) -> float:
        """Draw one agent's factor."""
        window, network = seen.report.window, self._network
        inputs_I = inputs_of(seen)
        normalised = network.normalised(inputs_I)
        logprobs_DA = log_softmax(network.forward.logits(normalised))
        drawn = np.random.default_rng((self._seed, window)).random(1)
        action = int(sample(logprobs_DA, drawn)[0])
        value = float(network.forward.values(normalised)[0])
        choice = AgentChoice(inputs_I, action, float(logprobs_DA[0, action]), value)
        self.choices.setdefault(window, []).append(choice)
        return network.actions[action]


def trajectory_of_agents(agents: ExploringAgents, episode: Episode, end: End) -> Trajectory | None:
    """The trajectory of an episode; `None` when it was over before a choice applied to a window.

    The trace of window t applies from window t + 1 + lag on, until that of the next window in which agents chose. A
    transition collects the rewards of the windows in between.
    """
    earned_by: dict[int, list[float]] = {}
    for reward in episode.rewards:
        earned_by.setdefault(reward.window, []).extend(rank.reward for rank in reward.ranks)
    rewards = {window: float(np.mean(each)) for window, each in earned_by.items()}
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


class EpisodeTask(NamedTuple):
    """One episode to run."""

    scenario: Scenario
    seed: int
    policy: bytes
    """The file; empty for `rule`."""
    explores: bool
    """Whether it samples and keeps a trajectory."""
    formula: Formula | None = None
    weights: Weights = Weights()
    fixed_s: float | None = None
    """Virtual seconds after which the episode ends, whatever was reached; `None`: with the target."""
    data: Path | None = None

    @property
    def name(self) -> str:
        """Scenario and seed in words, for messages."""
        return f"scenario {self.scenario.name}, seed {self.seed}"


class EpisodeResult(NamedTuple):
    """Result of an episode."""

    time_s: float
    """To the target; a miss counts as the time limit."""
    missed: bool
    trajectory: Trajectory | None
    """`None` when nothing was sampled, or the target was reached before the first decision applied."""


def play(task: EpisodeTask) -> EpisodeResult:
    """Run one episode in this process.

    Raises:
        ValueError: when the scenario's data is missing, or the policy cannot be used.
    """
    explores, scenario = task.explores, task.scenario
    file = PolicyFile.from_bytes(task.policy) if task.policy else None
    policy: Policy = policy_named("rule")
    options: dict[str, float] = {}
    choose: Chooser | None = None
    agents: ExploringAgents | None = None
    if file is not None and file.metadata.action_set == "appetite":
        policy, options = policy_named(STIGMERGY), {"learned": 1.0}
        if explores:
            agents = ExploringAgents(file, task.seed)
        choose = AgentNetwork(task.policy, "policy").factor if agents is None else agents.factor
    elif file is not None:
        policy = LearnedPolicy(file, explore=explores)
        tracks = "track" in policy.options and policy.options["track"].default == 1
        if tracks and policy.name not in DIVIDED_BY_RANKS:  # its name does not tell its ranks that they divide
            options = {"track": 1.0}
    if task.fixed_s is not None:
        fixed_s = min(task.fixed_s, scenario.time_limit_s)
        scenario = msgspec.structs.replace(scenario, fixed_time_s=fixed_s, time_limit_s=fixed_s)
    else:  # what comes after the target teaches nothing
        scenario = msgspec.structs.replace(scenario, fixed_time_s=0.0)
    episode = run_episode(
        scenario,
        policy,
        data=workload_data(scenario.workload, task.data),
        seed=task.seed,
        policy_options=options,
        reward=(task.formula, task.weights) if explores else None,
        keep_messages=explores,
        choose=choose,
    )
    trajectory: Trajectory | None = None
    end = end_of(episode) if task.fixed_s is None else End()
    if agents is not None:
        trajectory = trajectory_of_agents(agents, episode, end)
    elif explores and file is not None:
        recording = Recording(
            job=episode.job,
            states=list(enumerate(episode.states, start=1)),
            actions=episode.actions,
            applied=episode.applied,
            rewards=episode.rewards,
        )
        with contextlib.suppress(NothingDecidedError):
            trajectory = trajectory_of(recording, action_set_of(file.metadata), end)
    reached = episode.time_to_target_s
    return EpisodeResult(scenario.time_limit_s if reached is None else reached, reached is None, trajectory)


def end_of(episode: Episode) -> End:
    """The window in which the target was reached, and the share of it that came before; a miss was cut off."""
    if episode.time_to_target_s is None:
        return End()
    begin_s = 0.0
    times = {window.window: window.job_metrics.step_time_s * window.num_steps for window in episode.windows}
    for number, time_s in sorted(times.items()):
        if episode.time_to_target_s <= begin_s + time_s:
            return End(number, terminated=True, last_share=max(0.0, episode.time_to_target_s - begin_s) / time_s)
        begin_s += time_s
    return End(terminated=True)
