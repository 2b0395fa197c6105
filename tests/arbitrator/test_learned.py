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
    EMPTY_MEMORY,
    INPUTS,
    LAG,
    LONGEST_PERIOD,
    SIZES,
    JobLevers,
    LearnedPolicy,
    Levers,
    facts_of,
    lever_inputs,
)
from dynamix.arbitrator.learned.policy_file import ActionSetName, Network, PolicyFile, sample
from dynamix.arbitrator.learned.response import dependence, is_dead, typical_states
from dynamix.arbitrator.policies.policy import Policy
from dynamix.schemas.features import GLOBAL_FEATURES, GLOBAL_INDEX, RANK_FEATURES, RANK_INDEX
from dynamix.schemas.messages import Action, Job
from dynamix.schemas.messages.allocation import EXACT, Exchange, ExchangePermission

NODES = {"node-a": (0, 1), "node-b": (2, 3)}
ACTION_SETS: tuple[ActionSetName, ...] = ("deltas", "levers")


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


def moved(choices: tuple[int, ...], permission: ExchangePermission = "local", num_windows: int = 8) -> list[Action]:
    """Decisions of a policy that always makes the same choice of each lever."""
    job = examples.job(NODES, policy="ppo", exchange=permission, supports_exchange=True)
    return run(job, LearnedPolicy(learned.policy_file(favour=choices)), num_windows)


@pytest.mark.parametrize("action_set", ACTION_SETS)
def test_an_untrained_policy_changes_nothing(action_set: ActionSetName) -> None:
    job = examples.job(NODES, policy="ppo", exchange="local", supports_exchange=True)
    decided = run(job, LearnedPolicy(learned.policy_file(action_set)))
    assert {(action.local_batch_sizes, action.allocation.exchange) for action in decided} == {((128,) * 4, EXACT)}


def test_each_lever_moves_from_its_last_decision_to_its_bound() -> None:
    sizes = [sum(action.local_batch_sizes) for action in moved((4, 0, 0), num_windows=5)]
    assert sizes == [1024, 2048, 4096, 4096, 4096]
    periods = [action.allocation.exchange.every for action in moved((0, 2, 0))]
    assert periods == [min(2 << window, LONGEST_PERIOD) for window in range(8)]
    codecs = [action.allocation.exchange.codec for action in moved((0, 0, 1), num_windows=4)]
    assert codecs == ["int8", "none", "int8", "none"]


def test_another_global_batch_is_divided_by_speed() -> None:
    first = moved((1, 0, 0), num_windows=1)[0].local_batch_sizes
    assert first == (32, 50, 75, 99)  # of 256, by speeds 1 to 4; at least 32
    assert moved((0, 2, 0), num_windows=1)[0].local_batch_sizes == (128,) * 4


@pytest.mark.parametrize(
    ("permission", "exchanges"),
    [("exact", {("none", 1)}), ("lossy", {("none", 1), ("int8", 1)})],
)
def test_levers_stay_within_the_jobs_permission(permission: ExchangePermission, exchanges: set[object]) -> None:
    found = {(a.allocation.exchange.codec, a.allocation.exchange.every) for a in moved((0, 2, 1), permission)}
    assert found == exchanges


@pytest.mark.parametrize("choice", range(len(DELTAS)))
def test_a_delta_is_added_to_each_ranks_own_last_size(choice: int) -> None:
    job = examples.job(NODES, policy="ppo-paper")
    action = run(job, LearnedPolicy(learned.policy_file("deltas", favour=(choice,))), num_windows=1)[0]
    assert action.local_batch_sizes == (max(32, 128 + DELTAS[choice]),) * 4
    assert action.allocation.split == "fixed"


