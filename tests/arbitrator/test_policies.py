import inspect
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from docs.policies import document
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import examples

from dynamix.arbitrator import policies
from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.arbitrator.learned.policy_file import SHIPPED_POLICIES, PolicyFile, shipped_names, shipped_policy
from dynamix.arbitrator.learning.service import LearnerSettings
from dynamix.arbitrator.policies.baselines import DELTAS, Proportional, Random
from dynamix.arbitrator.policies.policy import MAX_REASON, Array32, NamedPolicy, allocation_of
from dynamix.arbitrator.policies.registry import POLICIES, policy_named, policy_names
from dynamix.arbitrator.policies.rule import Rule
from dynamix.lab.learning import PRESETS
from dynamix.schemas.features import GLOBAL_FEATURES, RANK_FEATURES, RANK_INDEX
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT, MAX_CARRY_BYTES, Allocation, Exchange
from dynamix.schemas.policies import (
    DEFAULT_POLICY,
    DIVIDED_BY_RANKS,
    KEEPS_GLOBAL_BATCH,
    OUR_POLICIES,
    RECURRING,
    STIGMERGY,
    check_options,
    initial_split,
)

EXTRAS = ("accordion", "adacomm", "diloco", "gravac", "qsr")
GLOBAL_F = np.full(len(GLOBAL_FEATURES), np.nan, dtype=np.float32)
JOB = examples.job()


def observe(sizes: tuple[int, ...], throughput: tuple[float, ...], *, age: int = 0) -> Array32:
    """What ranks with the given compute throughput show after a window of 10 steps at `sizes`."""
    obs_WF = np.full((len(sizes), len(RANK_FEATURES)), np.nan, dtype=np.float32)
    obs_WF[:, RANK_INDEX["num_samples"]] = np.array(sizes) * JOB.window_steps
    obs_WF[:, RANK_INDEX["compute_time_s"]] = np.array(sizes) / np.array(throughput)
    obs_WF[:, RANK_INDEX["age_windows"]] = age
    obs_WF[:, RANK_INDEX["decided_local_batch_size"]] = sizes
    return obs_WF


def test_static_sets_the_exchange_that_its_options_name_where_the_job_permits_it() -> None:
    static, obs_WF = policy_named("static"), observe((64,) * 4, (1.0,) * 4)
    for permission, options, expected in (
        ("exact", {"codec": "int8", "every": 4.0}, EXACT),
        ("lossy", {"codec": "int8", "every": 4.0}, EXACT),
        ("local", {"codec": "int8", "every": 4.0}, Exchange(every=4, codec="int8")),
        ("lossy", {"codec": "coarse"}, Exchange(codec="coarse")),  # of an extension
    ):
        check_options("static", static.options, options)
        job = examples.job(policy="static", policy_options=options, exchange=permission)
        allocation = static.decide(job, 5, obs_WF, GLOBAL_F, b"").allocation
        assert (allocation.local_batch_sizes, allocation.exchange) == (job.initial_local_batch_sizes, expected)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_every_policys_defaults_are_within_its_own_bounds(policy: NamedPolicy) -> None:
    assert "track" in policy.options or policy is POLICIES[STIGMERGY]  # which leaves the division to traces
    check_options("itself", policy.options, {name: one.default for name, one in policy.options.items()})


def test_proportional_divides_the_global_batch_by_speed_and_settles_with_a_fixed_cost_per_step() -> None:
    """Compute time = 10 ms + b / rate: the measured throughput depends on b, and the split must still converge."""
    decision = Proportional().decide(JOB, 0, observe((128,) * 4, (3000.0, 3000.0, 3000.0, 1000.0)), GLOBAL_F, b"")
    assert decision.allocation.local_batch_sizes == (154, 154, 153, 51)
    sizes, carry, rate = JOB.initial_local_batch_sizes, b"", np.array([4000.0, 4000.0, 2000.0, 1000.0])
    for window in range(20):
        time_s = 0.010 + np.array(sizes) / rate
        obs_WF = observe(sizes, tuple(np.array(sizes) / time_s))
        decision = Proportional().decide(JOB, window, obs_WF, GLOBAL_F, carry)
        sizes, carry = decision.allocation.local_batch_sizes, decision.carry
    time_s = 0.010 + np.array(sizes) / rate
    assert sum(sizes) == 512
    assert time_s.max() / time_s.min() < 1.08
    job = examples.job(initial_local_batch_sizes=(150, 150, 161, 51))
    obs_WF = observe((150, 150, 161, 51), (2000.0, 1000.0, 1.0, 1.0))
    obs_WF[2:, RANK_INDEX["num_samples"]] = np.nan  # ranks that were never measured stay as they are
    decision = Proportional().decide(job, 0, obs_WF, GLOBAL_F, b"")
    assert decision.allocation.local_batch_sizes == (200, 100, 161, 51)


