"""How `rule` chooses the exchange of gradients: the law of local steps, and the way that takes least."""

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from tests.support import examples
from tests.support.toy_cluster import ToyCluster

from dynamix.arbitrator.policies.exchange import (
    LAG,
    LINK_WINDOWS,
    LOOK_AGAIN,
    PIPELINE,
    ExchangeMemory,
    decided_exchange,
    link_rates,
)
from dynamix.arbitrator.policies.policy import Array32, pack, unpack
from dynamix.arbitrator.policies.rule import Rule
from dynamix.arbitrator.policies.step_time import StepTime
from dynamix.schemas.apportion import ring_time, shared_time
from dynamix.schemas.features import RANK_FEATURES, RANK_INDEX
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT, Exchange

INT8 = Exchange(codec="int8")
NUM_RANKS = 8
COMPUTE_S = 0.010
"""Compute time of any batch: the choice depends on communication alone."""
TRUE_SHARES = {"none": 1.0, "int8": 0.26}
MB = 1e6
GRADIENT = 0.5 * MB
FAST = (12.0 * MB,) * 4
ONE_SLOW = (12.0 * MB, 12.0 * MB, 2.5 * MB, 12.0 * MB)


def job_of(num_ranks: int = NUM_RANKS, **changes: object) -> Job:
    nodes = {f"node-{rank}": (rank,) for rank in range(num_ranks)}
    sizes = (64,) * num_ranks
    job = examples.job(nodes, initial_local_batch_sizes=sizes, max_local_batch_sizes=sizes, min_local_batch_size=64)
    return msgspec.structs.replace(job, **changes)


def chosen_after(
    job: Job, exposed_s: Callable[[int, Exchange], float], links: Callable[[int], Array32], *, windows: int = 40
) -> list[Exchange]:
    """The exchange that is active in each window, from the communication that each exposes per step."""
    decided, memory, ones = [EXACT] * LAG, ExchangeMemory(), np.ones(job.world_size)
    for window in range(windows):
        now = decided[window]
        memory = memory.observe(exposed_s(window, now), 80).with_links(link_rates(links(window)))
        model = StepTime(ones * 1e-9, ones * 64, ones * 64, ones * COMPUTE_S, 0 * ones, exposed_s(window, now))
        memory, _ = decided_exchange(job, memory, model, 64.0 * job.world_size)
        memory = unpack(ExchangeMemory, pack(memory))
        decided.append(memory.newest)
    return decided


def chosen(permission: str, communication_s: float, **changes: object) -> list[Exchange]:
    """The same where each exchange takes its true share of the exact one's time, and links are not measured."""

    def exposed_s(window: int, now: Exchange) -> float:  # noqa: ARG001 - the same in each
        return communication_s * TRUE_SHARES[now.codec] / now.every

    return chosen_after(job_of(exchange=permission, **changes), exposed_s, lambda _: observed((math.nan,) * NUM_RANKS))


def observed(rates: Sequence[float]) -> Array32:
    """What ranks see of their links around a ring: each sends to the next one, as fast as both of theirs carry."""
    obs_WF = np.full((len(rates), len(RANK_FEATURES)), np.nan, dtype=np.float32)
    obs_WF[:, RANK_INDEX["link_bytes_per_s"]] = np.minimum(rates, np.roll(rates, -1))
    obs_WF[:, RANK_INDEX["link_peer"]] = np.roll(np.arange(len(rates)), -1)
    return obs_WF


def over_links(rates: Callable[[int], Sequence[float]], *, waiting_s: float = 0.0, windows: int = 40) -> list[Exchange]:
    """The exchange in each window of an exact job over links of such rates; ranks also wait `waiting_s`."""

    def exposed_s(window: int, now: Exchange) -> float:
        if now.route == "shares":
            return PIPELINE * GRADIENT * shared_time(rates(window), now.shares) + waiting_s
        return GRADIENT * ring_time(rates(window)) + waiting_s

    job = job_of(len(rates(0)), supports_exchange=True)
    return chosen_after(job, exposed_s, lambda window: observed(rates(window)), windows=windows)


def test_exposed_communication_makes_it_choose_the_codec_that_saves_most() -> None:
    found = chosen("lossy", 0.020)
    assert found.index(INT8) == LAG  # decided in the first window
    assert set(found) == {EXACT, INT8}


