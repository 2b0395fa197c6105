"""Whole small jobs on real gloo ranks: data, resume, equality of ranks, failures, misuse."""

import io
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import RankError, run_ranks
from tests.support.training import Numbered, distribute, flat_parameters, gather, make_model, offer
from torch import nn

from dynamix import trainer as dynamix
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.messages import Job, Message, Report
from dynamix.trainer import Session

NO_BROKER = BusSettings(url="nats://127.0.0.1:1")
"""A port on which nothing listens."""


def _attach(data: Numbered, model: nn.Module, *, rate: float = 0.05, **options: Any) -> tuple[Session, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    chosen: dict[str, Any] = {
        "local_batch_size": 8,
        "min_local_batch_size": 0,
        "policy": "static",
        "connect": False,
        "global_batch": "adaptive",
    } | options
    return dynamix.attach(model, optimizer, data, **chosen), optimizer


def _workers(num_workers: int) -> dict[str, Any]:
    """Loader options: one worker restarts with each epoch, several stay."""
    return {"num_workers": num_workers, "persistent_workers": num_workers > 1}


def _train_step(session: Session, model: nn.Module, optimizer: Any, batch: Any) -> list[int]:
    """One step; the indices of the samples that counted."""
    inputs, targets, indices = batch
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    used: list[int] = indices[: session.num_samples].tolist()
    session.step(loss)
    return used


# --- data ------------------------------------------------------------------------------------------------------


def _count_samples(_rank: int, num_workers: int) -> dict[str, Any]:
    data = Numbered(701, torch.float32)
    model = distribute(make_model(torch.float32))
    session, optimizer = _attach(data, model, window_steps=2, max_lag_windows=9, **_workers(num_workers))
    sizes = torch.Generator().manual_seed(num_workers)
    epochs, steps, changes = [], 0, set()
    for _ in session.epochs(2):
        used: list[int] = []
        for batch in session.loader:
            changes.add(session.local_batch_sizes)
            used += _train_step(session, model, optimizer, batch)
            steps += 1
            offer(session, torch.randint(0, 14, (2,), generator=sizes).add(1 if steps % 5 else 0).tolist())
        epochs.append(used)
    session.close()
    return {"epochs": epochs, "steps": steps, "changes": len(changes), "position": session.position}


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_each_sample_is_used_exactly_once_per_epoch_over_many_changes(num_workers: int) -> None:
    results = run_ranks(_count_samples, 2, num_workers)
    assert results[0]["changes"] > 26
    assert results[0]["steps"] == results[1]["steps"]
    assert [result["position"] for result in results] == [1402, 1402]
    for epoch in range(2):
        used = Counter(results[0]["epochs"][epoch] + results[1]["epochs"][epoch])
        assert used == Counter(range(701))
    assert results[0]["epochs"][0] != results[0]["epochs"][1]  # another order in each epoch


def _leave_early(_rank: int) -> dict[str, Any]:
    data = Numbered(400, torch.float32)
    model = distribute(make_model(torch.float32))
    session, optimizer = _attach(data, model, shuffle=False, **_workers(2))
    used, lengths = [], []
    for _ in range(2):
        lengths.append(len(session.loader))
        for number, batch in enumerate(session.loader):
            used += _train_step(session, model, optimizer, batch)
            if number == 4:
                break
    rest = [sample for batch in session.loader for sample in _train_step(session, model, optimizer, batch)]
    epoch_after_break = []
    for epoch in session.epochs(3):
        for batch in session.loader:
            _train_step(session, model, optimizer, batch)
            break
        epoch_after_break.append((epoch, session.position))
    session.close()
    return {"used": used + rest, "lengths": lengths, "epochs": epoch_after_break}


def test_a_loop_that_was_left_goes_on_where_it_was_and_a_new_epoch_begins_at_its_beginning() -> None:
    results = run_ranks(_leave_early, 2)
    assert sorted(results[0]["used"] + results[1]["used"]) == list(range(400))
    assert results[0]["lengths"] == [25, 20]
    assert results[0]["epochs"] == [(1, 416), (2, 432)]


def _normalise(_rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Two epochs at 2 x 32; of one sample, one rank has none."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model = nn.parallel.DistributedDataParallel(layers)
    data = Numbered(options.pop("num_samples"), torch.float32)
    session, optimizer = _attach(data, model, local_batch_size=32, **options)
    steps = []
    for epoch in session.epochs(2):
        for batch in session.loader:
            steps.append((epoch, session.num_samples, len(batch[1])))
            if session.num_samples == 1:
                model.eval()  # what the README says of a tail of one sample
            _train_step(session, model, optimizer, batch)
            model.train()
    session.close()
    return {"steps": steps, "position": session.position}


def test_a_rank_without_samples_can_normalise_its_dummy_batch() -> None:
    results = run_ranks(_normalise, 2, {"num_samples": 1})
    assert results[0]["steps"] == [(epoch, 1, 1) for epoch in (0, 1)]
    assert results[1]["steps"] == [(epoch, 0, 2) for epoch in (0, 1)]
    assert results[0]["position"] == 2


def test_the_last_two_steps_of_an_epoch_share_what_is_left() -> None:
    results = run_ranks(_normalise, 2, {"num_samples": 193})
    assert results[0]["steps"] == [(epoch, count, count) for epoch in (0, 1) for count in (32, 32, 17, 16)]
    assert results[1]["steps"] == [(epoch, count, count) for epoch in (0, 1) for count in (32, 32, 16, 16)]
    assert results[0]["position"] == 386


@pytest.mark.parametrize(
    "loader", [{"num_workers": 0, "prefetch_factor": None}, {"num_workers": 2, "prefetch_factor": None}]
)
def test_a_tail_that_is_left_out_is_left_out_on_all_ranks(loader: dict[str, Any]) -> None:
    results = run_ranks(_normalise, 2, {"num_samples": 193, "drop_last": True, **loader})
    assert results[0]["steps"] == results[1]["steps"] == [(epoch, 32, 32) for epoch in (0, 1) for _ in range(3)]
    assert results[0]["position"] == 384


# --- resume ----------------------------------------------------------------------------------------------------

CUT = 23


def _resume(rank: int, num_workers: int) -> dict[str, Any]:
    """One job straight through, and the same job in two halves; changes are decided before the cut, one comes after."""

    def begin() -> tuple[Session, nn.Module, Any]:
        model = distribute(make_model(torch.float32))
        session, optimizer = _attach(
            Numbered(601, torch.float32), model, window_steps=8, seed=4, **_workers(num_workers)
        )
        return session, model, optimizer

    def train(session: Session, model: nn.Module, optimizer: Any, *, until: int) -> list[list[int]]:
        used = []
        for _ in session.epochs(2):
            for batch in session.loader:
                used.append(_train_step(session, model, optimizer, batch))
                if session.generation == 0 and session.step_index < CUT:
                    offer(session, (5 + session.step_index, 12))
                if rank == 1 and session.step_index % 5 == 0:
                    session.state_dict()  # one rank alone, at any step, changes nothing
                if session.step_index == until:
                    return used
        return used

    session, model, optimizer = begin()
    straight = train(session, model, optimizer, until=10**9)
    whole = (flat_parameters(model), session.position, session.local_batch_sizes)

    session, model, optimizer = begin()
    first = train(session, model, optimizer, until=CUT)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), session.state_dict()], file)
    pending = session._run.schedule.newest.local_batch_sizes != session.local_batch_sizes
    session.close()

    file.seek(0)
    states = torch.load(file, weights_only=True)
    session, model, optimizer = begin()
    for part, state in zip((model, optimizer, session), states, strict=True):
        part.load_state_dict(state)
    jobs: list[Message] = []
    session._transport.publish = jobs.append  # type: ignore[method-assign]
    second = train(session, model, optimizer, until=10**9)
    return {
        "same_indices": first + second == straight,
        "same_parameters": torch.equal(flat_parameters(model), whole[0]),
        "same_place": (session.position, session.local_batch_sizes) == whole[1:],
        "pending": pending,
        "generation": session.generation,
        "jobs": jobs,
    }


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_is_the_same_run(num_workers: int) -> None:
    results = run_ranks(_resume, 2, num_workers, environ={"DYNAMIX_JOB": "resumed"})
    for result in results:
        assert result["same_indices"]
        assert result["same_parameters"]
        assert result["same_place"]
        assert result["pending"]  # a change that was adopted before the cut took effect after it
        assert result["generation"] == 1
    started = results[0]["jobs"][0]
    assert isinstance(started, Job)
    assert (started.job, started.generation, started.base_global_batch_size) == ("resumed", 1, 16)
    assert started.initial_local_batch_sizes != (8, 8)
    reports = [message for message in results[0]["jobs"] if isinstance(message, Report)]
    assert [report.window for report in reports] == list(range(len(reports)))
    assert reports[0].first_step == CUT


