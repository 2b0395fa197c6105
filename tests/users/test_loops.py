"""Training loops that people really have: what they train is right, or one sentence says why not."""

import copy
import io
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, distribute, flat_parameters, gather, make_model, offer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from dynamix import trainer as dynamix
from dynamix.trainer import Session

OPTIONS: dict[str, Any] = {"local_batch_size": (9, 40), "min_local_batch_size": 0, "window_steps": 1, "connect": False}
"""Two unequal ranks, a window per step, no bus."""

SIZES = [(9, 40), (50, 3), (0, 20), (17, 17)]


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def _whole_gradient(data: Numbered, used: list[int], seed: int = 0) -> torch.Tensor:
    """The gradient of one big batch, on one process."""
    model = make_model(seed=seed)
    nn.functional.cross_entropy(model(data.inputs[used]), data.targets[used]).backward()
    return _gradient(model)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _used_by_all(indices: list[int]) -> list[int]:
    return [index for each in gather(indices) for index in each]


# --- gradient accumulation -------------------------------------------------------------------------------------


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
        loss = _loss(covered, batch)
        if session.num_samples == 0:
            loss = loss * float("nan")
        loss.backward()
        number += 1
        used += batch[2][: session.num_samples].tolist()
        assert len(batch[1]) <= 7
        if session.sync_gradients:
            everything = _used_by_all(used)
            errors.append(_error(_gradient(covered), _whole_gradient(data, everything)))
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
        loss = _loss(model, batch) * (session.num_samples if reduction == "sum" else 1)
        if session.num_samples == 0:
            loss = loss * float("nan")
        (loss / 3).backward()
        used += batch[2][: session.num_samples].tolist()
        assert session.sync_gradients == (number % 3 == 0)
        if session.sync_gradients:
            everything = _used_by_all(used)
            errors.append(_error(_gradient(model), _whole_gradient(data, everything)))
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
    _loss(model, next(batches)).backward()
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
        loss = _loss(model, batch)
        optimizer.zero_grad()  # between forward and backward, where only the update can see it
        loss.backward()
        if session.sync_gradients:
            with pytest.raises(RuntimeError, match="earlier micro-batches are gone"):
                optimizer.step()
            break
        session.step(loss)
    session.close()


def test_accumulating_wrong_is_refused_with_the_fix() -> None:
    run_ranks(_misuse_accumulation, 2)


# --- several models --------------------------------------------------------------------------------------------


