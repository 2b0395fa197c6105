"""Episodes to learn from, and their trajectories."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from dynamix.arbitrator.learned.policy import LearnedPolicy, action_set_of
from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.learning.rollout import End, NothingDecidedError, Recording, Trajectory, trajectory_of
from dynamix.arbitrator.policies.policy import Policy
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.lab.simulator.episode import Episode, run_episode, workload_data
from dynamix.lab.simulator.scenario import Scenario
from dynamix.reward.formula import Formula, Weights
from dynamix.schemas.policies import DIVIDED_BY_RANKS


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
    if file is not None:
        policy = LearnedPolicy(file, explore=explores)
        tracks = "track" in policy.options and policy.options["track"].default == 1
        if tracks and policy.name not in DIVIDED_BY_RANKS:  # its name does not tell its ranks that they divide
            options = {"track": 1.0}
    scenario = msgspec.structs.replace(scenario, fixed_time_s=0.0)  # what comes after the target teaches nothing
    episode = run_episode(
        scenario,
        policy,
        data=workload_data(scenario.workload, task.data),
        seed=task.seed,
        policy_options=options,
        reward=(task.formula, task.weights) if explores else None,
        keep_messages=explores,
    )
    trajectory: Trajectory | None = None
    if explores and file is not None:
        recording = Recording(
            job=episode.job,
            states=list(enumerate(episode.states, start=1)),
            actions=episode.actions,
            applied=episode.applied,
            rewards=episode.rewards,
        )
        with contextlib.suppress(NothingDecidedError):
            trajectory = trajectory_of(recording, action_set_of(file.metadata), end_of(episode))
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
