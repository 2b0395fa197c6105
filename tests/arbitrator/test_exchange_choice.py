"""How gradients travel: chosen by what each way costs, and by what it turned out to cost."""

import math
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest
from tests.support import examples
from tests.support.toy_cluster import ToyCluster

from dynamix.arbitrator.policies.model.exchange_choice import (
    BLOCKED,
    DWELL,
    ExchangeMemory,
    choose,
    drift,
    model_under,
)
from dynamix.arbitrator.policies.model.observation import Array64
from dynamix.arbitrator.policies.model.step_time import StepTime
from dynamix.arbitrator.policies.rule import Rule
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT, Exchange

INT8 = Exchange(codec="int8")
NUM_RANKS = 8
COMPUTE_S = 0.010
"""Compute time of any batch: what is chosen depends on communication alone."""
TRUE_SHARES = {"none": 1.0, "rows": 1.0, "bf16": 0.5, "int8": 0.26}


def job_of(permission: str) -> Job:
    nodes = {f"node-{rank}": (rank,) for rank in range(NUM_RANKS)}
    sizes = (64,) * NUM_RANKS
    job = examples.job(nodes, initial_local_batch_sizes=sizes, max_local_batch_sizes=sizes, min_local_batch_size=64)
    return msgspec.structs.replace(job, exchange=permission)


def model_of(communication_s: float) -> StepTime:
    ones = np.ones(NUM_RANKS)
    return StepTime(ones * 1e-9, ones * 64, ones * 64, ones * COMPUTE_S, 0 * ones, communication_s)


def worth(sizes: Array64) -> Array64:
    return np.ones_like(sizes)


def ruled(
    permission: str, communication_s: float, *, windows: int = 40, shares: Mapping[str, float] = TRUE_SHARES
) -> list[Exchange]:
    """What rules each window of a job whose communication takes so long, and by so much less under each codec."""
    job, memory, decided = job_of(permission), ExchangeMemory(), [EXACT, EXACT]
    for window in range(windows):
        now = decided[window]
        exposed_s = communication_s * shares[now.codec] / now.every
        memory = memory.observe(exposed_s, exposed_s, loss=1.0)
        memory = ExchangeMemory.unpack(memory.pack(), job)
        chosen = choose(job, model_of(exposed_s), memory, worth, gradient_bytes=1e6, max_every=16)
        memory = memory.decided(chosen)
        decided.append(chosen)
    return decided


def test_exposed_communication_makes_it_choose_the_codec_that_saves_most() -> None:
    found = ruled("lossy", 0.020)
    assert found[-1] == INT8
    assert found.index(INT8) == DWELL + 1  # decided in the fifth window, rules two windows later
    assert set(found) == {EXACT, INT8}


def test_where_communication_is_hidden_or_the_job_permits_nothing_gradients_stay_exact() -> None:
    assert set(ruled("lossy", 0.0005)) == {EXACT}
    assert set(ruled("exact", 0.0005)) == {EXACT}


def test_a_codec_that_saves_nothing_here_is_given_up_and_not_tried_again() -> None:
    found = ruled("lossy", 0.020, windows=100, shares=TRUE_SHARES | {"int8": 1.0, "rows": 1.0})
    assert found[-1] == Exchange(codec="bf16")
    assert sum(each == INT8 for each in found) <= DWELL + 2


def test_a_network_that_changes_under_a_codec_is_known_to_have_changed() -> None:
    memory = ExchangeMemory(ruling=(INT8, INT8), exact_s=0.020)
    for _ in range(4):
        memory = memory.observe(0.006, 0.006, loss=1.0)
    assert memory.communication_s(INT8, 0.0) == pytest.approx(0.006)
    assert memory.exact_s == pytest.approx(0.020)
    memory = memory.observe(0.018, 0.018, loss=1.0)
    assert memory.exact_s == pytest.approx(0.060)


