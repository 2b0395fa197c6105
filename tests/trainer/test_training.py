"""Whole small jobs on real gloo ranks: resumed, without a bus, left in the middle of an epoch."""

import time
from typing import Any

import pytest
import torch
from tests.support.ranks import run_ranks
from tests.support.training import (
    Numbered,
    begin_job,
    flat_parameters,
    offer,
    straight_and_resumed,
    train_step,
)
from torch import nn

from dynamix.runtime.settings import BusSettings
from dynamix.schemas.messages import Job, Message, Report
from dynamix.trainer import Session

NO_BROKER = BusSettings(url="nats://127.0.0.1:1")
"""A port on which nothing listens."""
CUT = 23


def _resume(rank: int, num_workers: int) -> dict[str, Any]:
    """One job straight through, and the same job in two halves; changes are decided before the cut, one comes after."""
    published: list[Message] = []

    def begin() -> tuple[Session, nn.Module, Any]:
        loader = {"num_workers": num_workers, "persistent_workers": num_workers > 1}
        return begin_job(Numbered(601, torch.float32), window_steps=8, seed=4, **loader)

    def train(session: Session, model: nn.Module, optimizer: Any, until: int) -> list[list[int]]:
        if session.generation == 1:
            session._transport.publish = published.append  # type: ignore[method-assign]
        used = []
        for _ in session.epochs(2):
            for batch in session.loader:
                used.append(train_step(session, model, optimizer, batch))
                if session.generation == 0 and session.step_index < CUT:
                    offer(session, (5 + session.step_index, 12))
                if rank == 1 and session.step_index % 5 == 0:
                    session.state_dict()  # one rank alone, at any step, changes nothing
                if session.step_index == until:
                    return used
        return used

    return {**straight_and_resumed(begin, train, CUT), "published": published}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_is_the_same_run(num_workers: int) -> None:
    results = run_ranks(_resume, 2, num_workers, environ={"DYNAMIX_JOB": "resumed"})
    for result in results:
        assert result["halves"] == result["straight"]
        assert result["same_parameters"]
        assert result["same_place"]
        assert result["is_pending"]  # a change that was adopted before the cut took effect after it
        assert result["generation"] == 1
    started = results[0]["published"][0]
    assert isinstance(started, Job)
    assert (started.job, started.generation, started.base_global_batch_size) == ("resumed", 1, 16)
    assert started.initial_local_batch_sizes != (8, 8)
    reports = [message for message in results[0]["published"] if isinstance(message, Report)]
    assert [report.window for report in reports] == list(range(len(reports)))


def _parameters_with(_rank: int, connect: Any) -> dict[str, Any]:
    session, model, optimizer = begin_job(Numbered(300, torch.float32), window_steps=3, connect=connect)
    for _ in session.epochs(1):
        for batch in session.loader:
            train_step(session, model, optimizer, batch)
    began = time.monotonic()
    session.close()
    return {
        "parameters": flat_parameters(model),
        "close_s": time.monotonic() - began,
        "sizes": session.local_batch_sizes,
    }


def test_without_a_bus_training_runs_unchanged() -> None:
    alone = run_ranks(_parameters_with, 2, False)
    away = run_ranks(_parameters_with, 2, NO_BROKER, environ={"DYNAMIX_TRAINER_CLOSE_TIMEOUT_S": "0.1"})
    for rank in range(2):
        assert torch.equal(alone[rank]["parameters"], away[rank]["parameters"])
        assert away[rank]["sizes"] == (8, 8)
        assert away[rank]["close_s"] < 30


def _leave_early(_rank: int) -> dict[str, Any]:
    data = Numbered(400, torch.float32)
    session, model, optimizer = begin_job(data, shuffle=False, num_workers=2, persistent_workers=True)
    used, lengths = [], []
    for _ in range(2):
        lengths.append(len(session.loader))
        for number, batch in enumerate(session.loader):
            used += train_step(session, model, optimizer, batch)
            if number == 4:
                break
    whole = [sample for batch in session.loader for sample in train_step(session, model, optimizer, batch)]
    epoch_after_break = []
    for epoch in session.epochs(5):
        for batch in session.loader:
            train_step(session, model, optimizer, batch)
            break
        epoch_after_break.append((epoch, session.position))
    session.close()
    return {"used": used, "whole": whole, "lengths": lengths, "epochs": epoch_after_break}


def test_a_loop_that_was_left_has_ended_its_epoch() -> None:
    results = run_ranks(_leave_early, 2)
    assert sorted(results[0]["used"] + results[1]["used"]) == sorted([*range(80), *range(80)])
    assert sorted(results[0]["whole"] + results[1]["whole"]) == list(range(400))
    assert results[0]["lengths"] == [25, 25]
    assert results[0]["epochs"] == [(3, 576), (4, 592)]
