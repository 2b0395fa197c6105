"""The fast loop on a schedule, and in whole small jobs on real gloo ranks."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ranks import run_ranks
from tests.support.training import (
    Numbered,
    begin_job,
    flat_parameters,
    gather,
    offer,
    straight_and_resumed,
    train_step,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from dynamix.schemas.messages import Applied, Job, Message, Report
from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer import Session
from dynamix.trainer.data.plan import Schedule
from dynamix.trainer.gradient import clock as clock_module
from dynamix.trainer.steering.fast_loop import SHORT_S, STEADY_AFTER, STEADY_EVERY, FastLoop, RateFilter

HELD_FROM = 60
SLOW_FROM = 300
NUM_STEPS = 440
SLOW_RANK = 2
TRACKED: dict[str, Any] = {"local_batch_size": 12, "min_local_batch_size": 1, "window_steps": 10}


def _loop(sizes: tuple[int, ...] = (30, 30)) -> tuple[FastLoop, Schedule]:
    schedule = Schedule(Allocation(sizes))
    return FastLoop(schedule, 1, [100] * len(sizes)), schedule


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


def test_a_steady_loop_measures_one_step_of_four_until_times_change_also_after_a_resume() -> None:
    (loop, schedule), noise = _loop((32, 32)), Random(0)
    loop.adopt(0, Allocation((32, 32), "tracking"))
    resumed, other = _loop((32, 32))
    measured = []
    for step in range(600):
        if step == 500:
            other.reset(0, schedule.newest)
            resumed.restore(msgspec.json.decode(msgspec.json.encode(loop.state)))
        slower = 1.3 if step >= 510 else 1.0
        times = [1e-4 * noise.uniform(0.98, 1.02), 1e-4 * noise.uniform(0.98, 1.02) * slower]
        if loop.measures(step):
            measured.append(step)
            for each in (loop, resumed) if step >= 500 else (loop,):
                each.observe_times(times, step + 1, schedule.counts_at(step).values)
        assert step < 500 or resumed.state == loop.state
    assert measured[:STEADY_AFTER] == [*range(STEADY_AFTER)]
    turns = [step // STEADY_EVERY for step in measured if STEADY_AFTER <= step < 508]
    assert turns == [*range(STEADY_AFTER // STEADY_EVERY, 127)]
    found = next(step for step in measured if step >= 510)
    assert {found + 1, found + 2} <= {*measured}
    assert schedule.newest.local_batch_sizes[1] < 32 - 16 * (1 - 1 / 1.3)


def _track(rank: int, sample_s: float) -> dict[str, Any]:
    """Ranks that sleep for every sample, 5 % more or less; rank 2 three times as long from step 300 on."""
    session, model, optimizer = begin_job(Numbered(2000, torch.float32), **TRACKED)
    published: list[Message] = []
    session._transport.publish = published.append  # type: ignore[method-assign]
    clock, noise = _Clock(), Random(rank)
    clock_module.time = clock  # type: ignore[assignment]  # this process is the rank's own

    def wait(step: int, samples: int) -> None:
        if step == HELD_FROM:
            clock.hold()
        slower = 3 if rank == SLOW_RANK and step >= SLOW_FROM else 1
        clock.sleep(samples * sample_s * slower * noise.uniform(0.95, 1.05))

    sizes, epochs, calm = [], [], []
    for _ in session.epochs(99):
        epochs.append([])
        for batch in session.loader:
            sizes.append(session.local_batch_sizes)
            if session.window == 1:
                offer(session, (12,) * 4, split="tracking")
            epochs[-1] += train_step(session, model, optimizer, batch, wait)
            calm.append(session._run.fast_loop.is_calm)
            if session.step_index == NUM_STEPS:
                break
        if session.step_index == NUM_STEPS:
            break
    parameters = gather(flat_parameters(model))
    session.close()
    return {
        "sizes": sizes,
        "epochs": epochs,
        "calm": calm,
        "equal": all(torch.equal(parameters[0], other) for other in parameters),
        "published": published,
    }


@pytest.mark.parametrize("sample_s", [2e-3, 2e-4])
def test_four_ranks_split_alike_and_follow_one_that_slows_down(sample_s: float) -> None:
    results = run_ranks(_track, 4, sample_s)
    sizes = results[0]["sizes"]
    assert all(result["sizes"] == sizes for result in results)
    assert all(result["equal"] for result in results)
    assert len(sizes) == NUM_STEPS
    calm = results[0]["calm"]
    assert all(result["calm"] == calm for result in results)
    assert calm[SLOW_FROM - 1]
    assert not any(calm[SLOW_FROM + 2 + 2 * STEADY_EVERY : SLOW_FROM + 20])
    assert {sum(split) for split in sizes} == {48}
    for epoch in range(NUM_STEPS * 48 // 2000):
        assert Counter(chain.from_iterable(result["epochs"][epoch] for result in results)) == Counter(range(2000))
    slow = [split[SLOW_RANK] for split in sizes]
    assert set(slow[HELD_FROM + 20 : SLOW_FROM + 2]) <= {11, 12, 13}
    # two looks to be sure, and the next step has it, since no loader draws ahead; short steps are measured now and then
    met = SLOW_FROM + 2 if sample_s * 12 > SHORT_S else SLOW_FROM + 2 + 2 * STEADY_EVERY
    assert max(slow[met:]) <= 5
    for split in sizes[SLOW_FROM + 30 :]:  # for a few looks what noise looked like before may tell
        longest = max(size * (3 if rank == SLOW_RANK else 1) for rank, size in enumerate(split))
        assert longest <= 16  # 15 is the best that whole samples allow
    job, reports, applied = (
        [message for message in results[0]["published"] if isinstance(message, kind)] for kind in (Job, Report, Applied)
    )
    assert job[0].supports_tracking
    assert [(receipt.decided_window, receipt.effective_window) for receipt in applied] == [(1, 2)]
    assert job[-1].phase == "ended"
    assert job[-1].summary is not None
    assert job[-1].summary.num_steps == sum(report.totals.num_steps for report in reports)
    ends = list(accumulate(report.totals.num_steps for report in reports))
    slowing = next(report for report, end in zip(reports, ends, strict=True) if end > SLOW_FROM + 2)
    waited = [row.waiting_time_s for row in slowing.rows]
    assert min(waited) == waited[SLOW_RANK]  # the others wait for 24 samples and more until it has its share
    assert max(waited) - min(waited) > 24 * 0.9 * sample_s
    for report, end in zip(reports, ends, strict=True):
        assert tuple(row.local_batch_size for row in report.rows) == sizes[end - 1]
        assert report.totals.global_batch_size == 48
        for row in report.rows:
            used = sizes[end - report.totals.num_steps : end]
            assert abs(row.num_samples - sum(split[row.rank] for split in used)) <= 12  # less in an epoch's last step


# --- a job that was saved and resumed, with the same policy or another ---

CUT = 43


def _hold_times(session: Session, rank: int) -> None:
    """Compute times that depend on the step alone, so that two runs can be compared."""

    def seconds_per_sample() -> float:
        step = session.step_index
        slow = (step // 20) % 2 == rank
        return (0.03 if slow else 0.01) * (1 + step % 3 / 50)

    session._meter.clock.seconds_per_sample = seconds_per_sample  # type: ignore[method-assign]


def _resume(rank: int, num_workers: int) -> dict[str, Any]:
    """A tracking job straight through, and in two halves; one rank alone takes a state now and then."""

    def begin() -> tuple[Session, nn.Module, Any]:
        loader = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        job = begin_job(Numbered(601, torch.float32), **TRACKED | {"window_steps": 8, "policy": "rule"}, **loader)
        _hold_times(job[0], rank)
        return job

    def train(session: Session, model: nn.Module, optimizer: Any, until: int) -> list[Any]:
        trace = []
        for _ in session.epochs(4):
            for batch in session.loader:
                sizes = session.local_batch_sizes
                if session.generation == 0 and session.step_index < CUT - 8:
                    total = 24 if session.step_index < 20 else 20
                    offer(session, (total // 2,) * 2, split="tracking")
                trace.append((sizes, train_step(session, model, optimizer, batch)))
                if rank == 1 and session.step_index % 3 == 0:
                    session.state_dict()
                if session.step_index == until:
                    return trace
        return trace

    return straight_and_resumed(begin, train, CUT)


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


def _resume_under_another_policy(rank: int, options: dict[str, Any]) -> set[tuple[int, ...]]:
    data, chosen = Numbered(240, torch.float32), TRACKED | {"window_steps": 4}
    session, model, optimizer = begin_job(data, **chosen | {"policy": "rule"})
    _hold_times(session, rank)
    for batch in session.loader:
        train_step(session, model, optimizer, batch)
        if session.step_index == 6:
            break
    state = session.state_dict()
    session.close()
    session, model, optimizer = begin_job(data, **chosen | options)
    session.load_state_dict(state)
    _hold_times(session, rank)
    sizes = set()
    for batch in session.loader:
        sizes.add(session.local_batch_sizes)
        train_step(session, model, optimizer, batch)
    session.close()
    return sizes


@pytest.mark.parametrize("options", [{"policy": "static"}, {"policy": "rule", "base_hook": allreduce_hook}])
def test_a_resumed_job_is_divided_as_it_says_now_not_as_it_was_when_it_was_saved(options: dict[str, Any]) -> None:
    results = run_ranks(_resume_under_another_policy, 2, options)
    assert results == [{(6, 18)}, {(6, 18)}]


# --- the filter of compute times, and the split ---

TIMES = st.lists(st.tuples(*[st.one_of(st.just(0.0), st.floats(1e-6, 1.0))] * 4), max_size=60)


def _tracking(fewest: int, upper: list[int]) -> FastLoop:
    return FastLoop(Schedule(Allocation((1,) * len(upper))), fewest, upper)


def _rates(measured: Sequence[Sequence[float]]) -> list[float] | None:
    rates = RateFilter(len(measured[0]))
    for step in measured:
        rates.observe(step)
    return rates.rates


@pytest.mark.parametrize("outlier", [9.0, 0.01])
def test_one_outlier_moves_nothing_and_a_second_one_is_a_change(outlier: float) -> None:
    assert _rates([[1.0], [outlier]]) == [1.0]
    assert _rates([[1.0], [outlier], [1.0]]) == [1.0]
    assert _rates([[1.0], [outlier], [1.0], [outlier], [1.0]]) == [1.0]
    assert _rates([[1.0], [9.0], [0.01]]) == [1.0]  # not to the same side
    assert _rates([[1.0], [outlier], [outlier / 2]]) == [outlier / 2]


def test_what_is_not_measured_is_kept_and_what_never_was_counts_as_the_slowest() -> None:
    assert _rates([[0.0, math.nan, math.inf, -1.0]]) is None
    assert _rates([[2.0, 0.0, 3.0], [0.0, 0.0, 0.0]]) == pytest.approx([2.0, 3.0, 3.0], rel=0.005)


def _step_s(noise: float, costs: Callable[[int, int], float], seed: int) -> float:
    """Mean over 300 steps of four ranks of what the slowest would take without its noise; 1 with equal sizes."""
    generator, tracker, sizes, total = Random(seed), _tracking(1, [1024] * 4), (32,) * 4, 0.0
    shape = noise**-2
    for step in range(300):
        times = [costs(step, rank) * size for rank, size in enumerate(sizes)]
        total += max(times) / 32
        measured = [generator.gammavariate(shape, 1 / shape) * time for time in times]
        seconds = [time / size for time, size in zip(measured, sizes, strict=True)]
        sizes = tracker.better_split(seconds, sizes, sizes) or sizes
    return total / 300


def test_a_change_is_followed_through_noise_that_hides_it_in_a_single_step() -> None:
    def costs(step: int, rank: int) -> float:
        return 3.0 if rank == 1 and step >= 60 else 1.0

    best = (60 + 240 * 1.2) / 300
    assert sum(_step_s(0.45, costs, seed) for seed in range(8)) < 8 * 1.15 * best


@given(TIMES, st.integers(1, 200), st.integers(0, 8), st.tuples(*[st.integers(8, 64)] * 4))
def test_every_split_keeps_the_global_batch_and_the_bounds(
    times: list[tuple[float, ...]], total: int, low: int, upper: tuple[int, ...]
) -> None:
    tracker = _tracking(low, upper)
    total = min(max(total, 4 * low), sum(upper))
    sizes = tracker.divide((total, 0, 0, 0))
    assert sizes == (total, 0, 0, 0)  # as decided, while nothing is known
    sizes = (total // 4 + total % 4, *[total // 4] * 3)
    for step in times:
        sizes = tracker.better_split(step, sizes) or sizes
        assert sum(sizes) == total
    if tracker.filter.rates is not None:
        for split in (sizes, tracker.divide(sizes)):
            assert sum(split) == total
        assert all(low <= size <= high for size, high in zip(tracker.divide(sizes), upper, strict=True))


def test_a_rank_that_slows_down_by_three_is_followed_after_two_steps() -> None:
    tracker, sizes = _tracking(8, [1024] * 4), (64,) * 4
    assert tracker.better_split([1e-3] * 4, sizes) is None
    assert tracker.better_split([1e-3, 1e-3, 3e-3, 1e-3], sizes) is None
    sizes = tracker.better_split([1e-3, 1e-3, 3e-3, 1e-3], sizes) or sizes
    assert sizes == (76, 76, 28, 76)
    for _ in range(4):  # it may have been noise so far
        sizes = tracker.better_split([1e-3, 1e-3, 3e-3, 1e-3], sizes) or sizes
    assert sizes == (77, 77, 26, 76)
    assert tracker.divide((32,) * 4) == (39, 38, 13, 38)


@pytest.mark.parametrize("overhead_s", [0.0, 0.02, 0.2])
def test_equal_times_are_approached_without_overshooting_whatever_the_overhead(overhead_s: float) -> None:
    """Times o + b c: the best split has all at once; the slowest rank's time only falls, to within the dead band."""
    costs_s = (1e-3, 1e-3, 2e-3, 8e-3)
    tracker, sizes, slowest = _tracking(1, [1024] * 4), (100,) * 4, []
    for _ in range(80):
        times = [overhead_s + size * cost for size, cost in zip(sizes, costs_s, strict=True)]
        slowest.append(max(times))
        sizes = tracker.better_split([time / size for time, size in zip(times, sizes, strict=True)], sizes) or sizes
    best = overhead_s + 400 / sum(1 / cost for cost in costs_s)
    assert all(after <= before for before, after in pairwise(slowest))
    assert best * 0.999 <= slowest[-1] <= best * 1.05
    assert slowest[0] == overhead_s + 0.8


