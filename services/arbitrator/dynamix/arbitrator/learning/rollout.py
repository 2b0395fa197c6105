"""Turns the recorded messages of one generation into a trajectory to learn from. Pure.

Credit under lag: the reward of window t scores what ruled in window t. So a decision is paired with the first window
that ran under it (`applied` says which), and its transition lasts until the next adopted decision rules: windows
without a new one add to its reward. A decision that was never adopted ruled nothing and is left out. What a decision
saw is recovered by folding the recorded states again, with the recorded actions in place of the policy's.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.learned.actions import ActionSet
from dynamix.arbitrator.policies.model.observation import Array32, Array64
from dynamix.arbitrator.policies.policy import Decision
from dynamix.schemas.messages import Action, Applied, Job, Reward, State
from dynamix.schemas.networks import Choices


class RolloutError(ValueError):
    """The recorded messages do not make a trajectory; the message has the reason."""


class NothingDecidedError(RolloutError):
    """The generation ended before a decision was active in a rewarded window, or nothing in it was sampled."""


class Recording(NamedTuple):
    """The recorded messages of one generation: in any order but for the states, with duplicates and gaps."""

    job: Job
    states: Sequence[tuple[int, State]]
    """States with their sequence in FEED, in its order: the order in which the arbitrator folded them."""
    actions: Sequence[Action]
    applied: Sequence[Applied]
    rewards: Sequence[Reward]


class End(NamedTuple):
    """End of a trajectory."""

    last_window: int | None = None
    """Later windows do not count; `None`: all do."""
    terminated: bool = False
    """Whether the target was reached. Otherwise it was cut off, and the critic's last value follows."""
    last_share: float = 1.0
    """Share of the last window's reward that counts: the target is reached inside of it."""


class Trajectory(NamedTuple):
    """T transitions of D decisions each (the ranks, or 1 for the job)."""

    inputs_TDI: Array32
    """Inputs as the action set selects them, not normalised; NaN where unknown."""
    actions_TD: Choices
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


def trajectory_of(recording: Recording, action_set: ActionSet, end: End | None = None) -> Trajectory:
    """The trajectory of one generation.

    Raises:
        NothingDecidedError: when no sampled decision that was adopted has a rewarded window.
        RolloutError: when a state does not fit the job.
    """
    end = end or End()
    seen = replay(recording, action_set)
    rewards = _rewards_by_window(recording, per_rank=action_set.name == "deltas")
    last = max(rewards, default=-1) if end.last_window is None else end.last_window
    spans = [(*seen[decided], span) for decided, span in _spans(recording, last) if decided in seen]
    if end.last_share < 1 and last in rewards:
        rewards[last] = rewards[last] * end.last_share
    if not spans or not rewards:
        raise NothingDecidedError(f"{_name(recording.job)}: no sampled decision that was adopted has a rewarded window")
    inputs, actions, windows = zip(*spans, strict=True)
    mean: Array64 = np.mean(list(rewards.values()), axis=0)
    following = np.zeros(len(mean)) if end.terminated else _values(seen[max(seen)][1], len(mean))
    return Trajectory(
        inputs_TDI=np.stack(inputs),
        actions_TD=np.stack([action_set.choices(recording.job, action.carry) for action in actions]),
        logprobs_TD=np.stack([np.asarray(action.logprobs, dtype=np.float64) for action in actions]),
        values_TD=np.stack([_values(action, len(mean)) for action in actions]),
        rewards_TD=np.stack([np.sum([rewards.get(at, mean) for at in span], axis=0) for span in windows]),
        num_windows_T=np.array([len(span) for span in windows], dtype=np.int64),
        next_values_D=following,
        terminated=end.terminated,
    )


def replay(recording: Recording, action_set: ActionSet) -> dict[int, tuple[Array32, Action]]:
    """The inputs of each recorded, sampled decision, and its action, by the window it was decided for.

    Raises:
        RolloutError: when a state does not fit the job.
    """
    actions = {action.window: action for action in recording.actions if _of(recording.job, action)}
    recorded = _RecordedPolicy(actions, action_set)
    fold = Fold(recording.job, recorded, None)
    try:
        for sequence, state in recording.states:
            if _of(recording.job, state):
                fold.add_state(sequence, state)
            while (decided := fold.close()) is not None:
                fold.adopt(actions.get(decided.window, decided))
    except ValueError as error:
        raise RolloutError(f"{_name(recording.job)}: {error}") from error
    return recorded.seen


class _RecordedPolicy:
    """Repeats the recorded decisions, and keeps the inputs that they were made from."""

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
            return situation.base._replace(carry=carry)
        if action.logprobs is not None:
            self.seen[window] = (situation.inputs_DI, action)
        return Decision(action.allocation, carry=action.carry)


def _spans(recording: Recording, last_window: int) -> list[tuple[int, range]]:
    """Each adopted decision's own window, and the windows that ran under it, in order.

    Of two decisions that begin at one window the later one rules.
    """
    begins: dict[int, int] = {}
    for message in recording.applied:
        if _of(recording.job, message) and message.effective_window <= last_window:
            decided = begins.get(message.effective_window, -1)
            begins[message.effective_window] = max(decided, message.decided_window)
    edges = [*sorted(begins), last_window + 1]
    return [(begins[start], range(start, end)) for start, end in pairwise(edges)]


def _rewards_by_window(recording: Recording, *, per_rank: bool) -> dict[int, Array64]:
    """Rewards by decision and window; a rank without a reward gets the mean of the others."""
    world_size = recording.job.world_size
    table: dict[int, Array64] = {}
    for message in recording.rewards:
        if not _of(recording.job, message):
            continue
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


def _of(job: Job, message: State | Action | Applied | Reward) -> bool:
    return message.job == job.job and message.generation == job.generation


def _name(job: Job) -> str:
    return f"generation {job.generation} of job {job.job!r}"