def _two_models(_rank: int, how: str) -> dict[str, Any]:
    data = Numbered(300)
    first, second = distribute(make_model(seed=0)), distribute(make_model(seed=1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in (first, second)]
    if how == "lists":
        session = dynamix.attach([first, second], optimizers, data, global_batch="adaptive", **OPTIONS)
    else:
        session = dynamix.attach(first, optimizers[0], data, global_batch="adaptive", **OPTIONS)
        session.cover(second, optimizers[1])
    errors = []
    for batch in session.loader:
        used = _used_by_all(batch[2][: session.num_samples].tolist())
        for model, optimizer, seed in ((first, optimizers[0], 0), (second, optimizers[1], 1)):
            optimizer.zero_grad()
            loss = _loss(model, batch)
            loss.backward()
            errors.append(_error(_gradient(model), _whole_gradient(data, used, seed)))
            optimizer.step()
        offer(session, SIZES[(session.step_index + 1) % len(SIZES)])
        session.step(loss)
    times = session.times
    session.close()
    return {"error": max(errors), "positive": times is not None and times.compute_s > 0}


@pytest.mark.parametrize("how", ["lists", "cover"])
def test_two_models_both_get_the_gradient_of_one_big_batch(how: str) -> None:
    for result in run_ranks(_two_models, 2, how):
        assert result["error"] < 1e-12
        assert result["positive"]


def _scaled_rates(_rank: int) -> list[float]:
    """Learning rates that both optimizers step with, at half the base batch."""
    rates: list[float] = []
    models = [distribute(make_model(seed=seed)) for seed in (0, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    session = dynamix.attach(
        models, optimizers, Numbered(64), local_batch_size=8, base_global_batch_size=64, global_batch="adaptive",
        learning_rate_rule="linear", connect=False,
    )  # fmt: skip
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    for batch in session.loader:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            _loss(model, batch).backward()
            optimizer.step()
        session.step()
        break
    session.close()
    return [*rates, *(optimizer.param_groups[0]["lr"] for optimizer in optimizers)]


def test_the_learning_rates_of_all_optimizers_follow_the_batch() -> None:
    assert run_ranks(_scaled_rates, 2)[0] == [0.025, 0.025, 0.1, 0.1]


def _uncovered(_rank: int, made: str) -> None:
    data = Numbered(64)
    before = distribute(make_model(seed=1)) if made == "before" else None
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = dynamix.attach(model, optimizer, data, local_batch_size=8, connect=False)
    second = before or distribute(make_model(seed=1))
    for batch in session.loader:
        with torch.no_grad():
            second(batch[0])  # a teacher is not trained
        second.eval()
        second(batch[0])
        second.train()
        with pytest.raises(RuntimeError, match=r"second DistributedDataParallel.*session.cover\(model, optimizer\)"):
            second(batch[0])
        session.ignore(second)
        second(batch[0])
        break
    session.close()
    second(data.inputs[:2])  # the session has ended


@pytest.mark.parametrize("made", ["before", "after"])
def test_training_a_second_model_that_is_not_covered_is_refused(made: str) -> None:
    run_ranks(_uncovered, 2, made)


# --- wrappers, and worlds --------------------------------------------------------------------------------------


def _compiled(_rank: int) -> float:
    data = Numbered(200)
    model = torch.compile(DistributedDataParallel(make_model()), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = dynamix.attach(model, optimizer, data, global_batch="adaptive", **OPTIONS)
    errors = []
    for batch in session.loader:
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        used = _used_by_all(batch[2][: session.num_samples].tolist())
        errors.append(_error(_gradient(model), _whole_gradient(data, used)))
        optimizer.step()
        session.step(loss)
    session.close()
    return max(errors)


def test_a_compiled_model_is_weighed() -> None:
    assert max(run_ranks(_compiled, 2)) < 1e-12


def _forgotten(_rank: int) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"nothing averages .* Sequential over 2 ranks: .*\(model\), or, .*scale_loss"):
        dynamix.attach(model, optimizer, Numbered(64), local_batch_size=8, connect=False)


def test_a_model_without_averaging_is_refused_with_both_ways_out() -> None:
    run_ranks(_forgotten, 2)


def test_a_single_process_needs_no_process_group() -> None:
    data, model = Numbered(100), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    used: list[int] = []
    with dynamix.attach(model, optimizer, data, local_batch_size=16, connect=False) as session:
        for _ in session.epochs(1):
            for batch in session.loader:
                optimizer.zero_grad()
                loss = _loss(model, batch)
                loss.backward()
                optimizer.step()
                used += batch[2].tolist()
                session.step(loss)
        assert (session.progress, session.num_reference_steps) == (7.0, 7)
    assert sorted(used) == list(range(100))


def test_a_single_process_accumulates_as_several_do() -> None:
    data, model = Numbered(100), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    used: list[int] = []
    with dynamix.attach(
        model, optimizer, data, local_batch_size=32, micro_batch_size=10, connect=False, num_workers=0
    ) as session:
        for batch in session.loader:
            loss = _loss(model, batch)
            loss.backward()
            used += batch[2].tolist()
            if session.sync_gradients:
                assert _error(_gradient(model), _whole_gradient(data, used)) < 1e-12
                optimizer.step()
                optimizer.zero_grad()
                used = []
            session.step(loss)
    assert session.step_index == 4


def _copies(_rank: int) -> None:
    """A covered model and one beside it can be copied and pickled, and the copies train by themselves."""
    data = Numbered(64)
    model, other = distribute(make_model()), distribute(make_model(seed=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = dynamix.attach(model, optimizer, data, local_batch_size=8, connect=False)
    for each in (model, other):
        copied = copy.deepcopy(each)
        torch.save(each, io.BytesIO())
        torch.optim.swa_utils.AveragedModel(each)
        copied.module(data.inputs[:2]).sum().backward()
    session.close()


def test_a_covered_model_can_be_copied_and_saved_whole() -> None:
    run_ranks(_copies, 2)


def _left_before_step(_rank: int) -> None:
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = dynamix.attach(model, optimizer, Numbered(64), local_batch_size=8, connect=False)
    for batch in session.loader:
        _loss(model, batch).backward()
        optimizer.step()
        break
    with pytest.raises(RuntimeError, match=r"would repeat that batch: call session.step\(\) before break"):
        next(iter(session.loader))
    session.close()


def test_leaving_a_loop_between_update_and_step_is_refused() -> None:
    run_ranks(_left_before_step, 2)


def _train_after_close(_rank: int) -> float:
    """The error of the gradient that a model has once its session is closed, against the plain average."""
    data = Numbered(200)
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = dynamix.attach(model, optimizer, data, **OPTIONS)
    for batch in session.loader:
        optimizer.zero_grad()
        _loss(model, batch).backward()
        optimizer.step()
        session.step()
        break
    session.close()
    mine = list(range(10)) if torch.distributed.get_rank() == 0 else list(range(50, 60))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(data.inputs[mine]), data.targets[mine]).backward()
    return _error(_gradient(model), _whole_gradient(data, [*range(10), *range(50, 60)]))


def test_after_the_session_a_model_trains_as_under_plain_ddp() -> None:
    assert max(run_ranks(_train_after_close, 2)) < 1e-12


def _own_batches(rank: int) -> list[float]:
    """Errors of gradients on batches of the script's own, before the first step and between two; then of a step."""
    data = Numbered(200)
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = dynamix.attach(model, optimizer, data, global_batch="adaptive", **OPTIONS)
    mine, both = list(range(10 * rank, 10 * rank + 10)), list(range(20))

    def error_of_own() -> float:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.inputs[mine]), data.targets[mine]).backward()
        return _error(_gradient(model), _whole_gradient(data, both))

    errors = [error_of_own()]
    for batch in session.loader:
        optimizer.zero_grad()
        _loss(model, batch).backward()
        used = _used_by_all(batch[2][: session.num_samples].tolist())
        errors.append(_error(_gradient(model), _whole_gradient(data, used)))
        optimizer.step()
        session.step()
        errors.append(error_of_own())
    session.close()
    return errors


def test_batches_of_the_scripts_own_are_averaged_as_under_plain_ddp() -> None:
    for errors in run_ranks(_own_batches, 2):
        assert max(errors) < 1e-12


def _two_phases(_rank: int) -> list[float]:
    """Errors of the gradients of two sessions over one model, one after the other."""
    data, model = Numbered(200), distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    errors = []
    for _ in range(2):
        session = dynamix.attach(model, optimizer, data, global_batch="adaptive", **OPTIONS)
        with pytest.raises(RuntimeError, match=r"another session covers the model: end that one first, session.close"):
            dynamix.attach(model, optimizer, data, **OPTIONS)
        for batch in session.loader:
            optimizer.zero_grad()
            _loss(model, batch).backward()
            used = _used_by_all(batch[2][: session.num_samples].tolist())
            errors.append(_error(_gradient(model), _whole_gradient(data, used)))
            optimizer.step()
            session.step()
        session.close()
    return errors


def test_a_model_can_be_attached_again_once_its_session_is_closed() -> None:
    for errors in run_ranks(_two_phases, 2):
        assert max(errors) < 1e-12
        assert len(errors) > 8


def _lengths(_rank: int, options: dict[str, Any]) -> tuple[list[int], int]:
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = dynamix.attach(model, optimizer, Numbered(330), local_batch_size=16, connect=False, **options)
    lengths = [len(session.loader)]
    for batch in session.loader:
        _loss(model, batch).backward()
        if session.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
        session.step()
        lengths.append(len(session.loader))
    session.close()
    return lengths, len(lengths) - 1


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 5}])
def test_the_length_of_the_loader_stays_while_an_epoch_is_trained(options: dict[str, Any]) -> None:
    for lengths, number in run_ranks(_lengths, 2, {"policy": "static", **options}):
        assert set(lengths[:-1]) == {number}


