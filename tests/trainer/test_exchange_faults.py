"""What goes wrong in an exchange, and never a hang beyond the group's time-out."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench.hosts import Hosts
from tests.support.ranks import RankError, each_case, run_ranks, wait_for_file
from tests.support.training import flat_parameters, offer
from tests.support.whole_numbers import SIZES, Whole, attach, distributed, train_step, train_until, whole_job
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from dynamix.schemas.messages.allocation import EXACT, Exchange
from dynamix.trainer.exchange.codec import Leg, Sum
from dynamix.trainer.exchange.plan import Pipeline

TIMEOUT = timedelta(seconds=12)
"""Timeout of the ranks' group: a busy machine needs some seconds to connect them."""


def _dies(rank: int, exchange: Exchange) -> None:
    """Rank 1 is killed in the middle of its backward pass."""
    group = dist.new_group(timeout=TIMEOUT)
    of_group = distributed(process_group=group)
    with whole_job(None, of_group, exchange=exchange, local_batch_size=4) as (session, model, optimizer):
        for batch in session.loader:
            if session.step_index == 4 and rank == 1:
                next(iter(model.parameters())).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            train_step(session, model, optimizer, batch)


@pytest.mark.parametrize("exchange", [Exchange(codec="int8"), Exchange(every=3)], ids=lambda exchange: exchange.label)
def test_a_rank_that_is_killed_in_mid_exchange_ends_the_others_with_an_error(exchange: Exchange) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1: ended without a result") as caught:
        run_ranks(_dies, 3, exchange)
    assert "rank 0: Traceback" in str(caught.value)
    assert "rank 2: Traceback" in str(caught.value)
    if exchange.every == 1:  # else they may meet first where a decision is sent
        assert "the exchange between the ranks failed" in str(caught.value)
    assert time.monotonic() - began < 60 + TIMEOUT.total_seconds()


def _fails_alone(rank: int) -> list[str]:
    """Rank 1 fails between two collectives and goes on; what both ranks are told of that leg and of the next one."""
    pipeline = Pipeline(timedelta(seconds=60))
    under_way = [pipeline.send(leg) for leg in (_sum_twice(fails=rank == 1), _sum_twice(fails=False))]
    found = []
    for each in under_way:
        with pytest.raises(RuntimeError) as caught:
            each.wait()
        found.append(str(caught.value))
    dist.barrier()  # until then both processes live
    pipeline.close()
    return found


def _sum_twice(*, fails: bool) -> Leg:
    yield Sum(torch.ones(4))
    if fails:
        raise ValueError("of one rank")
    yield Sum(torch.ones(4))


def test_a_rank_that_fails_alone_is_not_waited_for_although_its_process_lives() -> None:
    first, second = run_ranks(_fails_alone, 2)
    assert second == ["the exchange between the ranks failed: of one rank"] * 2
    assert first[0] == first[1]
    assert first[0].startswith("the exchange between the ranks failed: ")
    assert "Timed out" not in first[0]


def _resumed(rank: int, codec: str) -> dict[str, torch.Tensor]:
    """Parameters after 12 steps: in one go, in two sessions of which each rank saves its state, or rank 0 for both."""
    found = {}
    options = {"exchange": "lossy", "policy_options": {"codec": codec, "route": "shares"}}
    for how in ("whole", "each", "first"):
        model, state = distributed(), None
        for steps in (12,) if how == "whole" else (5, 12):
            with whole_job(Whole(whole=False), model, **options) as (session, _, optimizer):
                if state is not None:
                    session.load_state_dict(state)
                train_until(steps, session, model, optimizer)
                states: list[Any] = [None, None]
                dist.all_gather_object(states, session.state_dict())
                state = states[rank if how == "each" else 0]
        found[how] = flat_parameters(model)
    return found


def test_a_resumed_job_goes_on_with_the_residuals_of_each_rank() -> None:
    first, second = run_ranks(each_case, 2, _resumed, [("none",), ("bf16",)])
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one["each"], one["whole"])
        for how, parameters in one.items():
            assert torch.equal(parameters, other[how]), how
    lossless, lossy = first
    assert torch.equal(lossless["first"], lossless["whole"])
    assert 0 < (lossy["first"] - lossy["whole"]).abs().max() < 0.05


def _decided(_rank: int) -> list[Exchange]:
    """The exchange after a resume: under the policy that decided it, another one, and where it is not permitted."""
    found, state = [], None
    again: list[dict[str, Any]] = [{}, {}, {"policy": "split"}, {"exchange": "exact"}]
    for options in again:
        with whole_job(**({"exchange": "lossy"} | options)) as (session, model, optimizer):
            if state is not None:
                session.load_state_dict(state)
            for batch in session.loader:
                if state is None:
                    offer(session, SIZES, exchange=Exchange(codec="bf16"))
                train_step(session, model, optimizer, batch)
                if state is not None or session.step_index == 10:
                    break
            found.append(session.allocation.exchange)
            state = state or session.state_dict()
    return found


