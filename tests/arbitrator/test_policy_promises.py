"""What every policy promises, whatever it is shown."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import examples

from dynamix.arbitrator.policies.policy import MAX_REASON, Array32
from dynamix.arbitrator.policies.registry import POLICIES
from dynamix.schemas.features import GLOBAL_FEATURES, RANK_FEATURES, RANK_INDEX
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import MAX_CARRY_BYTES

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
    global_F = np.full(len(GLOBAL_FEATURES), np.nan, dtype=np.float32)
    for window in range(3):
        decision = POLICIES[policy].decide(job, window, obs_WF, global_F, carry)
        assert decision.allocation.local_batch_sizes == job.initial_local_batch_sizes
        carry = decision.carry


@pytest.mark.parametrize("policy", POLICIES)
def test_the_carry_of_10000_ranks_fits(policy: str) -> None:
    job = examples.job({"node-a": tuple(range(10_000))}, policy=policy)
    obs_WF = np.ones((10_000, len(RANK_FEATURES)), dtype=np.float32)
    decision = POLICIES[policy].decide(job, 0, obs_WF, np.ones(len(GLOBAL_FEATURES), dtype=np.float32), b"")
    assert len(decision.carry) <= MAX_CARRY_BYTES
    assert len(decision.allocation.local_batch_sizes) == 10_000
