"""Training loops, gradient accumulation and learning-rate schedules of people: right, or refused in one sentence."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from tests.support.loops import OPTIONS, SIZES, gathered, gradient_of, loss_of, relative_error, whole_gradient
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, begin_job, make_model, offer, train_step
from torch.nn.parallel import DistributedDataParallel

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


# --- gradient accumulation ---


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


# --- learning-rate schedules, and loops that stop by a count ---


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
