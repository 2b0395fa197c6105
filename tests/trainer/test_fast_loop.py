"""The fast loop on a schedule, on the clock, and in whole small jobs on real gloo ranks."""

import time
from collections import Counter
from collections.abc import Callable
from itertools import chain
from random import Random
from typing import Any

import pytest
import torch
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, distribute, flat_parameters, gather, make_model, offer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from dynamix import trainer as dynamix
from dynamix.schemas.messages import Applied, Job, Message, Report
from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer import Session
from dynamix.trainer.data.schedule import Schedule
from dynamix.trainer.gradient.time_slots import TimeSlots
from dynamix.trainer.measurement import clock as clock_module
from dynamix.trainer.measurement.clock import HostClock
from dynamix.trainer.steering.tracking import FastLoop, Tracker

HELD_FROM = 200
SLOW_FROM = 300
SLOW_RANK = 2


# --- on a schedule ---------------------------------------------------------------------------------------------


def _loop(sizes: tuple[int, ...] = (30, 30)) -> tuple[FastLoop, Schedule]:
    schedule = Schedule(Allocation(sizes))
    return FastLoop(schedule, Tracker(1, [100] * len(sizes))), schedule


def _entries(schedule: Schedule) -> list[tuple[Any, ...]]:
    return [(step, one.local_batch_sizes, one.split) for step, one in schedule.entries_since(0)]


def test_a_global_batch_is_divided_by_what_is_known_of_the_speeds() -> None:
    loop, schedule = _loop()
    loop.adopt(10, Allocation((20, 40), "tracking"))
    assert _entries(schedule)[1:] == [(10, (20, 40), "tracking")]  # as decided: nothing is known
    loop.observe_times([1.0, 2.0], 11)
    loop.adopt(20, Allocation((10, 20), "tracking"))
    assert _entries(schedule)[2:] == [(11, (40, 20), "tracking"), (20, (20, 10), "tracking")]
    loop.adopt(30, Allocation((15, 15), "tracking"))  # the same global batch: the split in use stays
    assert len(_entries(schedule)) == 4


def test_what_the_slow_loop_fixes_is_left_alone_and_what_is_measured_then_is_remembered() -> None:
    loop, schedule = _loop()
    loop.adopt(10, Allocation((30, 30), "tracking"))
    loop.observe_times([1.0, 1.0], 11)
    loop.adopt(12, Allocation((30, 30), "fixed"))
    loop.observe_times([1.0, 4.0], 12)
    loop.observe_times([1.0, 4.0], 13)
    loop.adopt(14, Allocation((31, 29), "fixed"))
    assert _entries(schedule)[1:] == [(10, (30, 30), "tracking"), (12, (30, 30), "fixed"), (14, (31, 29), "fixed")]
    loop.adopt(15, Allocation((30, 30), "tracking"))
    assert _entries(schedule)[4:] == [(15, (47, 13), "tracking")]


def test_a_newer_measurement_takes_the_place_of_an_older_for_the_same_step() -> None:
    loop, schedule = _loop()
    loop.adopt(10, Allocation((30, 30), "tracking"))
    loop.observe_times([1.0, 2.0], 10)
    assert _entries(schedule)[1:] == [(10, (40, 20), "tracking")]


# --- on the gradient -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float64, 1e-15), (torch.float32, 1e-7), (torch.float16, 1e-3), (torch.bfloat16, 4e-3)],
)
@pytest.mark.parametrize("seconds", [1e-6, 0.037, 50.0])
def test_slots_come_back_with_the_gradient_in_any_format(dtype: torch.dtype, precision: float, seconds: float) -> None:
    slots = TimeSlots(rank=1, world_size=3)
    bucket = torch.tensor([1.0, -2.0], dtype=dtype)
    sent = slots.extend(bucket, 0.5, seconds)
    assert sent.numel() == 2 + 3
    sent[0] += 7.0  # as another rank's gradient does
    assert bucket.tolist() == [1.0, -2.0]
    assert slots.receive().tolist() == [7.5, -1.0]
    assert slots.take_seconds() == [0.0, pytest.approx(seconds, rel=precision), 0.0]
    assert slots.take_seconds() is None


def test_a_rank_without_samples_sends_zeros_whatever_its_dummy_batch_did() -> None:
    slots = TimeSlots(rank=0, world_size=2)
    slots.extend(torch.ones(3), 1.0, 1e9)
    assert slots.extend(torch.full((3,), torch.nan), 0.0, 0.0).tolist() == [0.0] * 5
    assert torch.isfinite(slots.extend(torch.ones(1, dtype=torch.float16), 1.0, 1e9)).all()