# --- all ranks alike -------------------------------------------------------------------------------------------


def _change_for_500_steps(_rank: int) -> dict[str, Any]:
    data = Numbered(2000, torch.float32)
    model = nn.parallel.DistributedDataParallel(make_model(torch.float32))
    session, optimizer = _attach(data, model, window_steps=5, seed=1)
    sizes = torch.Generator().manual_seed(0)
    seen: set[tuple[int, ...]] = set()
    noises = []
    while session.step_index < 500:
        for batch in session.loader:
            seen.add(session.local_batch_sizes)
            _train_step(session, model, optimizer, batch)
            offer(session, torch.randint(0, 24, (4,), generator=sizes).tolist())
            noises.append(session._run.noise.value)
            if session.step_index == 500:
                break
    parameters = gather(flat_parameters(model))
    rate = optimizer.param_groups[0]["lr"]
    session.close()
    return {
        "equal": all(torch.equal(parameters[0], other) for other in parameters),
        "finite": bool(parameters[0].isfinite().all()),
        "num_sizes": len(seen),
        "noise": noises[-1],
        "rate": rate,
    }


def test_all_ranks_hold_equal_parameters_after_500_steps_of_changes() -> None:
    results = run_ranks(_change_for_500_steps, 4)
    for result in results:
        assert result["equal"]
        assert result["finite"]
        assert result["num_sizes"] > 90
        assert result["rate"] == 0.05
        assert result["noise"] == results[0]["noise"]
    assert results[0]["noise"].trace > 0


