"""Rollouts: which decision is credited with which reward, under lag, gaps, duplicates and disorder."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import examples, learned

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.learned.policy import ActionSet, JobLevers, LearnedPolicy, PublishedActions
from dynamix.arbitrator.learned.policy_file import (
    ActionSetName,
    Network,
    Normalisation,
    PolicyFile,
    log_softmax,
)
from dynamix.arbitrator.learning.rollout import Recording, RolloutError, Trajectory, trajectory_of
from dynamix.schemas.messages import Action, Applied, Job, RankReward, Reward, State

NODES = {"node-a": (0, 1), "node-b": (2, 3)}
JOB = examples.job(NODES, policy="ppo", policy_options={"explore": 1.0})
ACTION_SETS: dict[ActionSetName, ActionSet] = {"deltas": PublishedActions(), "levers": JobLevers()}


def states_of(num_windows: int) -> list[State]:
    """States of two nodes, in order."""
    return [
        examples.state(node, ranks, window, throughput=tuple(900.0 + 100 * r + 7 * window for r in ranks))
        for window in range(num_windows)
        for node, ranks in NODES.items()
    ]


def rewards_of(windows: Sequence[int]) -> list[Reward]:
    """Rank r earns 100 t + r in window t."""
    return [
        Reward(
            job=examples.JOB,
            generation=0,
            window=window,
            node=node,
            formula="time-aware",
            ranks=tuple(RankReward(rank=rank, reward=100.0 * window + rank, terms={}) for rank in ranks),
        )
        for window in windows
        for node, ranks in NODES.items()
    ]


def applied_of(pairs: Sequence[tuple[int, int]]) -> list[Applied]:
    """(decided window, effective window)."""
    return [examples.applied(decided, effective) for decided, effective in pairs]


def decide(states: Sequence[tuple[int, State]], file: PolicyFile, job: Job = JOB) -> list[Action]:
    fold, actions = Fold(job, LearnedPolicy(file), None), []
    for sequence, state in states:
        fold.add_state(sequence, state)
        while (action := fold.close()) is not None:
            fold.adopt(action)
            actions.append(action)
    return actions


def recording(
    applied: Sequence[tuple[int, int]], *, action_set: ActionSetName = "levers", num_windows: int = 8
) -> Recording:
    """A whole generation of `num_windows` windows."""
    states = list(enumerate(states_of(num_windows), start=1))
    actions = decide(states, learned.policy_file(action_set))
    return Recording(JOB, states, actions, applied_of(applied), rewards_of(range(num_windows)))


def windows_under(trajectory: Trajectory) -> list[float]:
    """The job's reward of each transition: the mean over ranks of window t is 100 t + 1.5."""
    return trajectory.rewards_TD.mean(axis=1).tolist()


def test_a_decision_is_credited_with_the_first_window_that_ran_under_it_and_per_rank_with_its_own() -> None:
    record = recording([(0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7)])
    found = trajectory_of(record, JobLevers())
    assert windows_under(found) == [100 * t + 1.5 for t in range(2, 8)]
    assert found.num_windows_T.tolist() == [1] * 6
    assert found.logprobs_TD[:, 0].tolist() == [a.logprobs[0] for a in record.actions[:6] if a.logprobs]
    record = recording([(0, 2), (1, 3)], action_set="deltas", num_windows=4)
    found = trajectory_of(record, PublishedActions())
    assert found.rewards_TD.tolist() == [[200, 201, 202, 203], [300, 301, 302, 303]]
    assert found.inputs_TDI.shape[:2] == (2, 4)


def test_windows_without_a_new_decision_extend_the_transition() -> None:
    found = trajectory_of(recording([(0, 2), (3, 5)]), JobLevers())
    assert windows_under(found) == [201.5 + 301.5 + 401.5, 501.5 + 601.5 + 701.5]
    assert found.num_windows_T.tolist() == [3, 3]


def test_a_window_without_reward_gets_the_mean_and_a_missing_node_that_of_the_others() -> None:
    record = recording([(0, 2), (1, 3), (2, 4)], num_windows=6)
    rewards = [r for r in record.rewards if r.window != 3 and (r.window, r.node) != (2, "node-b")]
    found = trajectory_of(record._replace(rewards=rewards), JobLevers())
    known = [1.5, 101.5, 200.5, 401.5, 501.5]
    assert windows_under(found) == pytest.approx([200.5, np.mean(known), 401.5 + 501.5])


def test_a_terminated_end_is_worth_nothing() -> None:
    record = recording([(0, 2), (1, 3), (2, 4), (3, 5)])
    over = trajectory_of(record, JobLevers(), terminated=True)
    assert over.next_values_D.tolist() == [0]
    cut_off = trajectory_of(record, JobLevers())
    assert cut_off.next_values_D.tolist() == list(record.actions[-1].values or ())
    assert cut_off.next_values_D[0] != 0


def test_without_an_adopted_decision_there_is_nothing_to_learn() -> None:
    with pytest.raises(RolloutError, match="no sampled decision that was adopted has a rewarded window"):
        trajectory_of(recording([]), JobLevers())
    with pytest.raises(RolloutError, match="rewarded"):
        trajectory_of(recording([(0, 2)])._replace(rewards=[]), JobLevers())


@pytest.mark.parametrize("action_set", ACTION_SETS)
def test_logprobs_and_values_computed_again_equal_the_recorded_ones(action_set: ActionSetName) -> None:
    """What a decision saw is recovered exactly: otherwise PPO's ratios would compare two different situations."""
    record = recording([(t, t + 2) for t in range(10)], action_set=action_set, num_windows=12)
    file = learned.policy_file(action_set)
    found = trajectory_of(record, ACTION_SETS[action_set])
    network = Network(file)
    inputs = Normalisation.of_tensors(file.tensors).applied(found.inputs_TDI.reshape(-1, found.inputs_TDI.shape[-1]))
    again, actions = np.zeros(len(inputs)), found.actions_TDL.reshape(len(inputs), -1)
    for lever, logits in enumerate(network.logits(inputs)):
        again += log_softmax(logits)[np.arange(len(inputs)), actions[:, lever]]
    assert again.tolist() == found.logprobs_TD.reshape(-1).tolist()
    assert network.values(inputs).tolist() == found.values_TD.reshape(-1).tolist()
    assert len(np.unique(actions, axis=0)) > 2


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from(sorted(ACTION_SETS)))
def test_disorder_inside_a_window_and_duplicates_change_nothing(data: st.DataObject, action_set: ActionSetName) -> None:
    shuffle: Callable[[list[object]], None] = random.Random(data.draw(st.integers(0, 2**32))).shuffle
    order = states_of(8)
    for window in range(0, 16, 2):
        if data.draw(st.booleans()):
            order[window], order[window + 1] = order[window + 1], order[window]
    states = [
        (number, state) for number, state in enumerate(order, start=1) for _ in range(data.draw(st.integers(1, 2)))
    ]
    actions = decide(states, learned.policy_file(action_set))
    record = Recording(JOB, states, actions, applied_of([(t, t + 2) for t in range(5)]), rewards_of(range(8)))
    clean = trajectory_of(record, ACTION_SETS[action_set])
    messy = {name: list(getattr(record, name)) * 2 for name in ("actions", "applied", "rewards")}
    for messages in messy.values():
        shuffle(messages)
    found = trajectory_of(record._replace(**messy), ACTION_SETS[action_set])
    for name, one, other in zip(Trajectory._fields, found, clean, strict=True):
        assert np.array_equal(one, other, equal_nan=name == "inputs_TDI"), name
