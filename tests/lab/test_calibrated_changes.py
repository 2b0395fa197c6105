"""Calibration finds workers that became slower or faster for good, and takes no straggler for one."""

from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from dynamix.lab.calibration.changes import find_shifts
from dynamix.lab.calibration.observations import Array64, Observations, observe
from tests.support.calibration_job import COMMUNICATION_S, WORKERS, known_job, known_scenario

from dynamix.lab.calibration import Calibration, CalibrationSettings, calibrate
from dynamix.lab.calibration.fit import fit_observations
from dynamix.lab.simulator.scenario import Scenario, SpeedChange, Stragglers
from dynamix.schemas.messages import MetricWindow

SETTINGS = CalibrationSettings("fashion-14-mlp")
FALL = SpeedChange(rank=2, at_s=30.0, factor=3.0)


def calibrated(scenario: Scenario, windows: Iterable[MetricWindow] | None = None) -> Calibration:
    job = known_job(scenario)
    return calibrate(job.windows if windows is None else windows, SETTINGS, job.job)


@pytest.mark.parametrize(
    "change",
    [
        FALL,
        SpeedChange(rank=3, at_s=40.0, factor=0.5),
        SpeedChange(rank=1, at_s=60.3, factor=4.0, exchange_s=0.05),
        SpeedChange(rank=1, at_s=3.0, factor=4.0),
    ],
)
def test_a_known_change_is_found_with_its_time_and_factor(change: SpeedChange) -> None:
    found = calibrated(known_scenario(speed_changes=(change,)))
    (seen,) = found.scenario.speed_changes
    assert seen.rank == change.rank
    assert seen.at_s == pytest.approx(change.at_s, abs=0.3)  # steps take 0.1 to 0.6 s
    assert seen.factor == pytest.approx(change.factor, rel=0.03)
    assert seen.exchange_s == pytest.approx(change.exchange_s, rel=0.05)
    for worker, true in zip(found.scenario.workers, (WORKERS[0], *WORKERS), strict=True):
        assert worker.samples_per_s == pytest.approx(true.samples_per_s, rel=0.05)  # those before it
    assert found.scenario.stragglers is not None
    assert found.scenario.stragglers.factor == 1.0
    assert found.median_error < 0.03
    remark = next(remark for remark in found.remarks if f"rank {change.rank} took" in remark)
    assert remark.startswith(f"From {seen.at_s:g} s of training on, until the end, ")
    assert ("exchanges of gradients" in remark) == (change.exchange_s > 0)


def test_two_workers_change_at_times_of_their_own() -> None:
    later = SpeedChange(rank=2, at_s=50.0, factor=2.0, exchange_s=0.06)
    found = calibrated(known_scenario(speed_changes=(SpeedChange(rank=1, at_s=20.0, factor=4.0), later)))
    first, second = found.scenario.speed_changes
    assert (first.rank, second.rank) == (1, 2)
    assert [first.at_s, second.at_s] == pytest.approx([20.0, 50.0], abs=0.3)
    assert [first.factor, second.factor] == pytest.approx([4.0, 2.0], rel=0.03)
    assert first.exchange_s == 0.0
    assert second.exchange_s == pytest.approx(0.06, rel=0.1)


def test_the_time_of_a_change_counts_windows_that_are_left_out_or_missing() -> None:
    scenario = known_scenario(speed_changes=(FALL,))
    windows = [window for window in known_job(scenario).windows if not 4 <= window.window < 20]
    silent = [without_sync(window) if 24 <= window.window < 30 else window for window in windows if window.window > 1]
    (seen,) = calibrated(scenario, silent).scenario.speed_changes
    assert seen.at_s == pytest.approx(FALL.at_s, rel=0.03)
    assert seen.factor == pytest.approx(FALL.factor, rel=0.03)


def without_sync(window: MetricWindow) -> MetricWindow:
    ranks = tuple(
        msgspec.structs.replace(rank, training=msgspec.structs.replace(rank.training, sync_time_s=None))
        for rank in window.ranks
    )
    return msgspec.structs.replace(window, ranks=ranks)