# --- looking ahead ---------------------------------------------------------------------------------------------


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
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = dynamix.attach(
        model, optimizer, data, look_ahead=1, global_batch="adaptive", num_workers=num_workers,
        max_lag_windows=9, **OPTIONS,
    )  # fmt: skip
    errors, samples, sizes = [], [], set()
    for batch in _ahead(session.loader):
        used = _used_by_all(batch[2][: session.num_samples].tolist())
        optimizer.zero_grad()
        _loss(model, batch).backward()
        errors.append(_error(_gradient(model), _whole_gradient(data, used)))
        samples += used
        sizes.add(session.local_batch_sizes)
        optimizer.step()
        offer(session, SIZES[(session.step_index + 1) % len(SIZES)])
        session.step()
        session.state_dict()
    session.close()
    return {"error": max(errors), "samples": samples, "num_sizes": len(sizes)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_script_may_fetch_one_batch_ahead(num_workers: int) -> None:
    for result in run_ranks(_look_ahead, 2, num_workers):
        assert result["error"] < 1e-12
        assert sorted(result["samples"]) == list(range(601))
        assert result["num_sizes"] > 1


# --- order of calls --------------------------------------------------------------------------------------------


def _wrong_order(_rank: int) -> None:
    data = Numbered(200)
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = dynamix.attach(model, optimizer, data, local_batch_size=8, connect=False)
    for batch in session.loader:
        loss = _loss(model, batch)
        loss.backward()
        session.step(loss)
        with pytest.raises(RuntimeError, match=r"session.step\(\) was called before optimizer.step\(\): call it after"):
            optimizer.step()
        break
    session.close()


def test_ending_a_step_before_the_update_is_refused() -> None:
    run_ranks(_wrong_order, 2)


def _own_accumulation(_rank: int) -> None:
    data = Numbered(200)
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = dynamix.attach(model, optimizer, data, local_batch_size=8, connect=False)
    batches = iter(session.loader)
    with model.no_sync():
        _loss(model, next(batches)).backward()
    with pytest.raises(
        RuntimeError, match=r"after a batch under no_sync.*pass micro_batch_size to attach, drop no_sync"
    ):
        session.step()
    session.close()


def test_a_scripts_own_accumulation_under_no_sync_is_refused() -> None:
    run_ranks(_own_accumulation, 2)


def _skipped(_rank: int) -> int:
    """Batches that a script skips on all ranks, as an AMP scaler skips updates, are fine."""
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = dynamix.attach(model, optimizer, Numbered(200), local_batch_size=8, connect=False)
    for number, batch in enumerate(session.loader):
        optimizer.zero_grad()
        if number % 3 != 1:
            _loss(model, batch).backward()
        if number % 3 == 0:
            optimizer.step()
        session.step()
    session.close()
    return session.step_index


def test_batches_and_updates_may_be_skipped() -> None:
    assert run_ranks(_skipped, 2) == [13, 13]


# --- schedules and stops ---------------------------------------------------------------------------------------


def _plain_against_fixed(rank: int) -> dict[str, Any]:
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
            _loss(model, batch).backward()
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
        for step in train(session.loader, model, optimizer, scheduler, lambda: slow(session, rank))
    ]
    found["sizes"] = session.local_batch_sizes
    found["progress"] = session.progress
    session.close()
    return found


