"""The step-time model: what it predicts, by hand, and what it is fitted to."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import examples

from dynamix.arbitrator.policies.policy import Array64, pack, unpack
from dynamix.arbitrator.policies.step_time import (
    SYNC_FLOOR,
    StepTime,
    StepTimeFit,
    Window,
    best_global_batch,
    window_of,
)
from dynamix.schemas.features import GLOBAL_FEATURES, GLOBAL_INDEX, RANK_FEATURES, RANK_INDEX
from dynamix.schemas.messages.allocation import MAX_CARRY_BYTES
from dynamix.schemas.policies import most_worthwhile, progress


class _Carry(msgspec.Struct, array_like=True):
    fit: StepTimeFit | None = None


def model(
    rates: list[float],
    lower: float = 8.0,
    upper: float = 1024.0,
    overhead_s: float | list[float] = 0.0,
    saturation: float | list[float] = 0.0,
    **changes: float,
) -> StepTime:
    return StepTime(
        seconds_per_sample_W=1 / np.array(rates),
        lower_W=np.full(len(rates), lower),
        upper_W=np.full(len(rates), upper),
        overhead_W=np.broadcast_to(overhead_s, len(rates)).astype(np.float64),
        saturation_W=np.broadcast_to(saturation, len(rates)).astype(np.float64),
        **changes,
    )


def test_a_balanced_step_by_hand() -> None:
    """1000 and 3000 samples/s share 400 as 100 and 300: 0.1 s of compute, 2 ms overhead, 10 ms exposed, 1 ms rest."""
    fitted = model([1000.0, 3000.0], overhead_s=0.002, sync_intercept_s=0.010, rest_s=0.001)
    assert fitted.balanced(np.array([400.0]))[0] == pytest.approx(0.113)
    assert fitted.of((100, 300)) == pytest.approx(0.113)
    assert fitted.equal(np.array([400.0]))[0] == pytest.approx(0.213)
    hidden = model([1000.0], sync_intercept_s=0.1, sync_slope=-0.5)
    assert hidden.step_time_s(np.array([0.1, 0.15, 1.0])) == pytest.approx([0.15, 0.175, 1.0 + SYNC_FLOOR * 0.1])


def test_saturations_and_unequal_fixed_times_by_hand() -> None:
    """1000 and 4000 samples/s, nothing gained below 32: 32 ms for up to 32 + 128 samples, 33 ms for five more.

    2 and 40 ms beside 1 ms a sample: 400 are 219 and 181 in 221 ms; up to 39 the second has its one sample.
    """
    fitted = model([1000.0, 4000.0], lower=1.0, saturation=32.0)
    assert fitted.balanced(np.array([2.0, 64.0, 160.0, 165.0])) == pytest.approx([0.032, 0.032, 0.032, 0.033])
    assert fitted.of((1, 128)) == fitted.of((32, 32)) == pytest.approx(0.032)
    assert fitted.equal(np.array([20.0, 128.0])) == pytest.approx([0.032, 0.064])
    assert (fitted.divide(160), fitted.divide(165)) == ((32, 128), (33, 132))
    fitted = model([1000.0, 1000.0], lower=1.0, overhead_s=[0.002, 0.040])
    assert fitted.balanced(np.array([2.0, 40.0, 400.0])) == pytest.approx([0.041, 0.041, 0.221])
    assert fitted.divide(400) == (219, 181)


rates = st.lists(st.floats(10, 1e5), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.lists(st.tuples(st.floats(10, 1e5), st.floats(0, 0.1), st.floats(0, 2000)), min_size=1, max_size=12),
    share=st.floats(0, 1),
)
def test_the_line_equals_bisection_on_the_compute_time(ranks: list[tuple[float, float, float]], share: float) -> None:
    rates, overhead_s, saturation = (list(each) for each in zip(*ranks, strict=True))
    fitted = model(rates, overhead_s=overhead_s, saturation=saturation)
    total = fitted.smallest + share * (fitted.largest - fitted.smallest)
    low, high = 0.0, 1e3
    free = np.clip(saturation, 8, 1024)
    for _ in range(200):
        middle = (low + high) / 2
        held = np.clip((middle - fitted.overhead_W) / fitted.seconds_per_sample_W, free, 1024).sum()
        low, high = (middle, high) if held < total else (low, middle)
    expected = max(high, float(fitted.compute_s(free).max()))
    assert fitted.balanced(np.array([total]))[0] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert fitted.compute_s(fitted.shares(total)).max() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(rates=rates, noise=st.floats(0.1, 1e7), sync_s=st.floats(0, 1))
def test_the_best_batch_is_within_the_bounds_and_no_grid_point_beats_it(
    rates: list[float], noise: float, sync_s: float
) -> None:
    job = examples.job(base_global_batch_size=16, learning_rate_rule="none")
    by_hand = model([8000.0, 4000.0], overhead_s=0.002, sync_intercept_s=0.010)  # B / (B + K) / (A + B/R)
    assert best_global_batch(job, by_hand, 1000.0, 0.0) == pytest.approx(np.sqrt(1000 * 0.012 * 12000), rel=2e-3)
    fitted = model(rates, overhead_s=0.001, sync_intercept_s=sync_s)
    best = best_global_batch(job, fitted, noise, 0.0)
    assert fitted.smallest * (1 - 1e-9) <= best <= fitted.largest * (1 + 1e-9)
    grid = np.geomspace(fitted.smallest, fitted.largest, 500)
    most = most_worthwhile(noise, 16)
    worth = progress(grid, noise, most=most) / fitted.balanced(grid)
    chosen = progress(np.array([best]), noise, most=most) / fitted.balanced(np.array([best]))
    assert worth.max() <= chosen[0] * 1.002


JOB = examples.job(min_local_batch_size=8)
RATES = np.array([4000.0, 2000.0, 1000.0, 500.0])


def window(sizes: Array64, *, overhead_s: float = 0.0, sync_s: float = 0.01, rates: Array64 = RATES) -> Window:
    return Window(np.asarray(sizes, dtype=np.float64), overhead_s + sizes / rates, sync_s, 0.001, JOB.window_steps)


def fit_of(*windows: Window) -> StepTimeFit:
    fit = StepTimeFit.empty(JOB)
    for one in windows:
        fit = fit.observe(JOB, one)
    return fit


def fitted(*windows: Window) -> StepTime:
    """The model after these windows."""
    model = fit_of(*windows).model(JOB)
    assert model is not None
    return model


def test_fixed_times_and_saturations_are_found_for_each_rank() -> None:
    """2 and 40 ms beside 1 and 4 samples a millisecond; the last two cost as much with 32 samples as with fewer."""
    overhead_s, least = np.array([0.002, 0.040, 0.002, 0.040]), np.array([0.0, 0.0, 32.0, 32.0])

    def measured(size: float) -> Window:
        sizes = np.full(4, size)
        return Window(sizes, overhead_s + np.maximum(sizes, least) / RATES, 0.01, 0.001, JOB.window_steps)

    model = fitted(*map(measured, (96.0, 64.0, 40.0, 24.0, 16.0)))
    assert model.overhead_W == pytest.approx(overhead_s, rel=0.1, abs=1e-3)
    assert model.saturation_W == pytest.approx(least, rel=0.1)
    assert 1 / model.seconds_per_sample_W == pytest.approx(RATES, rel=0.1)
    assert model.compute_s(np.full(4, 128.0)) == pytest.approx(overhead_s + 128 / RATES, rel=0.05)


def test_a_split_that_follows_the_speed_is_not_taken_for_a_fixed_time() -> None:
    """The fast loop halves the size of a rank at half speed: its time stays, as if it were all fixed cost."""
    slower = RATES * np.array([0.5, 1, 1, 1])
    before = window(0.1 * RATES)
    for changed in (0.1 * slower, 0.12 * slower):
        assert fitted(before, window(changed, rates=slower)).overhead_W.max() < 1e-3


def test_the_overlap_is_found_when_compute_times_change() -> None:
    """Exposed communication is 40 ms less half of the slowest compute time."""
    fit = fit_of(*[window(scale * RATES, sync_s=0.04 - 0.5 * scale) for scale in (0.04, 0.05, 0.06) * 5])
    assert fit.sync_slope == pytest.approx(-0.5, abs=0.05)
    assert fit.sync_intercept_s == pytest.approx(0.04, rel=0.05)


def test_waiting_for_ranks_that_are_late_by_turns_is_told_from_a_congested_network() -> None:
    """In each second window a rank takes 150 ms, not 100, and even that one waits 75 ms beside 10 of communication."""
    calm, windows = window(0.1 * RATES)._replace(waited_s=0.0), []
    for number in range(40):
        late_W = np.where(np.arange(4) == number % 4, 0.15, 0.1)
        windows += [calm._replace(compute_W=late_W, waited_s=0.075), calm]
    model = fitted(calm, *windows)
    divided_s = 750 / (7500 - RATES / 3)  # once the late rank has its share
    waited_s, squares = 0.225 - 1.1 * divided_s, divided_s**2 + 0.1**2
    assert model.waiting_per_s == pytest.approx(waited_s.sum() / squares.sum(), rel=0.05)
    assert model.sync_intercept_s == pytest.approx(0.01, rel=0.05)
    assert model.step_time_s(np.array([0.3]))[0] == pytest.approx(0.311 + model.waiting_per_s * 0.09, rel=0.01)
    assert fitted(calm, *[calm._replace(sync_s=sync_s) for sync_s in (0.01, 0.1) * 20]).waiting_per_s == 0.0


def noisy_windows(noise: float, *, num_windows: int = 40) -> list[Window]:
    """Four equal ranks at 0.1 ms a sample and 2 ms, with steps of such noise; global batches that go up and down."""
    random = np.random.default_rng(1)
    sizes = np.resize([32.0, 48.0, 72.0, 60.0, 40.0], num_windows)
    windows = []
    for size in sizes:
        noises = random.lognormal(-noise * noise / 2, noise, (JOB.window_steps, 4))
        times_s = (0.002 + size * 1e-4) * noises
        waited_s = (times_s.max(axis=1, keepdims=True) - times_s).mean(axis=0)
        windows.append(
            Window(np.full(4, size), times_s.mean(axis=0), float(waited_s.min()) + 0.001, 0.001, JOB.window_steps)
        )
    return windows


def test_noise_of_half_a_step_is_neither_a_fixed_time_nor_a_cost_of_communication() -> None:
    """2 ms and 1 ms, and a third of the compute time is waited for the slowest of four ranks."""
    fits = [fit_of(*noisy_windows(0.45)[:number]) for number in range(20, 41)]
    assert 0.08 < np.sqrt([fit.noise_2 for fit in fits]).mean() < 0.16
    assert np.mean([fit.overhead_s[:4].mean() for fit in fits]) < 0.003
    assert np.mean([fit.sync_intercept_s for fit in fits]) < 0.0025


def test_stale_rows_and_rows_without_samples_or_times_do_not_count() -> None:
    obs_WF = np.full((4, len(RANK_FEATURES)), np.nan, dtype=np.float32)
    global_F = np.full(len(GLOBAL_FEATURES), np.nan, dtype=np.float32)
    obs_WF[:, RANK_INDEX["num_samples"]] = (1000, 1000, 0, 1000)
    obs_WF[:, RANK_INDEX["compute_time_s"]] = (0.1, 0.1, 0.1, np.nan)
    obs_WF[:, RANK_INDEX["sync_time_s"]] = (0.03, 0.01, 0.02, 0.001)
    obs_WF[:, RANK_INDEX["step_time_s"]] = (0.14, 0.12, 0.13, 0.11)
    obs_WF[:, RANK_INDEX["age_windows"]] = (0, 1, 0, 0)
    for stretch, times in ((np.nan, 1), (4.0, 4), (-3.0, 1), (1e30, 1)):  # a window may last several times as long
        global_F[GLOBAL_INDEX["stretch"]] = stretch
        seen = window_of(JOB, obs_WF, global_F)
        assert seen.num_steps == JOB.window_steps * times
        assert seen.samples_W == pytest.approx([100.0 / times, np.nan, np.nan, np.nan], nan_ok=True)
        assert (seen.sync_s, seen.rest_s) == pytest.approx((0.03, 0.01), rel=1e-5)
    obs_WF[:, RANK_INDEX["waiting_time_s"]] = (0.025, 0.0, 0.0, 0.0)  # the ranks know each other's times
    seen = window_of(JOB, obs_WF, global_F)
    assert (seen.sync_s, seen.waited_s) == pytest.approx((0.005, 0.025))
    fit = StepTimeFit.empty(JOB)
    assert fit.observe(JOB, Window(np.full(4, np.nan), np.full(4, np.nan), np.nan, np.nan, 10)).model(JOB) is None
    known = fitted(window(np.array([100.0, 100.0, 100.0, np.nan])))  # the last one counts as the mean of the others
    assert known.seconds_per_sample_W[3] == pytest.approx((1 / RATES[:3]).mean())


def test_of_many_ranks_some_speak_for_all() -> None:
    """One in sixteen of a thousand; each fourth rank takes 10 ms more and is as fast."""
    job = examples.job({"node-a": tuple(range(1000))}, initial_local_batch_sizes=(100,) * 1000)
    overhead_s = np.where(np.arange(1000) % 4 == 0, 0.012, 0.002)
    fit = StepTimeFit.empty(job)
    for size in (100.0, 150.0, 200.0):
        sizes = np.full(1000, size)
        fit = fit.observe(job, Window(sizes, overhead_s + sizes / 1000, 0.01, 0.001, job.window_steps))
        fit = StepTimeFit.of(unpack(_Carry, pack(_Carry(fit.kept()))).fit, job)
    model = fit.model(job)
    assert model is not None
    assert model.overhead_W[::16] == pytest.approx(0.012, rel=0.05)  # they happen to be of the first kind
    assert model.compute_s(np.full(1000, 200.0)) == pytest.approx(overhead_s + 0.2, rel=0.03)


@pytest.mark.parametrize("world_size", [1, 131_072])
def test_the_memory_fits_the_carry_for_any_number_of_ranks(world_size: int) -> None:
    job = examples.job({"node-a": tuple(range(world_size))})
    packed = pack(_Carry(StepTimeFit.empty(job).kept()))
    assert len(packed) <= MAX_CARRY_BYTES - 128
    assert pack(_Carry(StepTimeFit.of(unpack(_Carry, packed).fit, job).kept())) == packed