@pytest.mark.parametrize(("normal_s", "slow_s", "seed"), [(15, 5, 1), (40, 10, 1), (10, 10, 6), (60, 3, 4)])
def test_stragglers_that_come_back_are_no_change(normal_s: float, slow_s: float, seed: int) -> None:
    stragglers = Stragglers(factor=4, mean_normal_s=normal_s, mean_slow_s=slow_s, jitter=0.05)
    seen, _ = observe(known_job(known_scenario(stragglers=stragglers), seed).windows)
    fit = fit_observations(seen)
    assert fit.shifts == (None,) * 4
    assert fit.stragglers is not None
    assert fit.stragglers.factor == pytest.approx(4, rel=0.05)


def observations(samples: Array64, compute_s: Array64, *, exchange_s: float = 0.01) -> Observations:
    """Windows of the times of every step, windows x steps x ranks; samples are windows x ranks."""
    steps_s = compute_s.max(axis=2, keepdims=True) + exchange_s
    count, num_steps, _ = compute_s.shape
    duration_s = steps_s.sum(axis=(1, 2))
    unknown = np.full(samples.shape, np.nan)
    return Observations(
        window=np.arange(count, dtype=np.float64),
        begin_s=np.cumsum(duration_s) - duration_s,
        num_steps=np.full(count, float(num_steps)),
        samples=samples,
        busy_s=compute_s.mean(axis=1),
        sync_s=(steps_s - compute_s).mean(axis=1),
        step_s=duration_s / num_steps,
        tx_bytes=unknown,
        retransmits=unknown,
        srtt_us=unknown,
        held_out_accuracy=unknown[:, 0],
    )


def steps(samples: Array64, slow: Array64) -> Array64:
    """Two ranks: 4 ms and 1 ms per sample each, rank 1 slowed by a factor for each of ten steps of a window."""
    times_s = np.repeat(0.004 + 0.001 * samples[:, None, :], 10, axis=1)
    times_s[:, :, 1] *= slow.reshape(-1, 10)
    return times_s


SAMPLES = np.random.default_rng(7).integers(8, 128, (30, 2)).astype(np.float64)


@pytest.mark.parametrize("step", [40, 103, 146, 255])
def test_a_change_within_a_window_is_found_at_its_step(step: int) -> None:
    times_s = steps(SAMPLES, np.where(np.arange(300) >= step, 3.0, 1.0))
    ends_s = np.cumsum(times_s.max(axis=2).ravel() + 0.01)
    first, second = find_shifts(observations(SAMPLES, times_s))
    assert first is None
    assert second is not None
    assert second.at_s == pytest.approx(ends_s[step - 1], abs=1e-3)
    assert second.factor == pytest.approx(3.0, rel=1e-3)


@pytest.mark.parametrize(
    ("begin", "end"),
    [(270, 300), (100, 270), (0, 30), (60, 90)],
    ids=["too late", "comes back", "too early", "a spell"],
)
def test_what_does_not_last_is_no_change(begin: int, end: int) -> None:
    number = np.arange(300)
    times_s = steps(SAMPLES, np.where((begin <= number) & (number < end), 3.0, 1.0))
    assert find_shifts(observations(SAMPLES, times_s)) == (None, None)


def test_times_that_one_line_explains_are_no_change() -> None:
    sizes = np.where(np.arange(30)[:, None] < 15, 120.0, 10.0) + SAMPLES / 100
    times_s = np.repeat(0.05 + 0.0002 * sizes[:, None, :], 10, axis=1)  # nearly all of it overhead
    times_s *= np.random.default_rng(7).lognormal(0.0, 0.02, times_s.shape)
    assert find_shifts(observations(sizes, times_s)) == (None, None)


def test_a_window_with_next_to_nothing_to_do_tells_nothing_of_stragglers() -> None:
    samples = SAMPLES.copy()
    samples[::5, 0] = 1.0
    times_s = np.repeat(0.001 * samples[:, None, :], 10, axis=1)
    times_s[::5, :, 0] = 0.005  # instead of 1 ms: what a step costs beside its samples
    fit = fit_observations(observations(samples, times_s))
    assert not fit.slow(observations(samples, times_s)).any()
    assert fit.stragglers is None
    times_s[2::5, :, 0] *= 3
    slow = fit_observations(observations(samples, times_s)).stragglers
    assert slow is not None
    assert slow.factor == pytest.approx(3.0, rel=0.02)


def test_communication_is_that_before_a_change_made_exchanges_longer() -> None:
    change = SpeedChange(rank=1, at_s=60.3, factor=4.0, exchange_s=0.05)
    assert calibrated(known_scenario(speed_changes=(change,))).communication_s == pytest.approx(
        COMMUNICATION_S, rel=0.1
    )
