"""What is measured in rounds of local steps: compute times, drift and gradient noise."""

from typing import Any

import pytest
import torch
from tests.support.local_steps import Curved, mean_loss, momentum_optimizer
from tests.support.ranks import run_ranks
from tests.support.training import flat_parameters
from tests.support.whole_numbers import (
    SIZES,
    Heads,
    Whole,
    attach,
    distributed,
    train_step,
)

from dynamix.schemas.messages.allocation import EXACT, Exchange


def _tracked(rank: int) -> tuple[tuple[int, ...], list[float]]:
    """Sizes after 20 local steps in which rank 1 takes three times as long per sample, and the times all were told."""
    model = distributed()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    options: dict[str, Any] = {"exchange": Exchange(every=4, codec="int8"), "policy_options": {"track": 1}}
    with attach(model, optimizer, Whole(), local_batch_size=8, **options) as session:
        session._meter.clock.seconds_per_sample = lambda: (0.001, 0.003)[rank]  # type: ignore[method-assign]
        heard: list[float] = []
        after_step = session._steering.after_step

        def listen(position: Any, times: list[float] | None = None, counts: tuple[int, ...] = ()) -> None:
            heard.extend(times or [])
            after_step(position, times, counts)

        session._steering.after_step = listen  # type: ignore[method-assign]
        for batch in session.loader:
            train_step(session, model, optimizer, batch)
            if session.step_index == 20:
                break
        return session.local_batch_sizes, heard


def test_compute_times_travel_with_the_averaging() -> None:
    for sizes, heard in run_ranks(_tracked, 2):
        assert heard == pytest.approx([0.001, 0.003] * 5)
        assert sizes == (12, 4)


def _noise(_rank: int, exchange: Exchange, wide: bool) -> list[tuple[int, float, float]]:
    """Step and squared norms of this rank's and of the whole gradient, where they were measured."""
    model = distributed(Heads(more=9000 if wide else 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    found = []
    with attach(model, optimizer, Whole(), exchange=exchange, noise_every=4) as session:
        record_batch = session._meter.record_batch

        def listen(batch: Any, loss: Any, num_correct: Any, norms: Any) -> None:
            if norms.reduced:
                step = batch.plan.step if norms.counts is None else batch.plan.step - exchange.every + 1
                found.append((step, sum(map(float, norms.local)), sum(map(float, norms.reduced))))
            record_batch(batch, loss, num_correct, norms)

        session._meter.record_batch = listen  # type: ignore[method-assign]
        for batch in session.loader:
            train_step(session, model, optimizer, batch)
            if session.step_index == 30:
                break
    return found


def _drift(rank: int) -> list[tuple[float, float, torch.Tensor]]:
    """Both parts of each round's drift, and how far this rank had come by its end, times its weight."""
    model = distributed(Curved())
    optimizer = momentum_optimizer(model)
    weight, found, drifts = SIZES[rank] / sum(SIZES), [], []
    with attach(model, optimizer, Whole(whole=False), reduction="mean", exchange=Exchange(every=4)) as session:
        session._meter.record_drift = drifts.append  # type: ignore[method-assign]
        begun = flat_parameters(model)
        for inputs, factors in session.loader:
            optimizer.zero_grad()
            mean_loss(model(inputs), factors).backward()
            optimizer.step()
            moved = weight * (flat_parameters(model) - begun)
            session.step()
            if session.is_averaged:
                begun = flat_parameters(model)
                found.append((sum(map(float, drifts[-1].own)), sum(map(float, drifts[-1].mean)), moved))
            if session.step_index == 12:
                break
    return found


def test_drift_is_that_of_all_ranks_from_their_mean() -> None:
    for rounds in zip(*run_ranks(_drift, 2), strict=True):
        mean = sum(moved for _, _, moved in rounds)
        for (own, reduced, moved), size in zip(rounds, SIZES, strict=True):
            assert own == pytest.approx(float(moved.square().sum()) * sum(SIZES) / size, rel=1e-3)
            assert reduced == pytest.approx(float(mean.square().sum()), rel=1e-3)


@pytest.mark.parametrize("wide", [False, True])
def test_the_noise_is_measured_where_all_ranks_have_the_same_parameters(wide: bool) -> None:
    plain, local = run_ranks(_noise, 2, EXACT, wide), run_ranks(_noise, 2, Exchange(every=3), wide)
    for rank in (0, 1):
        norms = {step: numbers for step, *numbers in plain[rank]}
        steps = [step for step, *_ in local[rank]]
        assert steps == [0, 3, 6, 9, 12, 15, 18, 21, 24]  # due on each of the first 20 steps, then on 20, 24, 28
        for step, *numbers in local[rank]:
            if step in norms:
                assert numbers[0] == pytest.approx(norms[step][0], rel=1e-4)
                assert numbers[1] == pytest.approx(norms[step][1], rel=0.1 if wide else 1e-5)
    assert [each[2] for each in local[0]] == [each[2] for each in local[1]]
