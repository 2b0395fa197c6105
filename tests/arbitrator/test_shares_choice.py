"""Shares of owners, decided by what links carry: where they beat a ring, for as long as they do."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from tests.support import examples

from dynamix.arbitrator.policies.exchange import (
    LAG,
    LINK_WINDOWS,
    LOOK_AGAIN,
    PIPELINE,
    ExchangeMemory,
    WindowExposure,
    choose,
    link_rates,
)
from dynamix.arbitrator.policies.policy import Array32, Array64, pack, unpack
from dynamix.arbitrator.policies.step_time import StepTime
from dynamix.schemas.apportion import ring_time, shared_time
from dynamix.schemas.features import RANK_FEATURES, RANK_INDEX
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT, Exchange

MB = 1e6
GRADIENT = 0.5 * MB
COMPUTE_S = 0.010
FAST = (12.0 * MB,) * 4
ONE_SLOW = (12.0 * MB, 12.0 * MB, 2.5 * MB, 12.0 * MB)
SHARES = Exchange(route="shares")


def job_of(num_ranks: int) -> Job:
    nodes = {f"node-{rank}": (rank,) for rank in range(num_ranks)}
    sizes = (64,) * num_ranks
    job = examples.job(nodes, initial_local_batch_sizes=sizes, max_local_batch_sizes=sizes, min_local_batch_size=64)
    return msgspec.structs.replace(job, supports_exchange=True)


def observed(rates: Sequence[float]) -> Array32:
    """What ranks see of their links around a ring: each sends to the next one, as fast as both of theirs carry."""
    obs_WF = np.full((len(rates), len(RANK_FEATURES)), np.nan, dtype=np.float32)
    obs_WF[:, RANK_INDEX["link_bytes_per_s"]] = np.minimum(rates, np.roll(rates, -1))
    obs_WF[:, RANK_INDEX["link_peer"]] = np.roll(np.arange(len(rates)), -1)
    return obs_WF


def model_of(num_ranks: int, communication_s: float) -> StepTime:
    ones = np.ones(num_ranks)
    return StepTime(ones * 1e-9, ones * 64, ones * 64, ones * COMPUTE_S, 0 * ones, communication_s)


def worth(sizes: Array64) -> Array64:
    return np.ones_like(sizes)


def ruled(
    rates: Sequence[float] | Callable[[int], Sequence[float]],
    *,
    windows: int = 40,
    waiting_s: float = 0.0,
) -> list[Exchange]:
    """The exchange in effect in each window over links of such rates; ranks wait `waiting_s` for each other beside."""
    decided, memory = [EXACT, EXACT], ExchangeMemory()
    for window in range(windows):
        now, links = decided[window], rates(window) if callable(rates) else rates
        job = job_of(len(links))
        taken_s = GRADIENT * ring_time(links)
        if now.route == "shares":
            taken_s = PIPELINE * GRADIENT * shared_time(links, now.shares)
        taken_s += waiting_s
        is_ring = now.route == "all-reduce" and now.codec == "none"
        sent = 2 * (len(links) - 1) / len(links) * GRADIENT if is_ring else 0.0
        memory = memory.observe(WindowExposure(taken_s, COMPUTE_S, sent), 1.0, 4.0, len(links))
        memory = memory.with_links(link_rates(observed(links)) if is_ring else None)
        chosen = choose(job, model_of(len(links), taken_s), memory, worth, max_every=16)
        memory = memory.decided(chosen)
        memory = unpack(ExchangeMemory, pack(memory))
        decided.append(memory.newest_with_shares)
    return decided


def test_a_slow_link_among_fast_ones_owns_nothing_in_an_exact_job() -> None:
    found = ruled(ONE_SLOW)
    shares = Exchange(route="shares", shares=(333.0, 333.0, 0.0, 333.0))
    before = LAG + LINK_WINDOWS - 1  # decided in the second window that showed the links
    assert found == [EXACT] * before + [shares] * (42 - before)


def test_shares_relieve_a_slow_link_of_its_bytes_and_not_the_ranks_of_waiting_for_each_other() -> None:
    bytes_s = GRADIENT * ring_time(ONE_SLOW)
    assert ruled(ONE_SLOW, waiting_s=0.1 * bytes_s)[-1].route == "shares"
    assert set(ruled(ONE_SLOW, waiting_s=10 * bytes_s)) == {EXACT}


def test_a_link_that_changes_under_shares_is_found() -> None:
    other = (2.0 * MB, 12.0 * MB, 12.0 * MB, 12.0 * MB)
    found = ruled(lambda window: ONE_SLOW if window < 20 else other, windows=40)
    assert found[19].shares[2] == 0
    assert EXACT in found[20 : 20 + 2 * LAG]
    assert found[-1].shares[0] == 0 < found[-1].shares[2]
    assert ruled(lambda window: ONE_SLOW if window < 20 else FAST, windows=2 * LOOK_AGAIN)[-1] == EXACT


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
