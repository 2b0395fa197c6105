"""How gradients travel: chosen by what each way costs, and by what it turned out to cost."""

import math
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest
from tests.support import examples
from tests.support.toy_cluster import ToyCluster

from dynamix.arbitrator.policies.exchange import (
    LAG,
    ExchangeMemory,
    WindowExposure,
    choose,
    model_under,
)
from dynamix.arbitrator.policies.policy import Array64, pack, unpack
from dynamix.arbitrator.policies.rule import Rule
from dynamix.arbitrator.policies.step_time import StepTime
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT, Exchange

INT8 = Exchange(codec="int8")
NUM_RANKS = 8
COMPUTE_S = 0.010
"""Compute time of any batch: what is chosen depends on communication alone."""
TRUE_SHARES = {"none": 1.0, "rows": 1.0, "bf16": 0.5, "int8": 0.26}
DRIFT = 4.0
"""Squared distance of ranks from their mean over that of its move, as 8 ranks show it."""


def seen(exposed_s: float) -> WindowExposure:
    return WindowExposure(exposed_s, COMPUTE_S)


def after(memory: ExchangeMemory, exposed_s: float, *, loss: float = 1.0, drift: float = DRIFT) -> ExchangeMemory:
    """The memory after a window, through a carry."""
    known = memory.observe(seen(exposed_s), loss, drift, NUM_RANKS)
    return unpack(ExchangeMemory, pack(known))


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
    permission: str,
    communication_s: float,
    *,
    windows: int = 40,
    shares: Mapping[str, float] = TRUE_SHARES,
    drift: float = DRIFT,
    overlap: float = 0.0,
) -> list[Exchange]:
    """What rules each window of a job whose communication takes so long, and by so much less under each codec.

    Computing hides `overlap` of its time, of gradients that travel in each step.
    """
    job, memory, decided = job_of(permission), ExchangeMemory(), [EXACT, EXACT]
    for window in range(windows):
        now = decided[window]
        taken_s = communication_s * shares[now.codec]
        exposed_s = max(taken_s - overlap * COMPUTE_S, 0.1 * taken_s) if now.every == 1 else taken_s / now.every
        memory = after(memory, exposed_s, drift=drift)
        chosen = choose(job, model_of(exposed_s), memory, worth, max_every=16)
        memory = memory.decided(chosen)
        decided.append(chosen)
    return decided


def test_exposed_communication_makes_it_choose_the_codec_that_saves_most() -> None:
    found = ruled("lossy", 0.020)
    assert found[-1] == INT8
    assert found.index(INT8) == LAG  # decided in the first window
    assert set(found) == {EXACT, INT8}


def test_where_communication_is_hidden_or_the_job_permits_nothing_gradients_stay_exact() -> None:
    assert set(ruled("lossy", 0.0005)) == {EXACT}
    assert set(ruled("exact", 0.0005)) == {EXACT}


@pytest.mark.parametrize("communication_s", [0.02, 0.2])
def test_the_sync_period_is_that_of_the_closed_form(communication_s: float) -> None:
    """h = sqrt((communication / compute) (1 / c - 1)); a factor of 2 more or less is within the margin."""
    found = ruled("local", communication_s)[-1]
    cost = ExchangeMemory(drift=DRIFT).drift_cost(job_of("local"))
    best = math.sqrt(TRUE_SHARES[found.codec] * communication_s / COMPUTE_S * (1 / cost - 1))
    assert found.codec == "int8"
    assert found.every > 1
    assert best / 2 < found.every < 2 * best


def test_a_rising_loss_ends_local_steps_for_some_windows() -> None:
    local = Exchange(codec="int8", every=5)
    memory = ExchangeMemory(active=(local, local), exact_s=0.02, num_seen=(3, 0, 0, 3, 0))
    job, model = job_of("local"), model_of(0.02)
    assert choose(job, model, after(memory, 0.001), worth, max_every=16).every > 1
    for loss in (1.0, 1.5):
        memory = after(memory, 0.001, loss=loss)
    assert choose(job, model, memory, worth, max_every=16) == EXACT


def test_what_computing_hides_is_known_from_the_first_round_of_local_steps() -> None:
    local = Exchange(every=5)
    memory = after(ExchangeMemory(active=(EXACT, local)), 0.015)
    assert memory.exact_s == pytest.approx(0.015)  # what is hidden cannot be seen
    memory = after(memory.decided(local), 0.020 / 5)
    assert memory.exact_s == pytest.approx(0.020)
    assert memory.overlap == pytest.approx(0.5)
    under = model_under(EXACT, model_of(0.0), memory)
    assert float(under.step_time_s(np.array([COMPUTE_S]))[0]) == pytest.approx(COMPUTE_S + 0.015)


def test_rule_decides_exact_gradients_unless_the_job_permits_more() -> None:
    rates = np.full(NUM_RANKS, 1000.0)
    for permission, permits_more in (("exact", False), ("lossy", True)):
        job = msgspec.structs.replace(job_of(permission), min_local_batch_size=1, supports_tracking=True)
        cluster = ToyCluster(rates, tracking=True, communication_s=0.2)
        found = {decision.allocation.exchange for decision in cluster.run(Rule(), job, 12)}
        assert (INT8 in found) == permits_more
        assert permits_more or found == {EXACT}


def test_rows_are_sent_in_an_exact_job_whose_model_is_mostly_tables() -> None:
    rates = np.full(NUM_RANKS, 1000.0)
    exact = msgspec.structs.replace(job_of("exact"), min_local_batch_size=1, supports_tracking=True)
    for supports, share, chosen in ((True, 0.9, True), (True, 0.0, False), (False, 0.9, False)):
        job = msgspec.structs.replace(exact, supports_exchange=supports, table_share=share)
        found = [
            decision.allocation.exchange for decision in ToyCluster(rates, communication_s=0.2).run(Rule(), job, 3)
        ]
        assert set(found) <= {EXACT, Exchange(codec="rows")}
        assert (Exchange(codec="rows") in found) == chosen
