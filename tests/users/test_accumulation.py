"""Gradient accumulation: steps of micro-batches have the gradient of one big batch, or one sentence says why not."""

from collections import Counter
from typing import Any

import pytest
from tests.support.loops import OPTIONS, SIZES, gathered, gradient_of, loss_of, relative_error, whole_gradient
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, begin_job, make_model, offer
from torch.nn.parallel import DistributedDataParallel


def _accumulate(_rank: int, options: dict[str, Any], is_view: bool) -> dict[str, Any]:
    """Steps of several batches: the error of each step's gradient, its number of batches, and all samples."""
    data, parts = Numbered(601), options.get("gradient_accumulation_steps", 1)
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.001, gradient_as_bucket_view=is_view)
    session, model, optimizer = begin_job(data, model, rate=0.0, **OPTIONS, **options)
    is_sum = options.get("reduction") == "sum"
    plain_scale = 49 / 2 / parts if is_sum else 1.0  # of the first global batch under plain DDP
    errors, numbers, used, number = [], [], [], 0
    samples: list[int] = []
    for batch in session.loader:
        loss = loss_of(model, batch) * (session.num_samples if is_sum else 1)
        if session.num_samples == 0:
            loss = loss * float("nan")
        (loss / parts).backward()
        number += 1
        used += batch[2][: session.num_samples].tolist()
        if session.sync_gradients:
            everything = gathered(used)
            errors.append(relative_error(gradient_of(model), whole_gradient(data, everything) * plain_scale))
            numbers.append(number)
            samples += everything
            optimizer.step()
            optimizer.zero_grad()
            offer(session, SIZES[(session.step_index + 1) % len(SIZES)])
            used, number = [], 0
        session.step(loss)
    session.close()
    return {"error": max(errors), "numbers": numbers, "samples": samples}


@pytest.mark.parametrize(
    ("options", "is_view"),
    [
        ({"micro_batch_size": 7}, False),
        ({"micro_batch_size": 7}, True),
        ({"gradient_accumulation_steps": 3}, False),
        ({"gradient_accumulation_steps": 3, "reduction": "sum"}, False),
    ],
)
def test_a_step_of_several_batches_has_the_gradient_of_one_big_batch(options: dict[str, Any], is_view: bool) -> None:
    """With a number of batches per step each loss is divided by it, as in scripts."""
    results = run_ranks(_accumulate, 2, options, is_view)
    for result in results:
        assert result["error"] < 1e-12
        assert Counter(result["samples"]) == Counter(range(601))
    if "micro_batch_size" in options:
        assert results[0]["numbers"][0] == 2  # 9 samples in batches of at most 7
        assert results[1]["numbers"][0] == 6  # 40
        assert max(results[0]["numbers"]) == 8  # 50: ranks may take different numbers
    else:
        assert {number for result in results for number in result["numbers"]} == {3}


def _misuse_accumulation(_rank: int) -> None:
    data = Numbered(200)
    session, model, optimizer = begin_job(data, local_batch_size=20, micro_batch_size=8)
    batches = iter(session.loader)
    loss_of(model, next(batches)).backward()
    with pytest.raises(RuntimeError, match=r"not the step's last: call optimizer.step\(\) and .* only if session.sync"):
        optimizer.step()
    session.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"earlier micro-batches are gone: call optimizer.zero_grad\(\) only where"):
        next(batches)
    session.close()

    session, model, optimizer = begin_job(data, local_batch_size=20, micro_batch_size=8)
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
    with pytest.raises(ValueError, match=r"static_graph=True\) exclude each other.*leave static_graph out"):
        begin_job(Numbered(64), model, local_batch_size=20, micro_batch_size=8)


def _own_accumulation(_rank: int) -> None:
    session, model, _ = begin_job(Numbered(200))
    batches = iter(session.loader)
    with model.no_sync():
        loss_of(model, next(batches)).backward()
    said = "of a batch under no_sync .*: .* drop no_sync, .* either micro_batch_size, .* or gradient_accumulation_steps"
    with pytest.raises(RuntimeError, match=said):
        next(batches)
    session.close()


@pytest.mark.parametrize("script", [_misuse_accumulation, _static_graph, _own_accumulation])
def test_accumulating_wrong_is_refused_with_the_fix(script: Any) -> None:
    run_ranks(script, 2)