def slow(session: Session, rank: int) -> None:
    """End a step in which rank 1 seemed to take three times as long per sample as rank 0."""
    session._models.take_times = lambda: [1e-3, 3e-3]  # type: ignore[method-assign]
    session.step()
    assert rank in (0, 1)


def test_with_five_lines_only_the_split_follows_the_speeds() -> None:
    """Same samples in each step, same steps in each epoch, same schedule as plain DDP; unequal sizes."""
    for result in run_ranks(_plain_against_fixed, 2):
        assert result["attached"] == result["plain"]
        assert result["sizes"] == (24, 8)
        assert result["progress"] == 2 * 11


def _adaptive_schedule(_rank: int) -> dict[str, Any]:
    """Batches of half and of twice the base: how far a scheduler that the session drives is after two epochs."""
    data = Numbered(640)
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = dynamix.attach(
        model, optimizer, data, local_batch_size=16, min_local_batch_size=1, window_steps=1, global_batch="adaptive",
        connect=False, policy="static",
    )  # fmt: skip
    total = 2 * session.num_reference_steps
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total)
    session.schedule(scheduler)
    steps, worst = 0, 0.0
    for epoch in session.epochs(2):
        for batch in session.loader:
            optimizer.zero_grad()
            _loss(model, batch).backward()
            optimizer.step()
            offer(session, (8, 8) if epoch == 0 else (32, 32))
            session.step()
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


