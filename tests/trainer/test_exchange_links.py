"""Links that fail while gradients travel: ranks on hosts of network namespaces, one of which is unplugged."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.hosts import Hosts
from tests.support.ranks import RankError, run_ranks
from tests.support.training import flat_parameters
from tests.support.whole_numbers import Whole, attach, distributed, train_step

from dynamix.schemas.messages.allocation import EXACT, Exchange

NUM_RANKS = 3
NUM_STEPS = 18
CUT_BEFORE = 6
"""The step before which the link is cut: the first one of a round of local steps, and of a window."""
CUT_S = 2.0
TIMEOUT_S = 12.0
"""The time-out of the ranks' group, for a link that stays cut: a busy machine needs some seconds to connect them."""
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
    model = distributed()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    found, longest_s = [], 0.0
    options: dict[str, Any] = {"exchange": exchange, "local_batch_size": 4}
    with attach(model, optimizer, Whole(whole=False), **options) as session:
        for batch in session.loader:
            if directory is not None and session.step_index == CUT_BEFORE:
                (directory / "ready").touch()
                _wait_for(directory / "cut")
            began_s = time.monotonic()
            train_step(session, model, optimizer, batch)
            longest_s = max(longest_s, time.monotonic() - began_s)
            found.append(flat_parameters(model) if session.is_averaged else None)
            if len(found) == NUM_STEPS:
                break
    return {"parameters": found, "longest_s": longest_s}


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def _cut(hosts: Hosts, directory: Path, wait: Callable[[], object]) -> None:
    """Unplug host 1 once a rank is ready for it, for as long as `wait` waits."""
    _wait_for(directory / "ready")
    hosts[1].cut()
    try:
        (directory / "cut").touch()
        wait()
    finally:
        hosts[1].cut(is_cut=False)


@pytest.mark.bpf
@pytest.mark.parametrize("name", EXCHANGES)
def test_a_link_that_is_cut_for_a_while_changes_nothing(hosts: Hosts, name: str, tmp_path: Path) -> None:
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
                run_ranks(
                    _trained, NUM_RANKS, EXCHANGES[name], tmp_path, hosts=hosts, timeout=timedelta(seconds=TIMEOUT_S)
                )
            assert not cutting.done(), "all ended while the link was cut"
        finally:
            ended.set()
        cutting.result()
    for rank in range(NUM_RANKS):
        assert f"rank {rank}: Traceback" in str(caught.value)
    assert "no result within" not in str(caught.value)
