"""Shares from links that are measured while a job trains: real ranks, one of them behind a slow link."""

import hashlib
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from bench.hosts import Hosts, Link
from tests.support.ranks import run_ranks
from tests.support.training import begin_job, flat_parameters, gather
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.policies import exchange
from dynamix.arbitrator.policies.rule import Rule
from dynamix.collector.window import simulated_window
from dynamix.schemas.features import state_of
from dynamix.schemas.messages import Action, Message, Report, SystemMetrics
from dynamix.schemas.messages.allocation import Exchange

NUM_RANKS = 4
SLOW = 2
SIZE = 8
WINDOW_STEPS = 5
NUM_WINDOWS = 14


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(NUM_RANKS) as made:
        made[SLOW].set_link(Link.parse("20mbit"))
        yield made


def _decided(fold: Fold, window: int, reports: list[Report]) -> list[Action]:
    """What follows from one window's reports."""
    for number, report in enumerate(reports):
        fold.add_state(1 + window * NUM_RANKS + number, state_of(simulated_window(report)))
    actions = []
    while (action := fold.close()) is not None:
        fold.adopt(action)
        actions.append(action)
    return actions


def _trained(rank: int) -> dict[str, Any]:
    """Train under `rule`, decided in rank 0 by the functions of the services: what ruled, and what came of it."""
    os.environ["DYNAMIX_NODE"] = f"node-{rank}"
    exchange.BUSY = 1.0  # other tests may share the processors
    torch.manual_seed(1)
    inputs = torch.randn(4096, 40)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 2400), nn.ReLU(), nn.Linear(2400, 1)))
    sizes = {"local_batch_size": SIZE, "min_local_batch_size": SIZE, "max_local_batch_size": SIZE}
    session, _, optimizer = begin_job(dataset, model, rate=1e-4, policy="rule", window_steps=WINDOW_STEPS, **sizes)
    published: list[Report] = []

    def publish(message: Message) -> None:
        if isinstance(message, Report):
            published.append(msgspec.structs.replace(message, simulated=(SystemMetrics(),) * len(message.rows)))

    session._transport.publish = publish  # type: ignore[method-assign]
    control, actions, digests = None, [], []
    reports: list[list[Report]] = []
    with session:
        while len(digests) < NUM_WINDOWS * WINDOW_STEPS:
            for batch, targets in session.loader:
                loss = ((model(batch) - targets) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.step(loss)
                digests.append(hashlib.sha256(flat_parameters(model).numpy().tobytes()).digest())
                if published:
                    reports.append([each for of_node in gather(published) for each in of_node])
                    published.clear()
                    control = control or Fold(session._run.reporter.specification(total_samples=None), Rule(), None)
                    decided = _decided(control, len(reports) - 1, reports[-1])
                    actions += decided
                    for action in decided:
                        session.offer(action)
                if len(digests) == NUM_WINDOWS * WINDOW_STEPS:
                    break
        shown = [row["exchange"] for row in session.metrics()]
    again = Fold(session._run.reporter.specification(total_samples=None), Rule(), None)
    replayed = [action for window, each in enumerate(reports) for action in _decided(again, window, each)]
    return {
        "digests": digests,
        "shown": shown,
        "exchanges": [action.allocation.exchange for action in actions],
        "is_replayed": replayed == actions,
        "rates": [[row.link_bytes_per_s for report in window for row in report.rows] for window in reports],
        "reasons": [action.reason for action in actions],
    }


@pytest.mark.bpf
def test_an_exact_job_behind_one_slow_link_takes_shares_that_nobody_typed(hosts: Hosts) -> None:
    first, *others = run_ranks(_trained, NUM_RANKS, hosts=hosts)
    for other in others:
        assert other["digests"] == first["digests"], "ranks have the same bits in every step"
        assert other["shown"] == first["shown"]
        assert other["exchanges"] == first["exchanges"]
    chosen = [each for each in first["exchanges"] if each.route == "shares"]
    assert chosen, (first["rates"], first["reasons"])
    assert Exchange(route="shares").label in first["shown"]
    for each in chosen:
        assert each.codec == "none"
        assert each.every == 1
        assert each.shares[SLOW] == min(each.shares) < 50  # a busy machine can make others look slow, too
    assert any(f"rank {SLOW} carries" in reason for reason in first["reasons"])
    assert first["is_replayed"], "a decision is made of nothing but the reports"