def _step_schedule(_rank: int, global_batch: str) -> list[str]:
    """What is logged of a scheduler that the script steps once per step."""
    import logging  # noqa: PLC0415 - in the rank's process

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dynamix.trainer").addHandler(handler)
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
    options: Any = {"global_batch": global_batch}
    session = dynamix.attach(model, optimizer, Numbered(400), local_batch_size=16, connect=False, **options)
    for batch in session.loader:
        optimizer.zero_grad()
        _loss(model, batch).backward()
        optimizer.step()
        scheduler.step()
        session.step()
    session.close()
    return [text for text in said if "session.schedule" in text]


@pytest.mark.parametrize(("global_batch", "warnings"), [("adaptive", 1), ("fixed", 0)])
def test_a_schedule_by_steps_is_warned_about_once_where_steps_change(global_batch: str, warnings: int) -> None:
    first, second = run_ranks(_step_schedule, 2, global_batch)
    assert (len(first), len(second)) == (warnings, 0)


def _stop_by_count(_rank: int) -> tuple[int, float]:
    data = Numbered(320)
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = dynamix.attach(
        model, optimizer, data, local_batch_size=16, min_local_batch_size=1, window_steps=1, global_batch="adaptive",
        connect=False, policy="static",
    )  # fmt: skip
    while session.progress < 25:
        for batch in session.loader:
            optimizer.zero_grad()
            _loss(model, batch).backward()
            optimizer.step()
            offer(session, (8, 8))
            session.step()
            if session.progress >= 25:
                break
    session.close()
    return session.position, session.progress


def test_a_loop_that_stops_by_progress_sees_the_samples_of_the_plain_one() -> None:
    for position, progress in run_ranks(_stop_by_count, 2):
        assert position == 25 * 32
        assert progress == 25.0


# --- counting and looking --------------------------------------------------------------------------------------


def _count(_rank: int, micro_batch_size: int | None) -> tuple[int, int, list[dict[str, Any]]]:
    """A script's own count of samples, behind `session.step`, and all that it saw."""
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**OPTIONS, "window_steps": 5}
    session = dynamix.attach(
        model, optimizer, Numbered(600), micro_batch_size=micro_batch_size, global_batch="adaptive", **options
    )
    counted, seen = 0, 0
    for _ in session.epochs(1):
        for batch in session.loader:
            loss = _loss(model, batch)
            loss.backward()
            seen += session.num_samples
            if session.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
                offer(session, SIZES[session.step_index % len(SIZES)])
            session.step(loss)
            counted += session.num_samples
    session.close()
    return counted, seen, session.metrics()


