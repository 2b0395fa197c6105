"""An episode: one virtual job under one policy, joined by the very functions that the services call, without a bus."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.families.profile import profile_after
from dynamix.arbitrator.policies.policy import Policy, RecurringPolicy
from dynamix.collector.agent import Chooser, trace_of
from dynamix.collector.window import simulated_window
from dynamix.lab.simulator.cluster import Evaluation, VirtualCluster
from dynamix.lab.simulator.scenario import Scenario
from dynamix.lab.workloads import Data
from dynamix.reward.formula import Formula, Weights, reward_of
from dynamix.schemas.codec import encode
from dynamix.schemas.features import state_of
from dynamix.schemas.messages import Action, Applied, Job, JobProfile, MetricWindow, Report, Reward, State
from dynamix.schemas.messages.allocation import Explored, Objective

GRID_TOLERANCE_S = 1e-9
"""Points of the grid are multiples of a float: the last one may lie a rounding error behind a time."""


class EpisodeMessages(NamedTuple):
    """What the services would have published, in that order."""

    windows: list[MetricWindow]
    states: list[State]
    rewards: list[Reward]

    def extend(self, later: "EpisodeMessages") -> None:
        """Add those of a later window."""
        self.windows.extend(later.windows)
        self.states.extend(later.states)
        self.rewards.extend(later.rewards)


class Episode(NamedTuple):
    """How one job went."""

    scenario: Scenario
    job: Job
    time_to_target_s: float | None
    """First time on the grid at which the validation part was met as the target asks; `None` is a miss."""
    accuracy_at_fixed_time: float | None
    """`None` when the grid has no point before the fixed time."""
    test_accuracy: float
    evaluations: list[Evaluation]
    num_windows: int
    num_steps: int
    samples_seen: int
    virtual_time_s: float
    actions: list[Action]
    applied: list[Applied]
    states: list[State]
    rewards: list[Reward]
    windows: list[MetricWindow]
    profile: JobProfile | None = None
    """The family's profile after the run; `None` in a job without a family, or where nothing was learned."""


def run_episode(
    scenario: Scenario,
    policy: Policy,
    *,
    data: Data,
    seed: int,
    policy_options: Mapping[str, float] | None = None,
    initial_local_batch_size: int | None = None,
    reward: tuple[Formula | None, Weights] | None = None,
    keep_messages: bool = False,
    job: str | None = None,
    on_window: Callable[[list[Report]], None] | None = None,
    make_cluster: type[VirtualCluster] = VirtualCluster,
    family: str = "",
    profile: JobProfile | None = None,
    explores: tuple[Explored, ...] = (),
    objective: Objective = "time",
    choose: Chooser | None = None,
) -> Episode:
    """Run a job to its end; data, options and initial size are as `VirtualCluster` takes them.

    The seed rules weights, order of the data and disturbances: equal seeds make policies comparable in pairs. `reward`
    is the formula (`None`: the published one for the optimizer) and its weights; without it nothing is rewarded.
    `keep_messages` keeps windows, states and rewards. Policies that sample draw by the name of the job, by default of
    scenario and seed. `on_window` is called with the reports of each window. A job of a family begins with the
    `profile` of an earlier episode, if it is given one, and leaves one; it may try out what it `explores`, compared by
    an `objective`. Learned agents `choose` by the shipped network when nothing else is given.

    Raises:
        ValueError: when the scenario names what is not known.
    """
    cluster = make_cluster(
        scenario,
        data,
        seed=seed,
        policy=policy.name,
        policy_options=policy_options,
        initial_local_batch_size=initial_local_batch_size,
        job=job,
        family=family,
        explores=explores,
        objective=objective,
    )
    control = ControlPlane(cluster.job, policy, reward=reward, profile=profile)
    kept = EpisodeMessages([], [], [])
    actions: list[Action] = []
    while reports := cluster.run_window():
        if on_window is not None:
            on_window(reports)
        made, decided = control.of_window(reports)
        if keep_messages:
            kept.extend(made)
        for action in decided:
            cluster.offer(action)
        for trace in filter(None, (trace_of(report, choose) for report in reports)):
            cluster.leave_trace(trace)
        actions += decided
    after = None
    if family and actions and isinstance(policy, RecurringPolicy):
        after = profile_after(cluster.job, actions[-1], policy, profile)
    return episode_of(cluster, actions, kept)._replace(profile=after)


class ControlPlane:
    """Collector, reward service and arbitrator of one job, as functions."""

    def __init__(
        self,
        job: Job,
        policy: Policy,
        *,
        reward: tuple[Formula | None, Weights] | None = None,
        profile: JobProfile | None = None,
    ) -> None:
        self._fold = Fold(job, policy, None, b"" if profile is None else encode(profile))
        self._reward = reward
        self._sequence = 0

    def of_window(self, reports: list[Report]) -> tuple[EpisodeMessages, list[Action]]:
        """What is published on one window's reports, and the actions that follow; reports in the order of nodes."""
        windows = [simulated_window(report) for report in reports]
        states = [state_of(window) for window in windows]
        rewards = []
        if self._reward is not None:
            formula, weights = self._reward
            rewards = [reward_of(window, weights, formula) for window in windows]
        for state in states:
            self._sequence += 1
            self._fold.add_state(self._sequence, state)
        actions = []
        while (action := self._fold.close()) is not None:
            self._fold.adopt(action)
            actions.append(action)
        return EpisodeMessages(windows, states, rewards), actions


def episode_of(cluster: VirtualCluster, actions: list[Action], messages: EpisodeMessages) -> Episode:
    """The outcome of a run that is over."""
    fixed_time_s = cluster.scenario.fixed_time_s + GRID_TOLERANCE_S
    until = [evaluation.accuracy for evaluation in cluster.evaluations if evaluation.time_s <= fixed_time_s]
    return Episode(
        scenario=cluster.scenario,
        job=cluster.job,
        time_to_target_s=cluster.time_to_target_s,
        accuracy_at_fixed_time=until[-1] if until else None,
        test_accuracy=cluster.test_accuracy(),
        evaluations=cluster.evaluations,
        num_windows=cluster.window,
        num_steps=cluster.position.step,
        samples_seen=cluster.position.samples_seen,
        virtual_time_s=cluster.time_s,
        actions=actions,
        applied=cluster.applied,
        states=messages.states,
        rewards=messages.rewards,
        windows=messages.windows,
    )