def test_the_clock_tells_seconds_per_sample_when_the_gradient_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = [5.0]
    monkeypatch.setattr("dynamix.trainer.measurement.clock.time.perf_counter", lambda: moment[0])
    clock = HostClock()
    for num_samples, expected in ((8, 0.25), (0, 0.0)):
        clock.asked()
        clock.handed_out(num_samples)
        assert clock.seconds_per_sample() == 0.0
        moment[0] += 2
        clock.gradient_ready()
        moment[0] += 7
        assert clock.seconds_per_sample() == expected
        clock.end()


# --- whole jobs ------------------------------------------------------------------------------------------------


def _attach(data: Numbered, **options: Any) -> tuple[Session, nn.Module, Any, list[Message]]:
    model = distribute(make_model(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    chosen = {
        "local_batch_size": 12,
        "min_local_batch_size": 1,
        "window_steps": 10,
        "policy": "static",
        "global_batch": "adaptive",
        "connect": False,
    } | options
    session = dynamix.attach(model, optimizer, data, **chosen)
    published: list[Message] = []
    session._transport.publish = published.append  # type: ignore[method-assign]
    return session, model, optimizer, published


def _train_step(
    session: Session, model: nn.Module, optimizer: Any, batch: Any, wait: Callable[[int, int], None]
) -> list[int]:
    """One step, as long as `wait(step, samples)` makes it; the indices of the samples that counted."""
    inputs, targets, indices = batch
    loss = nn.functional.cross_entropy(model(inputs), targets)
    wait(session.step_index, session.num_samples)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    used: list[int] = indices[: session.num_samples].tolist()
    session.step(loss)
    return used


class _Clock:
    """Real time until `hold` is called, and only what is slept from then on: what a rank measures is then known."""

    def __init__(self) -> None:
        self._held_s: float | None = None

    def perf_counter(self) -> float:
        return time.perf_counter() if self._held_s is None else self._held_s

    def hold(self) -> None:
        self._held_s = self.perf_counter()

    def sleep(self, seconds: float) -> None:
        if self._held_s is None:
            time.sleep(seconds)
        else:
            self._held_s += seconds


def _track_for_500_steps(rank: int) -> dict[str, Any]:
    """Ranks that sleep for every sample, 5 % more or less; rank 2 three times as long from step 300 on."""
    data = Numbered(2000, torch.float32)
    session, model, optimizer, published = _attach(data)
    clock, noise = _Clock(), Random(rank)
    clock_module.time = clock  # type: ignore[assignment]  # this process is the rank's own

    def wait(step: int, samples: int) -> None:
        if step == HELD_FROM:
            clock.hold()
        slower = 3 if rank == SLOW_RANK and step >= SLOW_FROM else 1
        clock.sleep(samples * 2e-4 * slower * noise.uniform(0.95, 1.05))

    sizes, epochs = [], []
    for _ in session.epochs(99):
        epochs.append([])
        for batch in session.loader:
            sizes.append(session.local_batch_sizes)
            if session.window == 1:
                offer(session, (12,) * 4, split="tracking")
            epochs[-1] += _train_step(session, model, optimizer, batch, wait)
            if session.step_index == 500:
                break
        if session.step_index == 500:
            break
    parameters = gather(flat_parameters(model))
    session.close()
    return {
        "sizes": sizes,
        "epochs": epochs,
        "equal": all(torch.equal(parameters[0], other) for other in parameters),
        "published": published,
    }


def test_four_ranks_split_alike_for_500_steps_and_follow_one_that_slows_down() -> None:
    results = run_ranks(_track_for_500_steps, 4)
    sizes = results[0]["sizes"]
    assert all(result["sizes"] == sizes for result in results)
    assert all(result["equal"] for result in results)
    assert len(sizes) == 500
    assert {sum(split) for split in sizes} == {48}
    for epoch in range(10):
        assert Counter(chain.from_iterable(result["epochs"][epoch] for result in results)) == Counter(range(2000))
    slow = [split[SLOW_RANK] for split in sizes]
    assert set(slow[HELD_FROM + 20 : SLOW_FROM + 2]) <= {11, 12, 13}
    assert max(slow[SLOW_FROM + 2 :]) <= 5  # two steps to be sure, and it rules the next: no loader draws ahead
    for split in sizes[SLOW_FROM + 30 :]:  # for a few steps what noise looked like before may tell
        longest = max(size * (3 if rank == SLOW_RANK else 1) for rank, size in enumerate(split))
        assert longest <= 16  # 15 is the best that whole samples allow
    job, reports, applied = (
        [message for message in results[0]["published"] if isinstance(message, kind)] for kind in (Job, Report, Applied)
    )
    assert job[0].supports_tracking
    assert [(receipt.decided_window, receipt.effective_window) for receipt in applied] == [(1, 2)]
    for report in reports:
        last = report.first_step + report.totals.num_steps - 1
        assert tuple(row.local_batch_size for row in report.rows) == sizes[last]
        assert report.totals.global_batch_size == 48
        for row in report.rows:
            used = sizes[report.first_step : last + 1]
            assert abs(row.num_samples - sum(split[row.rank] for split in used)) <= 12  # less in an epoch's last step


CUT = 43


def _hold_times(session: Session, rank: int) -> None:
    """Compute times that depend on the step alone, so that two runs can be compared."""

    def seconds_per_sample() -> float:
        step = session.step_index
        slow = (step // 20) % 2 == rank
        return (0.003 if slow else 0.001) * (1 + step % 3 / 50)

    session._meter.clock.seconds_per_sample = seconds_per_sample  # type: ignore[method-assign]


def _resume(rank: int, num_workers: int) -> dict[str, Any]:
    """A tracking job straight through, and in two halves; one rank alone takes a state now and then."""

    def begin() -> tuple[Session, nn.Module, Any]:
        loader = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        session, model, optimizer, _ = _attach(Numbered(601, torch.float32), window_steps=8, policy="rule", **loader)
        _hold_times(session, rank)
        return session, model, optimizer

    def train(session: Session, model: nn.Module, optimizer: Any, *, until: int) -> list[Any]:
        trace = []
        for _ in session.epochs(4):
            for batch in session.loader:
                sizes = session.local_batch_sizes
                if session.generation == 0 and session.step_index < CUT - 8:
                    total = 24 if session.step_index < 20 else 20
                    offer(session, (total // 2,) * 2, split="tracking")
                trace.append((sizes, _train_step(session, model, optimizer, batch, lambda *_: None)))
                if rank == 1 and session.step_index % 3 == 0:
                    session.state_dict()
                if session.step_index == until:
                    return trace
        return trace

    session, model, optimizer = begin()
    straight = train(session, model, optimizer, until=10**9)
    whole = flat_parameters(model)
    session, model, optimizer = begin()
    first = train(session, model, optimizer, until=CUT)
    states = model.state_dict(), optimizer.state_dict(), session.state_dict()
    session.close()
    session, model, optimizer = begin()
    for part, state in zip((model, optimizer, session), states, strict=True):
        part.load_state_dict(state)
    second = train(session, model, optimizer, until=10**9)
    session.close()
    return {
        "straight": straight,
        "halves": first + second,
        "same_parameters": torch.equal(flat_parameters(model), whole),
        "generation": session.generation,
    }


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resumed_run_tracks_on_and_workers_only_delay_the_split(num_workers: int) -> None:
    results = run_ranks(_resume, 2, num_workers, environ={"DYNAMIX_JOB": "resumed"})
    sizes = [split for split, _ in results[0]["straight"]]
    assert [split for split, _ in results[1]["straight"]] == sizes
    for result in results:
        assert result["halves"] == result["straight"]
        assert result["same_parameters"]
        assert result["generation"] == 1
    used = Counter(sample for result in results for _, samples in result["straight"] for sample in samples)
    assert used == Counter(dict.fromkeys(range(601), 4))  # once in each of four epochs
    assert {sum(split) for split in sizes} == {24, 20}
    changes = [step for step in range(60, len(sizes)) if sizes[step] != sizes[step - 1]]
    assert [step % 20 for step in changes] == [2 + 2 * num_workers] * len(changes)  # two steps to be sure, then at once
    assert {sizes[step] for step in changes} == {(5, 15), (15, 5)}


def _track_in_half_precision(rank: int, dtype: torch.dtype) -> tuple[list[tuple[int, ...]], bool]:
    model = nn.parallel.DistributedDataParallel(make_model(dtype), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = Numbered(400, dtype)
    session = dynamix.attach(
        model,
        optimizer,
        data,
        local_batch_size=12,
        min_local_batch_size=1,
        window_steps=2,
        policy="static",
        global_batch="adaptive",
        connect=False,
    )
    _hold_times(session, rank)
    sizes = []
    for batch in session.loader:
        sizes.append(session.local_batch_sizes)
        offer(session, (12, 12), split="tracking")
        _train_step(session, model, optimizer, batch, lambda *_: None)
    parameters = gather(flat_parameters(model))
    session.close()
    return sizes, torch.equal(*parameters)


def _track_in_all_precisions(rank: int) -> list[tuple[list[tuple[int, ...]], bool]]:
    return [_track_in_half_precision(rank, dtype) for dtype in (torch.float16, torch.bfloat16)]


def test_half_precision_carries_times_that_all_ranks_read_alike() -> None:
    results = run_ranks(_track_in_all_precisions, 2)
    assert results[0] == results[1]
    for sizes, equal in results[0]:
        assert equal
        assert (6, 18) in sizes


def _ask_for_tracking(_rank: int, options: dict[str, Any]) -> dict[str, Any]:
    data = Numbered(100, torch.float32)
    session, model, optimizer, published = _attach(data, window_steps=2, **options)
    for batch in session.loader:
        offer(session, (7,), split="tracking")
        inputs, targets, _ = batch
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        (session.scale_loss(loss) if options.get("weighting") == "loss" else loss).backward()
        optimizer.step()
        session.step(loss)
    splits = {entry.allocation.split for entry in session._run.schedule.entries_since(session.step_index)}
    sizes = session.local_batch_sizes
    session.close()
    jobs = [message for message in published if isinstance(message, Job)]
    applied = [message for message in published if isinstance(message, Applied)]
    return {
        "supports": jobs[0].supports_tracking,
        "splits": splits,
        "sizes": sizes,
        "refused": applied[-1].num_refused,
    }


@pytest.mark.parametrize("options", [{"weighting": "loss"}, {"base_hook": allreduce_hook}])
def test_where_no_slot_can_ride_along_the_sizes_are_adopted_as_they_are(options: dict[str, Any]) -> None:
    (result,) = run_ranks(_ask_for_tracking, 1, options)
    assert not result["supports"]
    assert result["splits"] == {"fixed"}
    assert result["sizes"] == (7,)
    assert result["refused"]["tracking"] > 0


def _begin_under(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    session, model, optimizer, published = _attach(Numbered(240, torch.float32), window_steps=4, **options)
    _hold_times(session, rank)
    sizes = []
    for batch in session.loader:
        sizes.append(session.local_batch_sizes)
        _train_step(session, model, optimizer, batch, lambda *_: None)
    session.close()
    return {"sizes": sizes, "jobs": [message for message in published if isinstance(message, Job)]}


def test_a_job_whose_ranks_divide_the_batch_begins_so_without_a_bus_or_a_decision() -> None:
    results = run_ranks(_begin_under, 2, {"policy": "rule"})
    assert results[0]["sizes"] == results[1]["sizes"]
    assert results[0]["sizes"][:2] == [(12, 12), (6, 18)]  # rank 0 takes three times as long
    assert {job.initial_split for job in results[0]["jobs"]} == {"tracking"}


def test_a_job_whose_sizes_are_decided_keeps_those_that_it_began_with() -> None:
    for options in ({"policy": "goodput"}, {"policy": "rule", "policy_options": {"track": 0.0}}):
        results = run_ranks(_begin_under, 2, options)
        assert set(results[0]["sizes"]) == {(12, 12)}
        assert {job.initial_split for job in results[0]["jobs"]} == {"fixed"}


def _resume_under_another_policy(rank: int, options: dict[str, Any]) -> set[tuple[int, ...]]:
    session, model, optimizer, _ = _attach(Numbered(240, torch.float32), window_steps=4, policy="rule")
    _hold_times(session, rank)
    for batch in session.loader:
        _train_step(session, model, optimizer, batch, lambda *_: None)
        if session.step_index == 6:
            break
    state = session.state_dict()
    session.close()
    session, model, optimizer, _ = _attach(Numbered(240, torch.float32), window_steps=4, **options)
    session.load_state_dict(state)
    _hold_times(session, rank)
    sizes = set()
    for batch in session.loader:
        sizes.add(session.local_batch_sizes)
        _train_step(session, model, optimizer, batch, lambda *_: None)
    session.close()
    return sizes


@pytest.mark.parametrize("options", [{"policy": "static"}, {"policy": "rule", "base_hook": allreduce_hook}])
def test_a_resumed_job_is_divided_as_it_says_now_not_as_it_was_when_it_was_saved(options: dict[str, Any]) -> None:
    results = run_ranks(_resume_under_another_policy, 2, options)
    assert results == [{(6, 18)}, {(6, 18)}]
