"""Training loops that people really have: what they train is right, or one sentence says why not."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from tests.support.loops import OPTIONS, SIZES, gathered, gradient_of, loss_of, relative_error, whole_gradient
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, begin_job, make_model, offer, train_step

from dynamix import trainer as dynamix

CODED = {"exchange": "lossy", "policy": "static", "policy_options": {"codec": "int8"}}


@pytest.mark.parametrize("options", [{}, CODED])
def test_a_single_process_needs_no_process_group(options: dict[str, Any]) -> None:
    data, model = Numbered(100), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    used: list[int] = []
    with dynamix.attach(model, optimizer, data, local_batch_size=16, connect=False, **options) as session:
        for _ in session.epochs(1):
            for batch in session.loader:
                used += train_step(session, model, optimizer, batch)
        assert (session.progress, session.num_reference_steps) == (7.0, 7)
    assert sorted(used) == list(range(100))


def _lengths(_rank: int, options: dict[str, Any]) -> tuple[list[int], int]:
    session, model, optimizer = begin_job(Numbered(330), local_batch_size=16, **options)
    lengths = [len(session.loader)]
    for batch in session.loader:
        loss_of(model, batch).backward()
        if session.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
        session.step()
        lengths.append(len(session.loader))
    session.close()
    return lengths, len(lengths) - 1


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 5}])
def test_the_length_of_the_loader_stays_while_an_epoch_is_trained(options: dict[str, Any]) -> None:
    for lengths, number in run_ranks(_lengths, 2, options):
        assert set(lengths) == {number}


def _ahead(batches: Any) -> Iterator[Any]:
    """What a prefetcher does: fetch the next batch before the current one is trained on."""
    source = iter(batches)
    current = next(source)
    for following in source:
        yield current
        current = following
    yield current


def _look_ahead(_rank: int, num_workers: int) -> dict[str, Any]:
    data = Numbered(601)
    session, model, optimizer = begin_job(
        data, rate=0.0, look_ahead=1, num_workers=num_workers, max_lag_windows=9, **OPTIONS
    )
    errors, samples, sizes = [], [], set()
    for batch in _ahead(chain(session.loader, session.loader)):
        used = gathered(batch[2][: session.num_samples].tolist())
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        errors.append(relative_error(gradient_of(model), whole_gradient(data, used)))
        samples += used
        sizes.add(session.local_batch_sizes)
        optimizer.step()
        offer(session, SIZES[(session.step_index + 1) % len(SIZES)])
        session.step()
        session.state_dict()
    session.close()
    return {"error": max(errors), "samples": samples, "num_sizes": len(sizes)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_script_may_fetch_one_batch_ahead_also_past_the_end_of_an_epoch(num_workers: int) -> None:
    for result in run_ranks(_look_ahead, 2, num_workers):
        assert result["error"] < 1e-12
        assert Counter(result["samples"]) == dict.fromkeys(range(601), 2)
        assert result["num_sizes"] > 1