def test_random_draws_published_deltas_and_the_same_ones_in_a_replay() -> None:
    obs_WF = observe((500,) * 4, (1.0,) * 4)
    first = [Random().decide(JOB, window, obs_WF, GLOBAL_F, b"") for window in range(200)]
    again = [Random().decide(JOB, window, obs_WF, GLOBAL_F, b"") for window in range(200)]
    assert first == again
    deltas = [size - 500 for decision in first for size in decision.allocation.local_batch_sizes]
    assert set(deltas) == set(DELTAS)
    assert max(deltas.count(delta) for delta in DELTAS) / len(deltas) < 0.26
    assert first[0].logprobs == pytest.approx((np.log(1 / 5),) * 4)


def test_the_document_is_up_to_date_and_every_policy_of_the_folder_is_registered() -> None:
    path = Path(__file__).parents[2] / "docs" / "policies.md"
    assert path.read_text() == document(), "run: python docs/policies.py > docs/policies.md"
    paths = Path(policies.__file__).parent.glob("*.py")
    modules = [import_module(f"{policies.__name__}.{path.stem}") for path in paths if path.stem != "__init__"]
    classes = {one for module in modules for _, one in inspect.getmembers(module, inspect.isclass)}
    found = {one.name for one in classes if hasattr(one, "decide") and isinstance(getattr(one, "name", None), str)}
    assert found == set(POLICIES), "registry.POLICIES does not list every policy of this folder"


def test_the_schemas_name_our_policies_and_those_that_leave_the_division_to_the_ranks() -> None:
    shipped = {name: PolicyFile.from_bytes(shipped_policy(name) or b"") for name in SHIPPED_POLICIES}
    every = [*POLICIES.values(), *(LearnedPolicy(file) for file in shipped.values())]
    found = {policy.name for policy in every if "track" in policy.options and policy.options["track"].default == 1}
    assert found == DIVIDED_BY_RANKS
    assert DEFAULT_POLICY in POLICIES
    assert {*POLICIES, *EXTRAS, *shipped_names()} == OUR_POLICIES
    assert {*EXTRAS} <= {*policy_names()}
    assert {Rule.name} == RECURRING
    assert {name for name in shipped_names() if not name[-1].isdigit()} == set(SHIPPED_POLICIES)
    assert set(PRESETS) == set(SHIPPED_POLICIES)
    assert LearnerSettings().policy in SHIPPED_POLICIES


@pytest.mark.parametrize("name", sorted({*POLICIES, *EXTRAS} - {"stigmergy"}))
@pytest.mark.parametrize("track", [None, 0.0, 1.0])
def test_a_job_begins_with_the_split_that_its_policy_decides(name: str, track: float | None) -> None:
    options = {} if track is None else {"track": track}
    job = examples.job(policy=name, policy_options=options, supports_tracking=True)
    expected = initial_split(name, options, supports_tracking=True)
    assert allocation_of(policy_named(name).options, job, (1,)).split == expected


def test_stigmergy_leaves_the_sizes_to_the_traces_of_agents() -> None:
    job = examples.job(policy="stigmergy", supports_tracking=True)
    decision = policy_named("stigmergy").decide(job, 5, observe((100, 60, 30, 40), (1.0,) * 4), GLOBAL_F, b"")
    assert (decision.allocation, decision.carry) == (Allocation((100, 60, 30, 40), "traces"), b"")
    assert initial_split("stigmergy", {}, supports_tracking=False) == "traces"


