"""Learned policies: what they see, what their choices mean, and that they decide the same everywhere."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.support import examples, learned

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.learned.policy import (
    DELTAS,
    INPUTS,
    MULTIPLIERS,
    RANK_INPUTS,
    Deltas,
    GlobalLever,
    LearnedPolicy,
    rank_inputs,
)
from dynamix.arbitrator.learned.policy_file import ActionSetName, Forward
from dynamix.arbitrator.policies.policy import Policy
from dynamix.arbitrator.policies.rule import Rule
from dynamix.schemas.features import GLOBAL_FEATURES, RANK_FEATURES, RANK_INDEX
from dynamix.schemas.messages import Action, Job

NODES = {"node-a": (0, 1), "node-b": (2, 3)}
ACTION_SETS: tuple[ActionSetName, ...] = ("deltas", "global")


def run(job: Job, policy: Policy, num_windows: int = 12) -> list[Action]:
    """Decisions of a job whose ranks differ in speed."""
    fold, actions = Fold(job, policy, None), []
    for window in range(num_windows):
        for place, (node, ranks) in enumerate(NODES.items()):
            speeds = tuple(1000.0 * (1 + rank) + 30 * (window % 5) for rank in ranks)
            fold.add_state(2 * window + place + 1, examples.state(node, ranks, window, throughput=speeds))
        while (action := fold.close()) is not None:
            fold.adopt(action)
            actions.append(action)
    return actions


@pytest.mark.parametrize("supports_tracking", [False, True])
def test_an_untrained_global_policy_is_the_rule_itself(supports_tracking: bool) -> None:
    job = examples.job(NODES, policy="ppo", supports_tracking=supports_tracking)
    ruled = run(job, Rule())
    decided = run(job, LearnedPolicy(learned.policy_file("global")))
    assert [action.allocation for action in decided] == [action.allocation for action in ruled]
    assert len({a.local_batch_sizes for a in ruled}) > 2


@pytest.mark.parametrize("choice", range(1, len(MULTIPLIERS)))
def test_a_multiplier_scales_the_rule_and_does_not_compound(choice: int) -> None:
    job = examples.job(NODES, policy="ppo", min_local_batch_size=1, max_local_batch_sizes=(100_000,) * 4)
    ruled = run(job, Rule())
    decided = run(job, LearnedPolicy(learned.policy_file("global", favour=choice)))
    for own, rule in zip(decided, ruled, strict=True):
        expected = sum(rule.local_batch_sizes) * MULTIPLIERS[choice]
        assert sum(own.local_batch_sizes) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("choice", range(len(DELTAS)))
def test_a_delta_is_added_to_each_ranks_own_last_size(choice: int) -> None:
    job = examples.job(NODES, policy="ppo-paper")
    action = run(job, LearnedPolicy(learned.policy_file("deltas", favour=choice)), num_windows=1)[0]
    assert action.local_batch_sizes == (max(32, 128 + DELTAS[choice]),) * 4
    assert action.allocation.split == "fixed"


@pytest.mark.parametrize("action_set", ACTION_SETS)
def test_numpy_and_torch_compute_the_same(action_set: ActionSetName) -> None:
    agent = learned.agent(action_set)
    file = agent.file()
    rows = np.random.default_rng(0).normal(size=(64, 2 * len(file.metadata.inputs)))
    forward = Forward(file.tensors, 2)
    with torch.no_grad():
        logits = agent._network.actor(torch.tensor(rows, dtype=torch.float32)).numpy()
        values = agent._network.critic(torch.tensor(rows, dtype=torch.float32)).numpy()[:, 0]
    assert np.abs(forward.logits(rows) - logits).max() < 1e-6
    assert np.abs(forward.values(rows) - values).max() < 1e-5 * np.abs(values).max()


@pytest.mark.parametrize("action_set", ACTION_SETS)
def test_sampling_is_keyed_by_the_window_and_a_greedy_decision_has_no_log_probabilities(
    action_set: ActionSetName,
) -> None:
    policy = LearnedPolicy(learned.policy_file(action_set))
    sampled = run(examples.job(NODES, policy="ppo", policy_options={"explore": 1.0}), policy)
    assert run(examples.job(NODES, policy="ppo", policy_options={"explore": 1.0}), policy) == sampled
    other = run(examples.job(NODES, policy="ppo", policy_options={"explore": 1.0}, seed=8), policy)
    assert [a.carry for a in other] != [a.carry for a in sampled]
    logprobs, values = sampled[0].logprobs or (), sampled[0].values or ()
    assert len(logprobs) == len(values) == (4 if action_set == "deltas" else 1)
    assert all(-5 < logprob < 0 for logprob in logprobs)
    greedy = run(examples.job(NODES), policy, num_windows=1)[0]
    assert (greedy.logprobs, greedy.values) == (None, None)


@pytest.mark.parametrize("action_set", ACTION_SETS)
def test_with_nothing_known_a_policy_still_decides_within_bounds(action_set: ActionSetName) -> None:
    job = examples.job(NODES)
    obs_WF = np.full((4, len(RANK_FEATURES)), np.nan, dtype=np.float32)
    obs_WF[:, RANK_INDEX["decided_local_batch_size"]] = 128
    obs_WF[:, RANK_INDEX["age_windows"]] = 16
    policy = LearnedPolicy(learned.policy_file(action_set), explore=True)
    decision = policy.decide(job, 0, obs_WF, np.full(len(GLOBAL_FEATURES), np.nan, dtype=np.float32), b"")
    assert all(32 <= size <= 1024 for size in decision.allocation.local_batch_sizes)
    assert np.isfinite(decision.logprobs or ()).all()


def test_inputs_match_the_list_of_names_for_any_number_of_ranks() -> None:
    for world_size in (1, 4, 33):
        job = examples.job({"node-a": tuple(range(world_size))})
        obs_WF = np.abs(np.random.default_rng(0).normal(100, 20, (world_size, len(RANK_FEATURES)))).astype(np.float32)
        for action_set, num_rows in ((Deltas(), world_size), (GlobalLever(), 1)):
            global_F = np.ones(len(GLOBAL_FEATURES), dtype=np.float32)
            found = action_set.situation(job, 3, obs_WF, global_F, b"").inputs_DI
            assert found.shape == (num_rows, len(INPUTS[action_set.name]))
            assert np.isfinite(found).all()


def test_ratios_of_a_rank_by_hand() -> None:
    obs_WF = np.full((2, len(RANK_FEATURES)), np.nan, dtype=np.float32)
    columns = {"decided_local_batch_size": (64, 192), "compute_time_s": (0.1, 0.3), "step_time_s": (0.4, 0.4)}
    for name, values in columns.items():
        obs_WF[:, RANK_INDEX[name]] = values
    job = examples.job({"node-a": (0, 1)})
    found = dict(zip(RANK_INPUTS, rank_inputs(job, obs_WF).T, strict=True))
    assert found["size_to_mean_log2"] == pytest.approx([-1, np.log2(1.5)])
    assert found["room_above_log2"] == pytest.approx([4, np.log2(1024 / 192)])
    assert found["room_below_log2"] == pytest.approx([1, np.log2(6)])
    assert found["compute_share"] == pytest.approx([0.25, 0.75])
    assert np.isnan(found["accuracy"]).all()


def test_deciding_needs_no_torch() -> None:
    program = "import sys; import dynamix.arbitrator.learned.policy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
