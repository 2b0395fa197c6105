"""Local steps with every codec, route, model and way to make a step: ranks alike wherever they are averaged."""

import hashlib
import random
from typing import Any

import msgspec
import pytest
import torch
from tests.support.local_steps import Normalised, mean_loss
from tests.support.ranks import run_ranks
from tests.support.training import flat_parameters, offer
from tests.support.whole_numbers import (
    Heads,
    Sometimes,
    Whole,
    attach,
    distributed,
    train_models,
)
from torch import nn

from dynamix.schemas.messages.allocation import EXACT, Exchange
from dynamix.trainer.exchange.codecs import CODECS


def _changing(_rank: int, num_steps: int) -> list[tuple[bool, bytes]]:
    """Whether the ranks are averaged after each step, and a digest of parameters and buffers; all levers change."""
    model = distributed(Normalised())
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-8, momentum=0.5)
    drawn = random.Random(11)
    exchanges = [Exchange(codec=codec, route=route) for codec in CODECS for route in ("all-reduce", "shares")]
    found: list[tuple[bool, bytes]] = []
    options: dict[str, Any] = {"exchange": "local", "local_batch_size": 8, "window_steps": 4, "min_local_batch_size": 2}
    with attach(model, optimizer, Whole(whole=False), reduction="mean", **options) as session:
        while len(found) < num_steps:
            for inputs, factors in session.loader:
                sizes = [drawn.choice([2, 8, 20]) for _ in range(2)]
                exchange = msgspec.structs.replace(drawn.choice(exchanges), every=drawn.choice([1, 1, 2, 3, 16]))
                if exchange.route == "shares" and drawn.random() < 0.7:
                    shares = (drawn.random(), drawn.choice([0.0, 1.0]), 0.5)
                    exchange = msgspec.structs.replace(exchange, shares=shares)
                if exchange.every > 1 and drawn.random() < 0.5:
                    exchange = msgspec.structs.replace(exchange, outer_rate=0.7, outer_momentum=0.5)
                offer(session, [*sizes, 4], split=drawn.choice(["fixed", "tracking"]), exchange=exchange)
                optimizer.zero_grad()
                mean_loss(model(inputs), factors).backward()
                optimizer.step()
                is_local = session.allocation.exchange.every > 1
                session.step()
                state = [flat_parameters(model).numpy().tobytes()]
                if is_local:  # else DDP broadcasts them in the next forward pass
                    state += [buffer.numpy().tobytes() for buffer in model.buffers()]
                found.append((session.is_averaged, hashlib.sha256(b"".join(state)).digest()))
    assert flat_parameters(model).isfinite().all()
    return found[:num_steps]


def test_ranks_have_the_same_bits_wherever_they_are_averaged_over_500_steps_of_changing_levers() -> None:
    first, *others = run_ranks(_changing, 3, 500)
    averaged = [is_averaged for is_averaged, _ in first]
    assert 100 < sum(averaged) < 400
    for other in others:
        assert [is_averaged for is_averaged, _ in other] == averaged
        differing = [step for step in range(500) if averaged[step] and other[step] != first[step]]
        assert differing == []
    assert sum(one != other for one, other in zip(first, others[0], strict=True)) > 50


def _whole_local(rank: int, kind: str, exchange: Exchange) -> torch.Tensor:
    """Parameters after 12 steps whose gradients do not depend on them: the mean of rounds is that of single steps."""
    options: dict[str, Any] = {"exchange": exchange, "local_batch_size": 8}
    models: list[nn.Module] = [distributed()]
    if kind == "two models":
        models += [distributed()]
    elif kind == "one rank without a gradient":
        models = [distributed(Sometimes(uses_all=rank == 0), find_unused_parameters=True)]
    elif kind == "bf16":
        models = [distributed(Heads(torch.bfloat16))]
    elif kind == "gradients as views of buckets":
        models = [distributed(gradient_as_bucket_view=True)]
    elif kind == "accumulation":
        options |= {"micro_batch_size": 3}
    elif kind == "empty" and exchange != EXACT:
        options |= {"local_batch_size": (0, 16)}
    optimizers = [torch.optim.SGD(model.parameters(), lr=2**-6) for model in models]
    with attach(models, optimizers, Whole(), **options) as session:  # type: ignore[arg-type]
        train_models(session, models, optimizers, 12)
        assert session.is_averaged
    return torch.stack([flat_parameters(model) for model in models])


@pytest.mark.parametrize(
    "kind",
    [
        *("plain", "two models", "accumulation", "empty", "one rank without a gradient"),
        *("bf16", "gradients as views of buckets"),
    ],
)
def test_where_gradients_do_not_depend_on_parameters_local_steps_are_single_ones(kind: str) -> None:
    expected = run_ranks(_whole_local, 2, kind, EXACT)[0]
    assert expected.abs().max() > 0
    for exchange in (Exchange(every=3), Exchange(every=3, codec="rows")):
        for found in run_ranks(_whole_local, 2, kind, exchange):
            assert torch.equal(found, expected)