@pytest.mark.parametrize("communication_s", [0.02, 0.2])
def test_the_sync_period_is_that_of_the_closed_form(communication_s: float) -> None:
    """h = sqrt((communication / compute) (1 / c - 1)); a factor of 2 more or less is within the margin."""
    found = ruled("local", communication_s)[-1]
    shared = TRUE_SHARES[found.codec]
    cost = drift(job_of("local"))
    best = math.sqrt(shared * communication_s / COMPUTE_S * (1 / cost - 1))
    assert found.codec == "int8"
    assert found.every > 1
    assert best / 2 < found.every < 2 * best


def test_a_rising_loss_ends_local_steps_for_some_windows() -> None:
    local = Exchange(codec="int8", every=4)
    memory = ExchangeMemory(ruling=(local, local), exact_s=0.02, num_seen=(3, 0, 0, 3), age=DWELL)
    job, model = job_of("local"), model_of(0.02)
    assert choose(job, model, memory.observe(0.0013, 0.0013, loss=1.0), worth, 0.0, max_every=16).every > 1
    for loss in (1.0, 1.5):
        memory = memory.observe(0.0013, 0.0013, loss)
    assert choose(job, model, memory, worth, 0.0, max_every=16) == EXACT
    memory = memory.decided(EXACT)
    for window in range(BLOCKED + DWELL):
        memory = memory.observe(0.02, 0.02, loss=1.0)
        chosen = choose(job, model, memory, worth, 0.0, max_every=16)
        assert chosen.every == 1 or window >= BLOCKED - 1
        memory = memory.decided(chosen)


def test_the_model_under_the_ruling_exchange_is_the_measured_one() -> None:
    memory, model = ExchangeMemory(exact_s=0.02), model_of(0.02)
    assert model_under(EXACT, model, memory, 0.0) is model
    assert model_under(INT8, model, memory, 0.0).sync_intercept_s == pytest.approx(0.26 * 0.02)
    assert model_under(Exchange(every=4), model, memory, 0.0).sync_intercept_s == pytest.approx(0.005)


def test_rule_decides_exact_gradients_unless_the_job_permits_more() -> None:
    rates = np.full(NUM_RANKS, 1000.0)
    for permission, permits_more in (("exact", False), ("lossy", True)):
        job = msgspec.structs.replace(job_of(permission), min_local_batch_size=1, supports_tracking=True)
        cluster = ToyCluster(rates, tracking=True, communication_s=0.2)
        found = {decision.allocation.exchange for decision in cluster.run(Rule(), job, 12)}
        assert EXACT in found
        assert (INT8 in found) == (found != {EXACT}) == permits_more


def test_windows_hold_whole_rounds() -> None:
    found = {
        each.every for communication_s in (0.005, 0.01, 0.02, 0.05, 0.2) for each in ruled("local", communication_s)
    }
    assert len(found) > 2
    assert all(job_of("local").window_steps % every == 0 for every in found)


def test_a_job_that_began_with_a_codec_can_leave_it_and_come_back() -> None:
    job = msgspec.structs.replace(job_of("lossy"), initial_exchange=INT8)
    memory = ExchangeMemory.unpack(b"", job)
    assert memory.newest == INT8
    memory = memory.observe(0.26 * 0.02, 0.0, loss=1.0)
    assert memory.exact_s == pytest.approx(0.02)
    for _ in range(4):
        memory = memory.observe(0.26 * 0.02, 0.0, loss=1.0)
    assert memory.communication_s(INT8, 0.0) == pytest.approx(0.26 * 0.02)


def test_a_job_with_one_exchange_for_its_whole_run_is_sent_none_by_rule() -> None:
    job = msgspec.structs.replace(job_of("exact"), initial_exchange=INT8)
    found = ToyCluster(np.full(NUM_RANKS, 1000.0), communication_s=0.2).run(Rule(), job, 3)
    assert {decision.allocation.exchange for decision in found} == {EXACT}
