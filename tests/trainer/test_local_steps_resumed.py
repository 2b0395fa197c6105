"""Jobs with local steps that end an epoch, are saved, resumed, or left in the middle of a round."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.local_steps import Curved, Normalised, mean_loss, momentum_optimizer
from tests.support.ranks import run_ranks
from tests.support.training import flat_parameters
from tests.support.whole_numbers import (
    Whole,
    attach,
    distributed,
)
from torch.utils.data import IterableDataset

from dynamix.schemas.messages.allocation import Exchange


def _saved(_rank: int, outer: dict[str, float]) -> dict[str, Any]:
    """What is refused in mid-round, and parameters after 18 steps: in one go, or in two sessions."""
    found: dict[str, Any] = {}
    options: dict[str, Any] = {
        "exchange": "local",
        "policy_options": {"every": 4, "codec": "int8", **outer},
    }
    for how in ("whole", "parts"):
        model, state = distributed(Curved()), None
        optimizer = momentum_optimizer(model)
        for steps in (18,) if how == "whole" else (8, 18):
            with attach(model, optimizer, Whole(whole=False), reduction="mean", **options) as session:
                if state is not None:
                    session.load_state_dict(state)
                for inputs, factors in session.loader:
                    optimizer.zero_grad()
                    mean_loss(model(inputs), factors).backward()
                    optimizer.step()
                    session.step()
                    if session.step_index == 5:
                        with pytest.raises(RuntimeError) as refused:
                            session.state_dict()
                        found["refused"] = str(refused.value)
                    if session.step_index == steps:
                        break
                session.average()
                state = session.state_dict()
        found[how] = flat_parameters(model)
    return found


@pytest.mark.parametrize("outer", [{}, {"outer_rate": 0.7, "outer_momentum": 0.9}])
def test_a_job_resumed_at_an_averaging_goes_on_exactly(outer: dict[str, float]) -> None:
    first, second = run_ranks(_saved, 2, outer)
    assert first["refused"] == (
        "step 5 is in the middle of a round of local steps, each rank has parameters of its own: wait until "
        "session.is_averaged, or call session.average() on all ranks before"
    )
    assert torch.equal(first["whole"], second["whole"])
    assert torch.equal(first["parts"], first["whole"])
    assert torch.equal(second["parts"], first["whole"])


def _epochs(_rank: int, streams: bool) -> list[tuple[bool, bytes]]:
    """Whether the ranks are averaged at the end of each epoch, and the parameters and momentum there."""
    model = distributed(Curved())
    optimizer = momentum_optimizer(model)
    data: Any = Streamed() if streams else Whole(whole=False, num_samples=100)
    found = []
    with attach(model, optimizer, data, reduction="mean", exchange=Exchange(every=16)) as session:
        for _ in session.epochs(2):
            for inputs, factors in session.loader:
                optimizer.zero_grad()
                mean_loss(model(inputs), factors).backward()
                optimizer.step()
                session.step()
            momentum = torch.cat([optimizer.state[each]["momentum_buffer"].flatten() for each in model.parameters()])
            found.append((session.is_averaged, torch.cat([flat_parameters(model), momentum]).numpy().tobytes()))
    return found


class Streamed(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same samples as a stream, whose end is not known."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        data = Whole(whole=False, num_samples=100)
        return (data[index] for index in range(len(data)))


@pytest.mark.parametrize("streams", [False, True])
def test_an_epoch_ends_with_an_averaging(streams: bool) -> None:
    first, second = run_ranks(_epochs, 2, streams)
    assert [averaged for averaged, _ in first] == [True, True]
    assert first == second
    assert first[0] != first[1]


def _left(_rank: int, caplog_level: int = 30) -> list[str]:
    records: list[str] = []
    handler = logging.Handler(caplog_level)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dynamix.trainer").addHandler(handler)
    model = distributed(Normalised())
    optimizer = momentum_optimizer(model)
    with attach(model, optimizer, Whole(), reduction="mean", exchange=Exchange(every=4)) as session:
        for inputs, factors in session.loader:
            mean_loss(model(inputs), factors).backward()
            optimizer.step()
            session.step()
            if session.step_index == 6:
                break
        try:
            session.cover(distributed())
        except RuntimeError as error:
            records.append(str(error))
    assert model.broadcast_buffers
    return [each for each in records if "local steps" in each]


def test_a_session_that_ends_in_mid_round_says_so() -> None:
    covered, left = run_ranks(_left, 2)[0]
    assert covered.startswith(
        "step 6 is in the middle of a round of local steps, a model that is covered now would not"
    )
    assert left.startswith(
        "the session ends in the middle of a round of local steps: each rank has parameters of its own"
    )


def _from_rank_0(_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parameters after two epochs: in one go, and from what rank 0 has after the first of them."""
    found = []
    for epochs in ((2,), (1, 2)):
        model, optimizer, states = distributed(Curved()), None, [None, None]
        for number in epochs:
            if optimizer is not None:
                model = distributed(model.module)
            fresh = momentum_optimizer(model)
            if optimizer is not None:
                fresh.load_state_dict(states[0][0])  # type: ignore[index]
            optimizer = fresh
            data = Whole(whole=False, num_samples=160)
            with attach(model, optimizer, data, reduction="mean", exchange=Exchange(every=4)) as session:
                if states[0] is not None:
                    session.load_state_dict(states[0][1])
                for _ in session.epochs(number):
                    for inputs, factors in session.loader:
                        optimizer.zero_grad()
                        mean_loss(model(inputs), factors).backward()
                        optimizer.step()
                        session.step()
                dist.all_gather_object(states, (optimizer.state_dict(), session.state_dict()))
        found.append(flat_parameters(model))
    return found[0], found[1]


def test_what_rank_0_has_after_an_epoch_is_what_all_have() -> None:
    (whole, parts), (other_whole, other_parts) = run_ranks(_from_rank_0, 2)
    assert torch.equal(whole, other_whole)
    assert torch.equal(parts, whole)
    assert torch.equal(other_parts, whole)