@pytest.mark.parametrize("name", sorted({*POLICIES, *EXTRAS}))
def test_the_policies_that_are_named_as_such_keep_the_global_batch(name: str) -> None:
    job = examples.job(policy=name)
    carry, sums = b"", set()
    for window in range(20):
        obs_WF = observe(job.initial_local_batch_sizes, (500.0, 500.0, 200.0 + 20 * window, 500.0))
        decision = policy_named(name).decide(job, window, obs_WF, GLOBAL_F, carry)
        carry = decision.carry
        sums.add(decision.allocation.global_batch_size)
    if name in KEEPS_GLOBAL_BATCH:
        assert sums == {sum(job.initial_local_batch_sizes)}


# --- what every policy promises, whatever it is shown

NUMBERS = np.array([np.nan, 0.0, -1.0, 1e-38, 1e-6, 0.01, 1.0, 7.0, 500.0, 1e6, 3e38, -3e38], dtype=np.float32)
"""What a mask and a foreign collector could let through."""
THINKING = [name for name in POLICIES if name not in ("static", "random")]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    world_size = draw(st.integers(1, 6))
    low = draw(st.integers(0, 64))
    upper = tuple(draw(st.integers(low, low + 2000)) for _ in range(world_size))
    return examples.job(
        {"node-a": tuple(range(world_size))},
        min_local_batch_size=low,
        max_local_batch_sizes=upper,
        initial_local_batch_sizes=tuple(draw(st.integers(low, top)) for top in upper),
        supports_tracking=draw(st.booleans()),
    )


def observation(job: Job, seed: int) -> tuple[Array32, Array32]:
    """Nonsense, but for the fold's own two columns."""
    rng = np.random.default_rng(seed)
    obs_WF = rng.choice(NUMBERS, size=(job.world_size, len(RANK_FEATURES)))
    obs_WF[:, RANK_INDEX["age_windows"]] = rng.choice([0, 0, 0, 3], size=job.world_size)
    obs_WF[:, RANK_INDEX["decided_local_batch_size"]] = job.initial_local_batch_sizes
    return obs_WF, rng.choice(NUMBERS, size=len(GLOBAL_FEATURES))


@pytest.mark.parametrize("policy", THINKING)
@settings(max_examples=25, deadline=None)
@given(job=jobs(), carry=st.binary(max_size=200), seed=st.integers(0, 2**32))
def test_sizes_are_within_the_bounds_and_the_same_for_the_same_input(
    policy: str, job: Job, carry: bytes, seed: int
) -> None:
    for window in range(4):
        obs_WF, global_F = observation(job, seed + window)
        shown = obs_WF.copy()
        decision = POLICIES[policy].decide(job, window, obs_WF, global_F, carry)
        assert 10 < len(decision.reason) <= MAX_REASON
        assert POLICIES[policy].decide(job, window, obs_WF, global_F, carry) == decision
        np.testing.assert_array_equal(obs_WF, shown)
        sizes = zip(decision.allocation.local_batch_sizes, job.max_local_batch_sizes, strict=True)
        assert all(isinstance(size, int) and job.min_local_batch_size <= size <= top for size, top in sizes)
        carry = decision.carry


@pytest.mark.parametrize("policy", THINKING)
@pytest.mark.parametrize("carry", [b"", b"\x00", bytes(1000)])
def test_without_any_measurement_the_last_sizes_stay(policy: str, carry: bytes) -> None:
    job = examples.job(initial_local_batch_sizes=(100, 150, 161, 51), supports_tracking=True)
    obs_WF = np.full((4, len(RANK_FEATURES)), np.nan, dtype=np.float32)
    obs_WF[:, RANK_INDEX["decided_local_batch_size"]] = job.initial_local_batch_sizes
    for window in range(3):
        decision = POLICIES[policy].decide(job, window, obs_WF, GLOBAL_F, carry)
        assert decision.allocation.local_batch_sizes == job.initial_local_batch_sizes
        carry = decision.carry


@pytest.mark.parametrize("policy", POLICIES)
def test_the_carry_of_10000_ranks_fits(policy: str) -> None:
    job = examples.job({"node-a": tuple(range(10_000))}, policy=policy)
    obs_WF = np.ones((10_000, len(RANK_FEATURES)), dtype=np.float32)
    decision = POLICIES[policy].decide(job, 0, obs_WF, np.ones(len(GLOBAL_FEATURES), dtype=np.float32), b"")
    assert len(decision.carry) <= MAX_CARRY_BYTES
    assert len(decision.allocation.local_batch_sizes) == 10_000
