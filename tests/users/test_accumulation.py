"""Gradient accumulation: steps of micro-batches have the gradient of one big batch, or one sentence says why not."""

from collections import Counter
from typing import Any

import pytest
import torch
from tests.support.loops import OPTIONS, SIZES, gathered, gradient_of, loss_of, relative_error, whole_gradient
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, distribute, make_model, offer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamix import trainer as dynamix


def _accumulate(rank: int, wrap: str) -> dict[str, Any]:
    """Steps of micro-batches of at most 7 samples: the error of each step's gradient, and micro-batches per step."""
    data = Numbered(601)
    model = make_model()
    if wrap == "view":
        covered: nn.Module = DistributedDataParallel(model, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    else:
        covered = distribute(model)
    optimizer = torch.optim.SGD(covered.parameters(), lr=0.0)
    session = dynamix.attach(covered, optimizer, data, micro_batch_size=7, global_batch="adaptive", **OPTIONS)
    errors, numbers, used, number = [], [], [], 0
    samples: list[int] = []
    for batch in session.loader:
        loss = loss_of(covered, batch)
        if session.num_samples == 0:
            loss = loss * float("nan")
        loss.backward()
        number += 1
        used += batch[2][: session.num_samples].tolist()
        assert len(batch[1]) <= 7
        if session.sync_gradients:
            everything = gathered(used)
            errors.append(relative_error(gradient_of(covered), whole_gradient(data, everything)))
            numbers.append(number)
            samples += everything
            optimizer.step()
            optimizer.zero_grad()
            offer(session, SIZES[(session.step_index + 1) % len(SIZES)])
            used, number = [], 0
        session.step(loss)
    session.close()
    return {"error": max(errors), "numbers": numbers, "samples": samples, "rank": rank}


@pytest.mark.parametrize("wrap", ["copy", "view"])
def test_a_step_of_micro_batches_has_the_gradient_of_one_big_batch(wrap: str) -> None:
    results = run_ranks(_accumulate, 2, wrap)
    assert all(result["error"] < 1e-12 for result in results)
    assert Counter(results[0]["samples"]) == Counter(range(601))
    assert results[0]["numbers"][0] == 2  # 9 samples in batches of at most 7
    assert results[1]["numbers"][0] == 6  # 40
    assert max(results[0]["numbers"]) == 8  # 50: ranks may take different numbers


def _accumulate_divided(_rank: int, reduction: str) -> dict[str, Any]:
    """Three batches per step, each loss divided by three: the errors of each step's gradient, and batches drawn."""
    data = Numbered(601)
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: Any = {"global_batch": "adaptive", "reduction": reduction}
    session = dynamix.attach(model, optimizer, data, gradient_accumulation_steps=3, **options, **OPTIONS)
    errors, used, samples = [], [], []
    for number, batch in enumerate(session.loader, 1):
        loss = loss_of(model, batch) * (session.num_samples if reduction == "sum" else 1)
        if session.num_samples == 0:
            loss = loss * float("nan")
        (loss / 3).backward()
        used += batch[2][: session.num_samples].tolist()
        assert session.sync_gradients == (number % 3 == 0)
        if session.sync_gradients:
            everything = gathered(used)
            plain_scale = 49 / 2 / 3 if reduction == "sum" else 1.0  # of the first global batch under plain DDP
            errors.append(relative_error(gradient_of(model), whole_gradient(data, everything) * plain_scale))
            samples += everything
            optimizer.step()
            optimizer.zero_grad()
            offer(session, SIZES[(session.step_index + 1) % len(SIZES)])
            used = []
        session.step(loss)
    session.close()
    return {"error": max(errors), "samples": sorted(samples)}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_divided_by_the_number_of_batches_give_the_gradient_of_one_big_batch(reduction: str) -> None:
    for result in run_ranks(_accumulate_divided, 2, reduction):
        assert result["error"] < 1e-12
        assert result["samples"] == list(range(601))


def _misuse_accumulation(_rank: int) -> None:
    data = Numbered(200)
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = dynamix.attach(model, optimizer, data, local_batch_size=20, micro_batch_size=8, connect=False)
    batches = iter(session.loader)
    loss_of(model, next(batches)).backward()
    with pytest.raises(RuntimeError, match=r"not the step's last: call optimizer.step\(\) and .* only if session.sync"):
        optimizer.step()
    session.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"earlier micro-batches are gone: call optimizer.zero_grad\(\) only where"):
        next(batches)
    session.close()

    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = dynamix.attach(model, optimizer, data, local_batch_size=20, micro_batch_size=8, connect=False)
    for batch in session.loader:
        loss = loss_of(model, batch)
        optimizer.zero_grad()  # between forward and backward, where only the update can see it
        loss.backward()
        if session.sync_gradients:
            with pytest.raises(RuntimeError, match="earlier micro-batches are gone"):
                optimizer.step()
            break
        session.step(loss)
    session.close()


def _static_graph(_rank: int) -> None:
    model = DistributedDataParallel(make_model(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"static_graph=True\) exclude each other.*leave static_graph out"):
        dynamix.attach(model, optimizer, Numbered(64), local_batch_size=20, micro_batch_size=8, connect=False)


def _own_accumulation(_rank: int) -> None:
    data = Numbered(200)
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = dynamix.attach(model, optimizer, data, local_batch_size=8, connect=False)
    batches = iter(session.loader)
    with model.no_sync():
        loss_of(model, next(batches)).backward()
    said = (
        "after a batch under no_sync .*: .* drop no_sync, .* either micro_batch_size, .* or gradient_accumulation_steps"
    )
    with pytest.raises(RuntimeError, match=said):
        session.step()
    session.close()


@pytest.mark.parametrize("script", [_misuse_accumulation, _static_graph, _own_accumulation])
def test_accumulating_wrong_is_refused_with_the_fix(script: Any) -> None:
    run_ranks(script, 2)
