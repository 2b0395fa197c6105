"""How gradients travel: chosen by what each way costs, and by what it turned out to cost."""

import math
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest
from tests.support import examples
from tests.support.toy_cluster import ToyCluster

from dynamix.arbitrator.policies.model.exchange import (
    BLOCKED,
    DWELL,
    LAG,
    MOST_CORRECTION,
    ExchangeMemory,
    WindowExposure,
    choose,
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
DRIFT = 4.0
"""Squared distance of ranks from their mean over that of its move, as 8 ranks show it."""


def seen(exposed_s: float) -> WindowExposure:
    return WindowExposure(exposed_s, COMPUTE_S)


def after(memory: ExchangeMemory, exposed_s: float, *, loss: float = 1.0, drift: float = DRIFT) -> ExchangeMemory:
    """The memory after a window, through a carry."""
    known = memory.observe(seen(exposed_s), loss, drift, NUM_RANKS)
    packed = ExchangeMemory.unpack(known.pack(), job_of("local"))
    assert packed.pack() == known.pack()
    return packed


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


def test_a_codec_that_saves_nothing_here_is_given_up_and_not_tried_again() -> None:
    found = ruled("lossy", 0.020, windows=100, shares=TRUE_SHARES | {"int8": 1.0, "rows": 1.0})
    assert found[-1] == Exchange(codec="bf16")
    assert sum(each == INT8 for each in found) <= DWELL + LAG


def test_a_network_that_changes_under_a_codec_is_known_to_have_changed() -> None:
    memory = ExchangeMemory(ruling=(INT8, INT8), exact_s=0.020)
    for _ in range(4):
        memory = after(memory, 0.006)
    assert memory.communication_s("int8") == pytest.approx(0.006)
    assert memory.exact_s == pytest.approx(0.020)
    memory = after(memory, 0.018)
    assert memory.exact_s == pytest.approx(0.060)


def test_a_network_that_changed_while_a_codec_began_is_not_taken_for_the_codecs_doing() -> None:
    memory = ExchangeMemory(ruling=(INT8, INT8), exact_s=0.020)
    for _ in range(4):
        memory = after(memory, 0.520)  # a hundred times what was expected
    assert memory.communication_s("int8") == pytest.approx(0.520)
    assert memory.exact_s == pytest.approx(0.520 / 0.26 / MOST_CORRECTION)


@pytest.mark.parametrize("communication_s", [0.02, 0.2])
def test_the_sync_period_is_that_of_the_closed_form(communication_s: float) -> None:
    """h = sqrt((communication / compute) (1 / c - 1)); a factor of 2 more or less is within the margin."""
    found = ruled("local", communication_s)[-1]
    cost = ExchangeMemory(drift=DRIFT).drift_cost(job_of("local"))
    best = math.sqrt(TRUE_SHARES[found.codec] * communication_s / COMPUTE_S * (1 / cost - 1))
    assert found.codec == "int8"
    assert found.every > 1
    assert best / 2 < found.every < 2 * best


def test_the_further_ranks_drift_apart_the_shorter_is_the_period() -> None:
    periods = [ruled("local", 0.05, drift=drift)[-1].every for drift in (0.3, 2.0, 4.0, 7.0)]
    assert periods == sorted(periods, reverse=True)
    assert (periods[0], periods[-1]) == (10, 5)


def test_drift_costs_what_it_cost_on_virtual_clusters() -> None:
    """8 and 32 workers: R of 4 and 18, a further local step cost 3 % and 22 % of one's progress; Adam's 16 to 29 %."""
    job = job_of("local")
    assert ExchangeMemory(drift=4.0).drift_cost(job) == pytest.approx(0.03, abs=0.005)
    assert ExchangeMemory(drift=18.0).drift_cost(job) == pytest.approx(0.22, abs=0.03)
    adam = msgspec.structs.replace(job, optimizer_family="adam")
    assert 0.16 < ExchangeMemory(drift=4.5).drift_cost(adam) < 0.29
    assert ExchangeMemory().drift_cost(job) == ExchangeMemory(drift=3.5).drift_cost(job)  # half of 7 other ranks


def test_a_rising_loss_ends_local_steps_for_some_windows() -> None:
    local = Exchange(codec="int8", every=5)
    memory = ExchangeMemory(ruling=(local, local), exact_s=0.02, num_seen=(3, 0, 0, 3, 0))
    job, model = job_of("local"), model_of(0.02)
    assert choose(job, model, after(memory, 0.001), worth, max_every=16).every > 1
    for loss in (1.0, 1.5):
        memory = after(memory, 0.001, loss=loss)
    assert choose(job, model, memory, worth, max_every=16) == EXACT
    memory = memory.decided(EXACT).decided(EXACT)
    for window in range(BLOCKED + DWELL):
        memory = after(memory, 0.02)
        chosen = choose(job, model, memory, worth, max_every=16)
        assert chosen.every == 1 or window >= BLOCKED - 1
        memory = memory.decided(chosen)


def test_local_steps_whose_drift_stays_unknown_end() -> None:
    local = Exchange(codec="int8", every=5)
    memory = ExchangeMemory(ruling=(local, local), exact_s=0.02, num_seen=(3, 0, 0, 3, 0), age=0)
    job, model, chosen = job_of("local"), model_of(0.02), []
    for _ in range(LAG + DWELL + 1):
        memory = after(memory, 0.001, drift=math.nan)
        chosen.append(choose(job, model, memory, worth, max_every=16))
    assert chosen[-2].every > 1
    assert chosen[-1] == EXACT


def test_a_loss_that_is_higher_since_local_steps_began_has_not_risen() -> None:
    local = Exchange(codec="int8", every=5)
    memory = after(ExchangeMemory(ruling=(EXACT, local), exact_s=0.02), 0.02, loss=1.0).decided(local)
    for _ in range(5):  # each rank's loss is that of its own parameters
        memory = after(memory, 0.001, loss=1.5)
    assert choose(job_of("local"), model_of(0.02), memory, worth, max_every=16).every > 1


def test_what_computing_hides_is_known_from_the_first_round_of_local_steps() -> None:
    local = Exchange(every=5)
    memory = after(ExchangeMemory(ruling=(EXACT, local)), 0.015)
    assert memory.exact_s == pytest.approx(0.015)  # what is hidden cannot be seen
    memory = after(memory.decided(local), 0.020 / 5)
    assert memory.exact_s == pytest.approx(0.020)
    assert memory.overlap == pytest.approx(0.5)
    under = model_under(EXACT, model_of(0.0), memory)
    assert float(under.step_time_s(np.array([COMPUTE_S]))[0]) == pytest.approx(COMPUTE_S + 0.015)
    assert memory.decided(EXACT).decided(EXACT).exact_s == memory.exact_s


def test_a_network_that_clears_ends_local_steps() -> None:
    job, memory, decided = job_of("local"), ExchangeMemory(), [EXACT, EXACT]
    for window in range(60):
        taken_s = 0.002 if window >= 30 else 0.080
        now = decided[window]
        taken_s *= TRUE_SHARES[now.codec]
        exposed_s = max(taken_s - 0.5 * COMPUTE_S, 0.1 * taken_s) if now.every == 1 else taken_s / now.every
        memory = after(memory, exposed_s)
        decided.append(choose(job, model_of(exposed_s), memory, worth, max_every=16))
        memory = memory.decided(decided[-1])
    assert decided[30].every > 1
    assert decided[-1].every == 1


def test_the_model_under_an_exchange_has_what_that_exposes() -> None:
    memory, model = ExchangeMemory(exact_s=0.02, overlap=0.5), model_of(0.02)
    assert model_under(EXACT, model, ExchangeMemory()) is model
    under = model_under(INT8, model, memory)
    assert (under.sync_intercept_s, under.sync_slope) == (pytest.approx(0.26 * 0.02), -0.5)
    under = model_under(Exchange(every=4), model, memory)
    assert (under.sync_intercept_s, under.sync_slope) == (pytest.approx(0.005), 0.0)


def test_coding_takes_its_time_whatever_the_network_does() -> None:
    memory = ExchangeMemory(ruling=(EXACT, EXACT), exact_s=0.02)
    memory = memory.observe(WindowExposure(0.02, COMPUTE_S, sent_bytes=1.75e7), 1.0, math.nan, NUM_RANKS)
    assert memory.gradient_bytes == pytest.approx(1e7)  # 2 (N - 1) / N of a gradient by a ring
    assert memory.communication_s("int8") == pytest.approx(0.26 * 0.02 + 0.016)


def test_rule_decides_exact_gradients_unless_the_job_permits_more() -> None:
    rates = np.full(NUM_RANKS, 1000.0)
    for permission, permits_more in (("exact", False), ("lossy", True)):
        job = msgspec.structs.replace(job_of(permission), min_local_batch_size=1, supports_tracking=True)
        cluster = ToyCluster(rates, tracking=True, communication_s=0.2)
        found = {decision.allocation.exchange for decision in cluster.run(Rule(), job, 12)}
        assert (INT8 in found) == permits_more
        assert permits_more or found == {EXACT}


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
    for _ in range(5):
        memory = after(memory, 0.26 * 0.02)
        assert memory.exact_s == pytest.approx(0.02)
    assert memory.communication_s("int8") == pytest.approx(0.26 * 0.02)


def test_a_job_with_one_exchange_for_its_whole_run_is_sent_none_by_rule() -> None:
    job = msgspec.structs.replace(job_of("exact"), initial_exchange=INT8)
    found = ToyCluster(np.full(NUM_RANKS, 1000.0), communication_s=0.2).run(Rule(), job, 3)
    assert {decision.allocation.exchange for decision in found} == {EXACT}


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


def test_rows_save_what_lies_in_tables() -> None:
    memory = ExchangeMemory(exact_s=0.1, table_share=0.5)
    assert memory.communication_s("rows") == pytest.approx(0.1 * (0.5 + 0.5 * 0.3))


def test_communication_that_is_hidden_is_not_taken_to_grow_with_what_hides_it() -> None:
    memory = ExchangeMemory(exact_s=0.011, overlap=0.5)
    for compute_s in (0.025, 0.05, 0.1, 0.2):
        memory = memory.observe(WindowExposure(0.0028, compute_s), 1.0, math.nan, NUM_RANKS).decided(EXACT)
        assert memory.exact_s == pytest.approx(0.011)
    memory = memory.observe(WindowExposure(0.08, 0.025), 1.0, math.nan, NUM_RANKS)
    assert memory.exact_s == pytest.approx(0.0925)  # nothing else explains so much
    memory = memory.observe(WindowExposure(0.0001, 0.2), 1.0, math.nan, NUM_RANKS)
    assert memory.exact_s < 0.003


def test_drift_is_smoothed_bounded_and_forgotten_where_it_is_not_measured() -> None:
    memory = ExchangeMemory().with_drift(4.0, NUM_RANKS)
    assert memory.with_drift(1000.0, NUM_RANKS).drift == pytest.approx(4.0**0.7 * 7.0**0.3)
    for _ in range(200):
        memory = memory.with_drift(math.nan, NUM_RANKS)
    assert memory.drift == pytest.approx(3.5, rel=1e-3)
    assert math.isnan(ExchangeMemory().with_drift(math.nan, NUM_RANKS).drift)


def test_local_steps_begin_where_a_third_of_a_step_is_communication_and_end_below_a_quarter() -> None:
    local = Exchange(codec="int8", every=5)
    for share, begins, stays in ((0.2, False, False), (0.3, False, True), (0.4, True, True)):
        taken_s = COMPUTE_S * share / (1.0 - share)
        for newest, expected in ((EXACT, begins), (local, stays)):
            memory = ExchangeMemory(ruling=(newest, newest), exact_s=taken_s, drift=0.01)
            assert (choose(job_of("local"), model_of(taken_s), memory, worth, max_every=16).every > 1) == expected


def test_with_adam_local_steps_need_twice_as_large_a_share() -> None:
    adam = msgspec.structs.replace(job_of("local"), optimizer_family="adam")
    for share, begins in ((0.4, False), (0.65, False), (0.75, True)):
        taken_s = COMPUTE_S * share / (1.0 - share)
        memory = ExchangeMemory(exact_s=taken_s, drift=0.01)
        assert (choose(adam, model_of(taken_s), memory, worth, max_every=16).every > 1) == begins