@pytest.mark.parametrize("action_set", ACTION_SETS)
def test_numpy_and_torch_compute_the_same(action_set: ActionSetName) -> None:
    agent = learned.agent(action_set)
    file = agent.file()
    rows = np.random.default_rng(0).normal(size=(64, 2 * len(file.metadata.inputs)))
    network = Network(file)
    with torch.no_grad():
        logits = agent._network.actor(torch.tensor(rows, dtype=torch.float32)).numpy()
        values = agent._network.critic(torch.tensor(rows, dtype=torch.float32)).numpy()[:, 0]
    levers = network.logits(rows)
    assert np.abs(np.concatenate(levers, axis=1) - logits).max() < 1e-6
    assert np.abs(network.values(rows) - values).max() < 1e-5 * np.abs(values).max()
    choices_DL, logprobs_D = sample(levers, np.random.default_rng(1).random((64, len(levers))))
    with torch.no_grad():
        again = agent._network.evaluate(torch.tensor(rows, dtype=torch.float32), torch.tensor(choices_DL))[0]
    assert logprobs_D == pytest.approx(again.numpy(), abs=1e-5)


def test_the_log_probability_of_a_decision_is_the_sum_over_its_levers() -> None:
    choices_DL, logprobs_D = sample([np.zeros((1, num)) for num in (5, 3, 2)], np.array([[0.99, 0.5, 0.0]]))
    assert choices_DL.tolist() == [[4, 1, 0]]
    assert logprobs_D == pytest.approx([-np.log(5 * 3 * 2)])


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
    job = examples.job(NODES, policy_options={"explore": 1.0})
    obs_WF = np.full((4, len(RANK_FEATURES)), np.nan, dtype=np.float32)
    obs_WF[:, RANK_INDEX["decided_local_batch_size"]] = 128
    obs_WF[:, RANK_INDEX["age_windows"]] = 16
    policy = LearnedPolicy(learned.policy_file(action_set))
    decision = policy.decide(job, 0, obs_WF, np.full(len(GLOBAL_FEATURES), np.nan, dtype=np.float32), b"")
    assert all(32 <= size <= 1024 for size in decision.allocation.local_batch_sizes)
    assert np.isfinite(decision.logprobs or ()).all()


