"""One episode of learning: run it, and make a trajectory of its messages."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.learning.rollout import End, NothingDecidedError, Recording, Trajectory, trajectory_of
from dynamix.arbitrator.policies.policy import Policy
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.collector.agent import Chooser
from dynamix.collector.agent_network import AgentNetwork
from dynamix.lab.experiments.episodes.episode import Episode, run_episode
from dynamix.lab.experiments.episodes.pool import workload_data
from dynamix.lab.simulator.scenario import Scenario
from dynamix.reward.formula import Formula, Weights
from dynamix.schemas.messages.policies import DIVIDED_BY_RANKS, STIGMERGY

from .agents import POLICY_OPTIONS, ExploringAgents, trajectory_of_agents

RULE = "rule"
"""The policy that every learned policy is compared with."""


class EpisodeTask(NamedTuple):
    """One episode to run."""

    scenario: Scenario
    seed: int
    policy: bytes
    """The file; empty for `rule`."""
    mode: Literal["explore", "greedy"]
    """`explore` samples and keeps a trajectory."""
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
    """`None` when nothing was sampled, or the target was reached before the first decision ruled."""


def play(task: EpisodeTask) -> EpisodeResult:
    """Run one episode in this process.

    Raises:
        ValueError: when the scenario's data is missing, or the policy cannot be used.
    """
    explores, deciding = task.mode == "explore", _deciding(task)
    scenario = task.scenario
    if task.fixed_s is not None:
        fixed_s = min(task.fixed_s, scenario.time_limit_s)
        scenario = msgspec.structs.replace(scenario, fixed_time_s=fixed_s, time_limit_s=fixed_s)
    else:  # what comes after the target teaches nothing
        scenario = msgspec.structs.replace(scenario, fixed_time_s=0.0)
    episode = run_episode(
        scenario,
        deciding.policy,
        data=workload_data(scenario.workload, task.data),
        seed=task.seed,
        policy_options=deciding.options,
        reward=(task.formula, task.weights) if explores else None,
        keep_messages=explores,
        choose=deciding.choose,
    )
    reached = episode.time_to_target_s
    return EpisodeResult(
        time_s=scenario.time_limit_s if reached is None else reached,
        missed=reached is None,
        trajectory=_trajectory(task, episode, deciding.agents) if explores else None,
    )


TRACK = MappingProxyType({"track": 1.0})
"""For a job whose policy's name does not tell its ranks that they divide the batch from the first step on."""


class _Deciding(NamedTuple):
    """What decides in an episode."""

    policy: Policy
    options: Mapping[str, float] = MappingProxyType({})
    choose: Chooser | None = None
    agents: ExploringAgents | None = None


def _deciding(task: EpisodeTask) -> _Deciding:
    if not task.policy:
        return _Deciding(policy_named(RULE))
    file, explores = PolicyFile.from_bytes(task.policy), task.mode == "explore"
    if file.metadata.action_set != "appetite":
        policy = LearnedPolicy(file, explore=explores)
        tracks = "track" in policy.options and policy.options["track"].default == 1
        return _Deciding(policy, TRACK if tracks and policy.name not in DIVIDED_BY_RANKS else {})
    of_agents = _Deciding(policy_named(STIGMERGY), POLICY_OPTIONS)
    if explores:
        agents = ExploringAgents(file, task.seed)
        return of_agents._replace(choose=agents.factor, agents=agents)
    return of_agents._replace(choose=AgentNetwork(task.policy, "policy").factor)


def _trajectory(task: EpisodeTask, episode: Episode, agents: ExploringAgents | None) -> Trajectory | None:
    end = end_of(episode) if task.fixed_s is None else End()
    if agents is not None:
        return trajectory_of_agents(agents, episode, end)
    action_set = PolicyFile.from_bytes(task.policy).metadata.make_action_set()
    recording = Recording(
        job=episode.job,
        states=list(enumerate(episode.states, start=1)),
        actions=episode.actions,
        applied=episode.applied,
        rewards=episode.rewards,
    )
    try:
        return trajectory_of(recording, action_set, end)
    except NothingDecidedError:
        return None


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