@pytest.mark.parametrize(
    ("permission", "communication_s"), [("lossy", 0.0005), ("local", 0.0005), ("exact", 0.0005), ("exact", 0.2)]
)
def test_where_communication_is_hidden_or_the_job_permits_nothing_gradients_stay_exact(
    permission: str, communication_s: float
) -> None:
    assert set(chosen(permission, communication_s)) == {EXACT}


@pytest.mark.parametrize(("communication_s", "every"), [(0.010, 2), (0.050, 4), (0.4, 16)])
def test_local_steps_follow_the_law(communication_s: float, every: int) -> None:
    """h = sqrt(0.3 e / c (1 / 0.07 - 1)) of 8 ranks is 2.0, 4.5 and 12.6."""
    outer = {"outer_rate": 0.5 if every == 4 else 0.0, "outer_momentum": 0.5} if every > 2 else {}
    assert set(chosen("local", communication_s)) == {EXACT, Exchange(codec="int8", every=every, **outer)}


def test_local_steps_end_where_links_became_fast() -> None:
    def exposed_s(window: int, now: Exchange) -> float:
        return (0.040 if window < 20 else 0.001) * TRUE_SHARES[now.codec] / now.every

    found = chosen_after(job_of(exchange="local"), exposed_s, lambda _: observed((math.nan,) * NUM_RANKS))
    assert found[20].every > 1
    assert found[20 + 3 * LAG] == EXACT


def test_a_codec_that_turns_out_slower_than_exact_gradients_is_not_tried_again() -> None:
    def exposed_s(window: int, now: Exchange) -> float:  # noqa: ARG001 - the same in each
        return {"none": 0.010, "int8": 0.020}[now.codec]

    found = chosen_after(job_of(exchange="lossy"), exposed_s, lambda _: observed((math.nan,) * NUM_RANKS))
    assert 0 < found.count(INT8) <= 2 * LAG
    assert set(found[10:]) == {EXACT}


def test_rows_are_sent_in_an_exact_job_whose_model_is_mostly_tables() -> None:
    rates = np.full(NUM_RANKS, 1000.0)
    for supports, share, is_chosen in ((True, 0.9, True), (True, 0.0, False), (False, 0.9, False)):
        job = job_of(supports_tracking=True, min_local_batch_size=1, supports_exchange=supports, table_share=share)
        found = [
            decision.allocation.exchange for decision in ToyCluster(rates, communication_s=0.2).run(Rule(), job, 3)
        ]
        assert set(found) <= {EXACT, Exchange(codec="rows")}
        assert (Exchange(codec="rows") in found) == is_chosen


def test_a_slow_link_among_fast_ones_owns_nothing_in_an_exact_job() -> None:
    found = over_links(lambda _: ONE_SLOW)
    shares = Exchange(route="shares", shares=(333.0, 333.0, 0.0, 333.0))
    before = LAG + LINK_WINDOWS - 1  # decided in the second window that showed the links
    assert found == [EXACT] * before + [shares] * (42 - before)


def test_shares_do_not_stay_where_ranks_only_wait_for_each_other() -> None:
    bytes_s = GRADIENT * ring_time(ONE_SLOW)
    assert over_links(lambda _: ONE_SLOW, waiting_s=0.1 * bytes_s)[-1].route == "shares"
    assert over_links(lambda _: ONE_SLOW, waiting_s=100 * bytes_s)[-1] == EXACT


def test_a_link_that_changes_under_shares_is_found() -> None:
    other = (2.0 * MB, 12.0 * MB, 12.0 * MB, 12.0 * MB)
    found = over_links(lambda window: ONE_SLOW if window < 20 else other)
    assert found[19].shares[2] == 0
    assert EXACT in found[20 : 20 + 2 * LAG]
    assert found[-1].shares[0] == 0 < found[-1].shares[2]
    assert over_links(lambda window: ONE_SLOW if window < 20 else FAST, windows=2 * LOOK_AGAIN)[-1] == EXACT


def test_a_rank_that_sends_fast_to_another_has_a_fast_link_and_so_has_the_other() -> None:
    found = link_rates(observed(ONE_SLOW))
    assert found is not None
    assert found.tolist() == list(ONE_SLOW)
    between = link_rates(observed((2.5 * MB, 12.0 * MB, 2.5 * MB, 12.0 * MB)))  # what is between slow ones is not seen
    assert between is not None
    assert between.tolist() == [2.5 * MB] * 4
    unknown = observed(FAST)
    unknown[1, RANK_INDEX["link_bytes_per_s"]] = np.nan
    assert link_rates(unknown) is None