def test_a_resumed_job_keeps_what_its_policy_decided() -> None:
    decided = Exchange(codec="bf16")
    assert run_ranks(_decided, 2) == [[decided, decided, EXACT, EXACT]] * 2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"exchange": "lossy", "base_hook": allreduce_hook}, "a base_hook exclude each other"),
    ({"exchange": "lossy", "weighting": "loss"}, 'needs weighting="hook"'),
    ({"policy_options": {"codec": "int8"}}, "which this job does not permit"),
    ({"policy_options": {"codec": "int9"}}, "exchange codec 'int9' is unknown"),
    ({"exchange": Exchange(route="shares", shares=(1.0, 1.0, 1.0))}, "3 shares for 2 ranks"),
    ({"exchange": "lossy", "policy_options": {"every": 2}}, "which this job does not permit"),
    ({"exchange": Exchange(every=2), "count_tokens": len}, "local steps and count_tokens exclude each other"),
]


def _refuses(_rank: int) -> None:
    for options, why in REFUSED:
        with pytest.raises(ValueError, match=why), whole_job(**options):
            pass
    model = distributed()
    with pytest.raises(ValueError, match="local steps with SGD and Adam"):
        attach(model, torch.optim.RMSprop(model.parameters()), Whole(), exchange="local")


def test_what_cannot_be_exchanged_is_refused() -> None:
    run_ranks(_refuses, 2)


# --- links that fail: ranks on hosts of network namespaces, one of which is unplugged ---

NUM_RANKS = 3
NUM_STEPS = 18
CUT_BEFORE = 6
"""The step before which the link is cut: the first one of a round of local steps, and of a window."""
CUT_S = 5.0
EXCHANGES = {
    "exact": EXACT,
    "shares": Exchange(route="shares"),
    "local": Exchange(every=3, codec="int8"),
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(NUM_RANKS) as made:
        yield made


def _trained(_rank: int, exchange: Exchange, directory: Path | None) -> dict[str, Any]:
    """Parameters after each step, and the longest step; with a directory, steps wait there until the link is cut."""
    found, longest_s = [], 0.0
    with whole_job(Whole(whole=False), exchange=exchange, local_batch_size=4) as (session, model, optimizer):
        for batch in session.loader:
            if directory is not None and session.step_index == CUT_BEFORE:
                (directory / "ready").touch()
                wait_for_file(directory / "cut")
            began_s = time.monotonic()
            train_step(session, model, optimizer, batch)
            longest_s = max(longest_s, time.monotonic() - began_s)
            found.append(flat_parameters(model) if session.is_averaged else None)
            if len(found) == NUM_STEPS:
                break
    return {"parameters": found, "longest_s": longest_s}


def _cut(hosts: Hosts, directory: Path, wait: Callable[[], object]) -> None:
    """Unplug host 1 once a rank is ready for it, for as long as `wait` waits."""
    wait_for_file(directory / "ready")
    hosts[1].cut()
    try:
        (directory / "cut").touch()
        wait()
    finally:
        hosts[1].cut(is_cut=False)


@pytest.mark.bpf
@pytest.mark.parametrize("name", EXCHANGES)
def test_a_link_that_is_cut_for_5_s_delays_a_step_and_changes_nothing(hosts: Hosts, name: str, tmp_path: Path) -> None:
    undisturbed = run_ranks(_trained, NUM_RANKS, EXCHANGES[name], None, hosts=hosts)
    with ThreadPoolExecutor(1) as pool:
        cutting = pool.submit(_cut, hosts, tmp_path, lambda: time.sleep(CUT_S))
        cut = run_ranks(_trained, NUM_RANKS, EXCHANGES[name], tmp_path, hosts=hosts)
        cutting.result()
    assert max(each["longest_s"] for each in cut) > CUT_S - 1, "the cut was felt"
    ends = [step for step, parameters in enumerate(cut[0]["parameters"]) if parameters is not None]
    assert ends == list(range(EXCHANGES[name].every - 1, NUM_STEPS, EXCHANGES[name].every))
    for each in (*cut, *undisturbed):
        for step in ends:
            assert torch.equal(each["parameters"][step], undisturbed[0]["parameters"][step]), step


@pytest.mark.bpf
@pytest.mark.parametrize("name", ["shares", "local"])
def test_a_link_that_stays_cut_ends_all_ranks_at_the_groups_time_out(hosts: Hosts, name: str, tmp_path: Path) -> None:
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        cutting = pool.submit(_cut, hosts, tmp_path, ended.wait)
        try:
            with pytest.raises(RankError) as caught:
                run_ranks(_trained, NUM_RANKS, EXCHANGES[name], tmp_path, hosts=hosts, timeout=TIMEOUT)
            assert not cutting.done(), "all ended while the link was cut"
        finally:
            ended.set()
        cutting.result()
    for rank in range(NUM_RANKS):
        assert f"rank {rank}: Traceback" in str(caught.value)
    assert "no result within" not in str(caught.value)
