"""Learning-rate schedules and loops that stop by a count, with a global batch that stays and one that moves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.loops import loss_of
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, begin_job, distribute, gather, make_model, offer, train_step
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from dynamix import trainer as dynamix
from dynamix.trainer import Session


def _plain_against_fixed(_rank: int) -> dict[str, Any]:
    """Two epochs of a script with OneCycleLR and of the same one attached: steps, samples, rates, parameters."""
    data = Numbered(330)
    found: dict[str, Any] = {}

    def start(total_steps: int) -> tuple[nn.Module, Any, Any]:
        model = distribute(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total_steps)

    def train(batches: Any, model: nn.Module, optimizer: Any, scheduler: Any, end: Callable[[], None]) -> list[Any]:
        steps = []
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            scheduler.step()
            steps.append((sum(gather(len(batch[1]))), scheduler.get_last_lr()[0]))
            end()
        return steps

    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    parts = start(2 * len(loader))
    found["plain"] = [step for _ in range(2) for step in train(loader, *parts, lambda: None)]

    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = dynamix.attach(model, optimizer, data, local_batch_size=16, connect=False)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * len(session.loader))
    found["attached"] = [
        step
        for _ in session.epochs(2)
        for step in train(session.loader, model, optimizer, scheduler, lambda: slow(session))
    ]
    found["sizes"] = session.local_batch_sizes
    found["progress"] = session.progress
    session.close()
    return found


def slow(session: Session) -> None:
    """End a step in which rank 1 seemed to take three times as long per sample as rank 0."""
    session._models.take_times = lambda: [1e-3, 3e-3]  # type: ignore[method-assign]
    session.step()


def test_with_five_lines_only_the_split_follows_the_speeds() -> None:
    """Same samples in each step, same steps in each epoch, same schedule as plain DDP; unequal sizes."""
    for result in run_ranks(_plain_against_fixed, 2):
        assert result["attached"] == result["plain"]
        assert result["sizes"] == (24, 8)
        assert result["progress"] == 2 * 11


ADAPTIVE: dict[str, Any] = {"local_batch_size": 16, "min_local_batch_size": 1, "window_steps": 1}


def _adaptive_schedule(_rank: int) -> dict[str, Any]:
    """Batches of half and of twice the base: how far a scheduler that the session drives is after two epochs."""
    session, model, optimizer = begin_job(Numbered(640), **ADAPTIVE)
    total = 2 * session.num_reference_steps
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total)
    session.schedule(scheduler)
    steps, worst = 0, 0.0
    for epoch in session.epochs(2):
        for batch in session.loader:
            offer(session, (8, 8) if epoch == 0 else (32, 32))
            train_step(session, model, optimizer, batch)
            steps += 1
            worst = max(worst, abs(scheduler.last_epoch - session.position / 32))
    session.close()
    return {"steps": steps, "rate": scheduler.get_last_lr()[0], "last": scheduler.last_epoch, "worst": worst}


def test_a_schedule_that_the_session_drives_follows_samples() -> None:
    for result in run_ranks(_adaptive_schedule, 2):
        assert result["steps"] != 40
        assert result["last"] == 40
        assert result["rate"] == pytest.approx(0.0, abs=1e-9)
        assert result["worst"] < 1


def _stop_by_count(_rank: int) -> tuple[int, float]:
    session, model, optimizer = begin_job(Numbered(320), **ADAPTIVE)
    while session.progress < 25:
        for batch in session.loader:
            offer(session, (8, 8))
            train_step(session, model, optimizer, batch)
            if session.progress >= 25:
                break
    session.close()
    return session.position, session.progress


def test_a_loop_that_stops_by_progress_sees_the_samples_of_the_plain_one() -> None:
    for position, progress in run_ranks(_stop_by_count, 2):
        assert position == 25 * 32
        assert progress == 25.0
