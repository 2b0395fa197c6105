"""Loops that are left early, and how an epoch ends."""

from typing import Any

import torch
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, attach_numbered, distribute, loader_workers, make_model, train_step
from torch import nn


def _leave_early(_rank: int) -> dict[str, Any]:
    data = Numbered(400, torch.float32)
    model = distribute(make_model(torch.float32))
    session, optimizer = attach_numbered(data, model, shuffle=False, **loader_workers(2))
    used, lengths = [], []
    for _ in range(2):
        lengths.append(len(session.loader))
        for number, batch in enumerate(session.loader):
            used += train_step(session, model, optimizer, batch)
            if number == 4:
                break
    rest = [sample for batch in session.loader for sample in train_step(session, model, optimizer, batch)]
    epoch_after_break = []
    for epoch in session.epochs(3):
        for batch in session.loader:
            train_step(session, model, optimizer, batch)
            break
        epoch_after_break.append((epoch, session.position))
    session.close()
    return {"used": used + rest, "lengths": lengths, "epochs": epoch_after_break}


def test_a_loop_that_was_left_goes_on_where_it_was_and_a_new_epoch_begins_at_its_beginning() -> None:
    results = run_ranks(_leave_early, 2)
    assert sorted(results[0]["used"] + results[1]["used"]) == list(range(400))
    assert results[0]["lengths"] == [25, 20]
    assert results[0]["epochs"] == [(1, 416), (2, 432)]


def _normalise(_rank: int) -> dict[str, Any]:
    """Two epochs of one sample: one rank has none."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model = nn.parallel.DistributedDataParallel(layers)
    session, optimizer = attach_numbered(Numbered(1, torch.float32), model)
    steps = []
    for epoch in session.epochs(2):
        for batch in session.loader:
            steps.append((epoch, session.num_samples, len(batch[1])))
            if session.num_samples == 1:
                model.eval()  # what the README says of a tail of one sample
            train_step(session, model, optimizer, batch)
            model.train()
    session.close()
    return {"steps": steps, "position": session.position}


def test_a_rank_without_samples_can_normalise_its_dummy_batch() -> None:
    results = run_ranks(_normalise, 2)
    assert results[0]["steps"] == [(epoch, 1, 1) for epoch in (0, 1)]
    assert results[1]["steps"] == [(epoch, 0, 2) for epoch in (0, 1)]
    assert results[0]["position"] == 2
