"""Turns the recorded messages of one generation into a trajectory to learn from. Pure.

Credit under lag: the reward of window t scores what was in effect in window t. So a decision is paired with the first
window that ran under it (`applied` names it), and its transition lasts until the next adopted decision takes effect:
windows without a new one add to its reward. A decision that was never adopted is left out. What a decision saw is
recovered by folding the recorded states again, with the recorded actions in place of the policy's.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.learned.policy import ActionSet
from dynamix.arbitrator.learned.policy_file import Choices
from dynamix.arbitrator.policies.policy import Array32, Array64, Decision, decided_sizes
from dynamix.schemas.messages import Action, Applied, Job, Message, Reward, State
from dynamix.schemas.messages.allocation import Allocation


class RolloutError(ValueError):
    """The recorded messages do not make a trajectory; the message has the reason."""


class Recording(NamedTuple):
    """The recorded messages of one generation: unordered except for states, with duplicates and gaps."""

    job: Job
    states: list[tuple[int, State]]
    """States with their sequence in FEED, in its order: the order in which the arbitrator folded them."""
    actions: list[Action]
    applied: list[Applied]
    rewards: list[Reward]

    def add(self, sequence: int, message: Message) -> None:
        """Add a message, if it is one of this generation."""
        match message:
            case State(generation=self.job.generation):
                self.states.append((sequence, message))
            case Reward(generation=self.job.generation):
                self.rewards.append(message)
            case Applied(generation=self.job.generation):
                self.applied.append(message)
            case Action(generation=self.job.generation):
                self.actions.append(message)

    @property
    def num_unrewarded(self) -> int:
        """Windows of nodes with a state and without its reward."""
        rewarded = {(reward.window, reward.node) for reward in self.rewards}
        return len({(state.window, state.node) for _, state in self.states} - rewarded)

    @property
    def lacks_actions(self) -> bool:
        """Whether the ranks applied a later action than there is."""
        last = max((action.window for action in self.actions), default=-1)
        return any(receipt.decided_window > last for receipt in self.applied)


class Trajectory(NamedTuple):
    """T transitions of D decisions each (the ranks, or 1 for the job)."""

    inputs_TDI: Array32
    """Inputs as the action set selects them, not normalised; NaN where unknown."""
    actions_TDL: Choices
    """One per lever."""
    logprobs_TD: Array64
    values_TD: Array64
    rewards_TD: Array64
    """Summed over the windows of the transition; the mean over the known windows stands for a missing reward."""
    num_windows_T: Choices
    next_values_D: Array64
    """Values of what comes after the last transition; zeros when it terminated."""
    terminated: bool

    @property
    def total_reward(self) -> float:
        """Undiscounted, mean over the decisions."""
        return float(self.rewards_TD.mean(axis=1).sum())


def trajectory_of(recording: Recording, action_set: ActionSet, *, terminated: bool = False) -> Trajectory:
    """The trajectory of one generation; `terminated`: it did all it meant to, and nothing comes after.

    Raises:
        RolloutError: when no sampled decision that was adopted has a rewarded window, or a state does not fit the job.
    """
    job, actions = recording.job, {action.window: action for action in recording.actions}
    name = f"generation {job.generation} of job {job.job!r}"
    recorded = _RecordedPolicy(actions, action_set)
    fold = Fold(job, recorded, None)
    try:
        for sequence, state in recording.states:
            fold.add_state(sequence, state)
            while (decided := fold.close()) is not None:
                fold.adopt(actions.get(decided.window, decided))
    except ValueError as error:
        raise RolloutError(f"{name}: {error}") from error

    rewards = _rewards_by_window(recording, per_rank=action_set.name == "deltas")
    last = max(rewards, default=-1)
    begins: dict[int, int] = {}
    for receipt in recording.applied:  # of two decisions that begin at one window the later one is in effect
        if receipt.effective_window <= last:
            before = begins.get(receipt.effective_window, -1)
            begins[receipt.effective_window] = max(before, receipt.decided_window)
    edges = pairwise([*sorted(begins), last + 1])
    spans = [(*recorded.seen[begins[at]], range(at, to)) for at, to in edges if begins[at] in recorded.seen]
    if not spans or not rewards:
        raise RolloutError(f"{name}: no sampled decision that was adopted has a rewarded window")
    inputs, decided_by, windows = zip(*spans, strict=True)
    mean: Array64 = np.mean(list(rewards.values()), axis=0)
    newest = recorded.seen[max(recorded.seen)][1]
    return Trajectory(
        inputs_TDI=np.stack(inputs),
        actions_TDL=np.stack([action_set.choices(job, action.carry) for action in decided_by]),
        logprobs_TD=np.stack([np.asarray(action.logprobs, dtype=np.float64) for action in decided_by]),
        values_TD=np.stack([_values(action, len(mean)) for action in decided_by]),
        rewards_TD=np.stack([np.sum([rewards.get(at, mean) for at in span], axis=0) for span in windows]),
        num_windows_T=np.array([len(span) for span in windows], dtype=np.int64),
        next_values_D=np.zeros(len(mean)) if terminated else _values(newest, len(mean)),
        terminated=terminated,
    )


class _RecordedPolicy:
    """Repeats the recorded decisions, and keeps what each sampled one was made from, by its window."""

    name = "recorded"
    version = 1

    def __init__(self, actions: Mapping[int, Action], action_set: ActionSet) -> None:
        self._actions = actions
        self._action_set = action_set
        self.seen: dict[int, tuple[Array32, Action]] = {}

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:
        """The recorded decision, or the last sizes without one."""
        situation = self._action_set.situation(job, window, obs_WF, global_F, carry)
        action = self._actions.get(window)
        if action is None:
            return Decision(Allocation(decided_sizes(obs_WF)), carry=carry)
        if action.logprobs is not None:
            self.seen[window] = (situation.inputs_DI, action)
        return Decision(action.allocation, carry=action.carry)


def _rewards_by_window(recording: Recording, *, per_rank: bool) -> dict[int, Array64]:
    """Rewards by decision and window; a rank without a reward gets the mean of the others."""
    world_size = recording.job.world_size
    table: dict[int, Array64] = {}
    for message in recording.rewards:
        row = table.setdefault(message.window, np.full(world_size, np.nan))
        for rank in message.ranks:
            if rank.rank < world_size:
                row[rank.rank] = rank.reward
    known = {window: row for window, row in table.items() if not np.isnan(row).all()}
    if per_rank:
        return {window: np.where(np.isnan(row), np.nanmean(row), row) for window, row in known.items()}
    return {window: np.array([np.nanmean(row)]) for window, row in known.items()}


def _values(action: Action, num: int) -> Array64:
    return np.zeros(num) if action.values is None else np.asarray(action.values, dtype=np.float64)