def _parameters_with(_rank: int, connect: Any) -> dict[str, Any]:
    model = distribute(make_model(torch.float32))
    session, optimizer = _attach(Numbered(300, torch.float32), model, window_steps=3, connect=connect)
    for _ in session.epochs(1):
        for batch in session.loader:
            _train_step(session, model, optimizer, batch)
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


# --- failures --------------------------------------------------------------------------------------------------


def _run_out_of_memory(rank: int, caps: Path) -> dict[str, Any]:
    data = Numbered(600, torch.float32)

    def begin() -> tuple[Session, nn.Module, Any]:
        model = distribute(make_model(torch.float32))
        options: dict[str, Any] = {"local_batch_size": (20, 40), "min_local_batch_size": 4, "memory_caps_path": caps}
        session, optimizer = _attach(data, model, window_steps=2, **options)
        return session, model, optimizer

    session, model, optimizer = begin()
    error = torch.OutOfMemoryError("by hand") if rank == 1 else RuntimeError("the other rank is gone")

    def fail_at_step_3() -> None:
        with session:
            for batch in session.loader:
                if session.step_index == 3:
                    raise error
                _train_step(session, model, optimizer, batch)

    with pytest.raises(type(error), match=str(error)):
        fail_at_step_3()
    gather("both have failed")  # as a launcher would wait before it starts all of them again

    session, model, optimizer = begin()
    sizes = []
    for batch in session.loader:
        offer(session, (30, 33))
        _train_step(session, model, optimizer, batch)
        sizes.append(session.local_batch_sizes)
    offers = session._steering.adoption._offers
    session.close()
    return {
        "bounds": session._run.identity.max_local_batch_sizes,
        "sizes": set(sizes),
        "refused": None if offers is None else dict(offers.num_refused),
    }


def test_a_rank_out_of_memory_lowers_its_bound_for_the_next_start(tmp_path: Path) -> None:
    results = run_ranks(_run_out_of_memory, 2, tmp_path / "caps")
    for result in results:
        assert result["bounds"] == (1024, 32)
        assert result["sizes"] == {(20, 32)}
    assert results[0]["refused"]["bounds"] > 0


def _attach_differently(rank: int) -> None:
    _attach(Numbered(100), distribute(make_model()), local_batch_size=8 + rank)


def test_options_that_differ_between_ranks_end_all_of_them() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(_attach_differently, 2)
    assert str(error.value).count("rank 1 attached with other options than rank 0 ((9, 9) and not (8, 8)") == 2


# --- misuse ----------------------------------------------------------------------------------------------------