@pytest.mark.parametrize(("noise", "most_changes", "widest"), [(0.02, 1, 2), (0.05, 90, 8)])
def test_noise_hardly_moves_the_split(noise: float, most_changes: int, widest: int) -> None:
    generator, tracker, sizes, changes = Random(3), _tracking(8, [1024] * 8), (64,) * 8, 0
    for _ in range(300):
        proposed = tracker.better_split([generator.lognormvariate(-7, noise) for _ in range(8)], sizes)
        changes += proposed is not None
        sizes = proposed or sizes
    assert changes <= most_changes
    assert max(sizes) - min(sizes) <= widest


def test_fixed_costs_are_fitted_per_rank_from_times_at_different_sizes() -> None:
    """In samples: 5 and 20 ms at 1 and 0.5 ms a sample."""
    rates = RateFilter(2)
    for counts in ((64, 64), (80, 48), (60, 68)):
        for _ in range(6):
            times = (0.005 + 0.001 * counts[0], 0.02 + 0.0005 * counts[1])
            rates.observe([time / count for time, count in zip(times, counts, strict=True)], counts)
    assert rates.fixed == [pytest.approx(5, abs=1), pytest.approx(40, abs=2)]
    assert rates.rates == [pytest.approx(0.001, rel=0.03), pytest.approx(0.0005, rel=0.03)]