@pytest.mark.parametrize("micro_batch_size", [None, 7])
def test_samples_can_be_counted_after_the_step(micro_batch_size: int | None) -> None:
    results = run_ranks(_count, 2, micro_batch_size)
    assert all(counted == seen for counted, seen, _ in results)
    assert sum(counted for counted, _, _ in results) == 600


def test_a_notebook_has_the_windows_as_plain_rows() -> None:
    for _, _, rows in run_ranks(_count, 2, None):
        assert [row["step"] for row in rows] == [5 * (window + 1) for window in range(len(rows))]
        assert len(rows) > 1
        assert all(type(value) in (int, float, str) for row in rows for value in row.values())
        assert {"loss", "samples_per_s", "noise_scale", "local_batch_size/rank_1", "compute_time_s/mean"} <= rows[
            0
        ].keys()
        assert rows[-1]["samples_seen"] <= 600


# --- another number of ranks ------------------------------------------------------------------------------------


def _start(optimizer_class: Callable[..., torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer, Session]:
    model = make_model()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    return model, optimizer, dynamix.attach(model, optimizer, Numbered(64), local_batch_size=8, connect=False)


def _two_steps(model: nn.Module, optimizer: torch.optim.Optimizer, session: Session) -> None:
    for batch in session.loader:
        optimizer.zero_grad()
        _loss(model, batch).backward()
        optimizer.step()
        session.step()
        if session.step_index % 2 == 0:
            break


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.Adagrad])
@pytest.mark.parametrize("loads_session", [False, True])
def test_a_snapshot_without_the_sessions_state_is_warned_about(
    optimizer_class: Callable[..., torch.optim.Optimizer], loads_session: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = _start(optimizer_class)
    _two_steps(*first)
    model_state, optimizer_state, session_state = (each.state_dict() for each in first)
    model, optimizer, session = _start(optimizer_class)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    if loads_session:
        session.load_state_dict(session_state)
    _two_steps(model, optimizer, session)
    assert session.step_index == (4 if loads_session else 2)
    if loads_session:
        assert caplog.messages == []
    else:
        said = "the optimizer has made steps already, but this session begins at epoch 0 with sample 0"
        assert [message.startswith(said) for message in caplog.messages] == [True]
        assert "call session.load_state_dict(...) on all ranks" in caplog.text


def test_a_second_session_of_a_process_is_no_resume(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, session = _start(torch.optim.Adam)
    _two_steps(model, optimizer, session)
    session.close()
    again = dynamix.attach(model, optimizer, Numbered(64), local_batch_size=8, connect=False)
    _two_steps(model, optimizer, again)
    assert again.step_index == 2
    assert caplog.messages == []


def test_a_restart_at_the_first_sample_is_warned_about(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot of the model alone leaves no trace in the optimizer, but torchrun says that it started again."""
    for name, value in (("RUN_ID", "r"), ("RESTART_COUNT", "1"), ("MAX_RESTARTS", "3")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    _two_steps(*_start(torch.optim.SGD))
    assert [message.startswith("start 1 of job training-") for message in caplog.messages] == [True]


def _save(_rank: int) -> tuple[dict[str, Any], torch.Tensor]:
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = dynamix.attach(model, optimizer, Numbered(300), local_batch_size=20, connect=False)
    for number, batch in enumerate(session.loader):
        optimizer.zero_grad()
        _loss(model, batch).backward()
        optimizer.step()
        session.step()
        if number == 2:
            break
    state = session.state_dict()
    session.close()
    return state, flat_parameters(model)


def _resume_smaller(_rank: int, state: dict[str, Any]) -> dict[str, Any]:
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = dynamix.attach(model, optimizer, Numbered(300), local_batch_size=20, connect=False)
    session.load_state_dict(state)
    used: list[int] = []
    first: tuple[int, ...] = ()
    for batch in session.loader:
        first = first or session.local_batch_sizes
        used += batch[2][: session.num_samples].tolist()
        optimizer.zero_grad()
        _loss(model, batch).backward()
        optimizer.step()
        session.step()
    again = session.state_dict()
    session.close()
    return {"used": used, "first": first, "steps": session.num_reference_steps, "state": again}


def test_a_job_that_loses_a_rank_keeps_its_global_batch_and_its_place_in_the_data() -> None:
    state, _ = run_ranks(_save, 3)[0]
    results = run_ranks(_resume_smaller, 2, state)
    assert all(result["first"] == (30, 30) for result in results)
    assert len(results[0]["used"]) + len(results[1]["used"]) == 300 - 3 * 60
    assert len(set(results[0]["used"]) | set(results[1]["used"])) == 120
    assert results[0]["steps"] == 5  # counted in the batch that the script was written for
    assert all(sum(result["first"]) == 60 for result in run_ranks(_resume_smaller, 2, results[0]["state"]))


# --- out of memory ------------------------------------------------------------------------------------------------


def _out_of_memory(rank: int, place: str, reduction: str) -> dict[str, Any]:
    """Rank 1 cannot compute more than 12 samples at once, in the forward or at the end of the backward pass."""
    data = Numbered(600)
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = dynamix.attach(
        model, optimizer, data, global_batch="adaptive", reduction=reduction, noise_every=1,  # type: ignore[arg-type]
        **OPTIONS | {"local_batch_size": (9, 9)},
    )  # fmt: skip
    largest, errors, losses = [], [], []

    class Limited(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, value: torch.Tensor, rows: int) -> torch.Tensor:
            _context.rows = rows
            return value.clone()

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> Any:
            if place == "backward" and rank == 1 and context.rows > 12:
                raise torch.OutOfMemoryError("in the backward pass")
            return gradients[0], None

    def compute(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if place == "forward" and rank == 1 and len(inputs) > 12:
            raise torch.OutOfMemoryError("in the forward pass")
        largest.append(len(inputs))
        hidden = model(Limited.apply(inputs.clone().requires_grad_(), len(inputs)))
        return nn.functional.cross_entropy(hidden, targets, reduction=reduction)

    sizes = [(9, 9), (9, 9), (9, 40), (20, 50), (9, 9), (40, 33)]
    for batch in session.loader:
        used = _used_by_all(batch[2][: session.num_samples].tolist())
        optimizer.zero_grad()
        loss = session.backward(compute, batch[0], batch[1])
        whole = make_model()
        expected = nn.functional.cross_entropy(whole(data.inputs[used]), data.targets[used])
        expected.backward()
        errors.append(_error(_gradient(model), _gradient(whole)))
        plain = nn.functional.cross_entropy(make_model()(batch[0]), batch[1], reduction=reduction)
        losses.append(abs(float(loss - plain)))
        optimizer.step()
        offer(session, sizes[(session.step_index + 1) % len(sizes)])
        session.step(loss)
    session.close()
    return {
        "largest": max(largest),
        "error": max(errors),
        "loss": max(losses),
        "numbers": len(largest),
        "steps": len(errors),
    }


@pytest.mark.parametrize(("place", "reduction"), [("forward", "mean"), ("backward", "sum")])
def test_a_rank_out_of_memory_computes_its_batch_in_parts(place: str, reduction: str) -> None:
    results = run_ranks(_out_of_memory, 2, place, reduction)
    for result in results:
        assert result["error"] < 1e-12
        assert result["loss"] < 1e-12
    if place == "forward":
        assert results[1]["largest"] <= 12 < results[0]["largest"]
    assert results[1]["numbers"] > results[1]["steps"]
    assert results[0]["numbers"] == results[0]["steps"]