def _misuse(_rank: int) -> None:
    data = Numbered(64)
    model = distribute(make_model())
    session, optimizer = _attach(data, model, window_steps=1)
    with pytest.raises(RuntimeError, match="another session covers the model: end that one first"):
        _attach(data, model)
    with pytest.raises(RuntimeError, match="without a batch"):
        session.step()
    with pytest.raises(ValueError, match=r"session.evaluated\(accuracy\): 83 is no share: pass 0.83"):
        session.evaluated(83)
    for number in ("2", 2.5):
        with pytest.raises(TypeError, match=r"session.epochs\(num_epochs\)=.* pass a whole number"):
            next(session.epochs(number))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no current batch"):
        _ = session.num_samples
    batches = iter(session.loader)
    next(batches)
    assert session.scale_loss(loss := torch.ones(())) is loss  # the hook weighs: nothing to scale
    with pytest.raises(RuntimeError, match=r"step 0 is not finished.*save after session.step\(\)"):
        session.state_dict()
    with pytest.raises(RuntimeError, match="after the first step"):
        session.load_state_dict({})
    with pytest.raises(RuntimeError, match="step 0 is not finished"):
        next(batches)
    with pytest.raises(TypeError, match=r"session.step\(loss\): a tensor of shape \(8,\): pass one number"):
        session.step(torch.ones(8))
    session.close()
    with pytest.raises(RuntimeError, match="this session has ended"):
        next(iter(session.loader))
    with pytest.raises(RuntimeError, match="this session has ended"):
        session.step()

    plain = make_model()
    with pytest.raises(ValueError, match="needs a DistributedDataParallel model"):
        _attach(data, plain, weighting="hook")
    with pytest.raises(ValueError, match="base_hook is for"):
        _attach(data, plain, base_hook=lambda *_: None)
    with pytest.raises(TypeError, match=r"attach does not know samplers: did you mean sampler\?"):
        _attach(data, plain, samplers=3)
    with pytest.raises(TypeError, match="attach does not know qqq; for the loader it takes"):
        _attach(data, plain, qqq=3)
    with pytest.raises(TypeError, match=r"attach does not know windows_steps: did you mean window_steps\?"):
        _attach(data, plain, windows_steps=3)
    with pytest.raises(TypeError, match="look_ahead='1' is text"):
        _attach(data, plain, look_ahead="1")
    with pytest.raises(TypeError, match=r"connect='nats://127.0.0.1:4222' is of type str: leave connect out and set"):
        _attach(data, plain, connect="nats://127.0.0.1:4222")
    with pytest.raises(ValueError, match="name='My Job!': a job's name has 1 to 54 of the characters"):
        _attach(data, distribute(make_model()), name="My Job!")
    with pytest.raises(TypeError, match=r"Linear is no torch.optim.Optimizer, and wraps none: pass model, opt"):
        dynamix.attach(optimizer, nn.Linear(2, 2), data, local_batch_size=8)  # type: ignore[arg-type]
    session, optimizer = _attach(data, plain, weighting="loss", seed=5)
    state = session.state_dict()
    state["data"]["seed"] = 0
    with pytest.raises(ValueError, match=r"in another order \(seed 0, now 5\): attach alike"):
        session.load_state_dict(state)
    for batch in session.loader:
        with pytest.raises(RuntimeError, match="is not weighted"):
            _train_step(session, plain, optimizer, batch)
        break
    session.close()


def test_misuse_is_told_what_to_do() -> None:
    run_ranks(_misuse, 1)


def test_attaching_without_a_process_group_is_refused_where_a_launcher_announced_several_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = make_model()
    with pytest.raises(RuntimeError, match="is not initialised: call"):
        _attach(Numbered(10), model)


# --- the network -----------------------------------------------------------------------------------------------


def _count_traffic(_rank: int) -> list[Report]:
    data = Numbered(800, torch.float32)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 4096), nn.ReLU(), nn.Linear(4096, 4)), bucket_cap_mb=25
    )
    session, optimizer = _attach(data, model, window_steps=10)
    reports: list[Message] = []
    session._transport.publish = reports.append  # type: ignore[method-assign]
    for _ in session.epochs(1):
        for batch in session.loader:
            _train_step(session, model, optimizer, batch)
    session.close()
    return [report for report in reports if isinstance(report, Report)]


def test_the_traffic_of_a_window_is_its_gradients() -> None:
    """Two ranks send every gradient once: half of it reduced, half of it gathered."""
    reports, others = run_ranks(_count_traffic, 2, store="tcp")
    assert len(reports) == 5
    assert others == []  # one node: its first rank reports for both
    gradient_bytes = 4 * (6 * 4096 + 4096 + 4096 * 4 + 4)
    for report in reports:
        for row in report.rows:
            assert row.sockets is not None
            assert row.sockets_before is not None
            sent = row.sockets.tx_bytes - row.sockets_before.tx_bytes
            assert 0.9 < sent / (10 * gradient_bytes) < 1.1
            assert row.sockets.srtt_us is not None
            assert row.sockets.retransmits >= 0