def observed(sizes: tuple[int, ...], compute_s: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """What a job's ranks saw in a window that ends 0.1 s after the slowest."""
    obs_WF = np.full((len(sizes), len(RANK_FEATURES)), np.nan, dtype=np.float32)
    step_s = max(compute_s) + 0.1
    columns = {
        "decided_local_batch_size": sizes,
        "local_batch_size": sizes,
        "num_samples": tuple(10 * size for size in sizes),
        "age_windows": (0,) * len(sizes),
        "compute_time_s": compute_s,
        "sync_time_s": tuple(step_s - each for each in compute_s),
        "step_time_s": (step_s,) * len(sizes),
    }
    for name, values in columns.items():
        obs_WF[:, RANK_INDEX[name]] = values
    global_F = np.full(len(GLOBAL_FEATURES), np.nan, dtype=np.float32)
    global_F[GLOBAL_INDEX["noise_scale"]] = 512
    return obs_WF, global_F


def test_inputs_of_levers_by_hand() -> None:
    job = examples.job({"node-a": (0, 1)})
    (inputs,) = JobLevers().situation(job, 3, *observed((64, 192), (0.1, 0.3)), b"").inputs_DI
    found = dict(zip(INPUTS["levers"], inputs.tolist(), strict=True))
    assert found["batch_to_base_log2"] == 0
    assert found["batch_to_noise_log2"] == -1
    assert (found["room_above_log2"], found["room_below_log2"]) == (3, 2)
    assert (found["compute_share"], found["most_compute_share"]) == pytest.approx((0.5, 0.75))
    assert (found["least_sync_share"], found["most_sync_share"]) == pytest.approx((0.25, 0.75))
    assert (found["world_size_log2"], found["windows_log2"]) == (1, 2)


def test_a_job_and_a_row_of_a_simulator_have_equal_inputs_window_by_window() -> None:
    """The memory of one passes through the carry of its decisions, that of the other stays an array."""
    jobs = [examples.job({"node-a": (0, 1)}, exchange="local", supports_exchange=True)] * 2
    carry, memory = b"", np.tile(EMPTY_MEMORY, (2, 1))
    pipeline = [Levers(*(np.full(2, value) for value in (256.0, 1.0, 0.0)))] * LAG
    for window, choices in enumerate([(1, 2, 0), (4, 0, 1), (3, 2, 0), (0, 1, 1), (2, 0, 0), (4, 2, 1)]):
        active, decided = pipeline.pop(0), pipeline[-1]
        total = float(active.batch[0])
        obs_WF, global_F = observed((0, 0), (1e-3 * total + 0.02 * window, 2e-3 * total))
        obs_WF[:, RANK_INDEX["local_batch_size"]] = total / 2
        obs_WF[:, RANK_INDEX["decided_local_batch_size"]] = (
            np.floor(decided.batch[0] / 2),
            np.ceil(decided.batch[0] / 2),
        )
        situation = JobLevers().situation(jobs[0], window, obs_WF, global_F, carry)
        carry = situation.decide(np.array([choices])).carry
        names = ("compute_time_s", "sync_time_s", "step_time_s")
        seen = {name: np.tile(obs_WF[:, RANK_INDEX[name]].astype(np.float64), (2, 1)) for name in names}
        facts = facts_of(jobs, np.full(2, 1.0 + window))
        inputs, memory = lever_inputs({**seen, "noise_scale": np.full(2, 512.0)}, active, decided, facts, memory)
        assert situation.inputs_DI[0] == pytest.approx(inputs[1], abs=1e-5, nan_ok=True)
        pipeline.append(decided.moved(np.array([choices] * 2), facts))
    assert len(set(memory[0].tolist())) > 12


@pytest.mark.parametrize(
    ("power", "expected"), [(0.5, 0.5), (1.0, (3.439 + 0.025) / (3.439 + 0.05)), (0.0, 0.025 / 3.489)]
)
@pytest.mark.parametrize("every", [1, 3])
def test_the_elasticity_is_the_power_of_the_batch_that_the_step_takes(
    power: float, expected: float, every: int
) -> None:
    """Four doublings, older ones with less weight, are measured against a prior of 1/2."""
    job = examples.job(
        {"node-a": (0, 1)}, exchange="local", supports_exchange=True, initial_exchange=Exchange(every=every)
    )
    carry = b""
    for doublings in range(5):
        obs_WF, global_F = observed((32 << doublings,) * 2, (0.1, 0.1))
        obs_WF[:, RANK_INDEX["step_time_s"]] = 0.5 * 2 ** (power * doublings)
        situation = JobLevers().situation(job, doublings, obs_WF, global_F, carry)
        carry = situation.decide(np.zeros((1, 3), dtype=np.int64)).carry
    found = dict(zip(INPUTS["levers"], situation.inputs_DI[0].tolist(), strict=True))
    assert found["step_elasticity"] == pytest.approx(expected, abs=1e-5)


def test_deciding_needs_no_torch() -> None:
    program = "import sys; import dynamix.arbitrator.learned.policy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# --- what a policy's choices depend on ---


def shares_of(file: PolicyFile) -> dict[str, float]:
    return dependence(file, typical_states(file))


@pytest.mark.parametrize("action_set", ["levers", "deltas"])
def test_a_policy_is_dead_unless_its_choices_depend_on_what_it_sees(action_set: ActionSetName) -> None:
    neutral = (0,) if action_set == "deltas" else (0, 2, 1)
    biased = shares_of(learned.policy_file(action_set, favour=neutral))
    assert is_dead(biased)
    assert set(biased.values()) == {0.0}
    alive = shares_of(learned.policy_file(action_set, gain=300.0))
    assert not is_dead(alive)
    assert alive["all"] > 0.5


def of_one_input(name: str) -> PolicyFile:
    """The batch doubles where this input is above its mean, and halves below."""
    file = learned.policy_file()
    tensors = {key: np.zeros_like(array) if key.startswith("actor") else array for key, array in file.tensors.items()}
    tensors["actor.0.weight"][0, INPUTS["levers"].index(name)] = 1.0
    tensors["actor.2.weight"][0, 0] = 1.0
    tensors["actor.4.weight"][SIZES.index(2.0), 0] = 50.0
    tensors["actor.4.weight"][SIZES.index(0.5), 0] = -50.0
    return file._replace(tensors=tensors)


def test_a_policy_depends_on_the_inputs_that_its_network_uses() -> None:
    file = of_one_input("batch_to_noise_log2")
    shares = shares_of(file)
    assert shares["all"] == shares["noise"] == pytest.approx(0.5, abs=0.05)
    assert {share for group, share in shares.items() if group not in ("all", "noise")} == {0.0}
