"""Gradient scalers and residuals: a step that is skipped loses nothing that was kept, and sends nothing twice."""

import itertools
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks
from tests.support.training import flat_parameters
from tests.support.whole_numbers import Whole, attach, distributed, whole_loss

from dynamix.schemas.messages.allocation import EXACT, Exchange

RATE = 2**-6
SKIPPED = (6, 9)


def _scaled(rank: int, exchange: Exchange, follows: bool) -> dict[str, Any]:
    """Parameters after 14 steps of which two overflow, what residuals still hold of them, and warnings."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dynamix.trainer").addHandler(handler)
    model = distributed()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=3)
    with attach(model, optimizer, Whole(whole=False), exchange=exchange) as session:
        if follows:
            session.use_scaler(scaler)
        for inputs, factors in session.loader:
            loss = whole_loss(model(inputs), factors)
            if session.step_index in SKIPPED and rank == 1:
                loss = loss * torch.inf
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            session.step()
            if session.step_index == 14:
                break
        kept = [part for each in session._models.exchanges[0].residuals().values() for part in each.items()]
        scale = session._scaled._scale or scaler.get_scale()
    lacking = torch.zeros_like(flat_parameters(model))
    places = dict(zip((name for name, _ in model.module.named_parameters()), _places(model), strict=True))
    for key, residual in kept:
        lacking[places[key]] = residual / scale
    dist.all_reduce(lacking)
    return {"parameters": flat_parameters(model), "lacking": lacking * RATE, "said": said}


def _places(model: torch.nn.Module) -> list[slice]:
    ends = [0]
    for parameter in model.parameters():
        ends.append(ends[-1] + parameter.numel())
    return [slice(*pair) for pair in itertools.pairwise(ends)]


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_a_skipped_step_neither_loses_nor_doubles_residuals(codec: str) -> None:
    exact = run_ranks(_scaled, 2, EXACT, True)[0]
    assert exact["parameters"].isfinite().all()
    first, second = run_ranks(_scaled, 2, Exchange(codec=codec), True)
    assert torch.equal(first["parameters"], second["parameters"])
    assert first["lacking"].abs().max() > 1e-4
    complete = first["parameters"] - first["lacking"]
    assert (complete - exact["parameters"]).abs().max() < 2e-5
    assert first["said"] == []

    ignorant, _ = run_ranks(_scaled, 2, Exchange(codec=codec), False)
    assert (ignorant["parameters"] - ignorant["lacking"] - exact["parameters"]).abs().max() > 1e-4
    (said,) = ignorant["said"]
    assert f"codec {codec}" in said
    assert "session.use_scaler(scaler)" in said
