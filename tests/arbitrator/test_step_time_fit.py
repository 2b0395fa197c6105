import numpy as np
import pytest
from tests.support import examples

from dynamix.arbitrator.policies.model.observation import Array32, Array64
from dynamix.arbitrator.policies.model.step_time import StepTime
from dynamix.arbitrator.policies.model.step_time_fit import StepTimeFit, Window, filtered, window_of
from dynamix.schemas.features import GLOBAL_FEATURES, GLOBAL_INDEX, RANK_FEATURES, RANK_INDEX
from dynamix.schemas.messages.fields import MAX_CARRY_BYTES

JOB = examples.job(min_local_batch_size=8)
RATES = np.array([4000.0, 2000.0, 1000.0, 500.0])


def window(sizes: Array64, *, overhead_s: float = 0.0, sync_s: float = 0.01, rates: Array64 = RATES) -> Window:
    return Window(np.asarray(sizes, dtype=np.float64), overhead_s + sizes / rates, sync_s, 0.001, JOB.window_steps)


def stretched(times: float) -> Array32:
    """What is known of the whole job: how many times `window_steps` the window lasted."""
    global_F = np.full(len(GLOBAL_FEATURES), np.nan, dtype=np.float32)
    global_F[GLOBAL_INDEX["stretch"]] = times
    return global_F


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


def test_a_first_window_is_believed_as_it_is() -> None:
    fit = fit_of(window(np.full(4, 100.0)))
    assert fit.seconds_per_sample_W == pytest.approx(1 / RATES)
    assert (fit.sync_intercept_s, fit.rest_s) == pytest.approx((0.01, 0.001))
    assert fitted(window(np.full(4, 100.0))).overhead_W.tolist() == [0.0] * 4


def test_a_small_change_is_averaged_and_a_large_one_believed_at_once() -> None:
    old, new = np.array([1.0, 1.0, 1.0, np.nan, 1.0]), np.array([1.1, 3.0, 0.3, 2.0, np.nan])
    assert filtered(old, new, 1.2, 0.3) == pytest.approx([1.03, 3.0, 0.3, 2.0, 1.0])
    assert filtered(old, new, np.inf, 0.3)[:3] == pytest.approx([1.03, 1.6, 0.79])


def test_a_fixed_time_is_found_when_the_global_batch_changes() -> None:
    """Two sizes at 5 ms + b / rate: exact but for the prior's pull of a few percent."""
    sizes = 0.2 * RATES
    model = fitted(window(sizes, overhead_s=0.005), window(sizes / 2, overhead_s=0.005))
    assert model.overhead_W == pytest.approx(0.005, rel=0.04)
    assert 1 / model.seconds_per_sample_W == pytest.approx(RATES, rel=0.05)


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


def test_a_rank_whose_sizes_hardly_move_has_the_fixed_time_of_the_others() -> None:
    """In one window of two the last rank is not measured."""
    sizes = 0.2 * RATES
    second = window(sizes / 2, overhead_s=0.005)
    second.samples_W[3] = second.compute_W[3] = np.nan
    model = fitted(window(sizes, overhead_s=0.005), second)
    assert model.overhead_W == pytest.approx(0.005, rel=0.04)
    assert model.saturation_W.tolist() == [0.0] * 4


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
    assert np.mean([fit.fixed.overhead_s[:4].mean() for fit in fits]) < 0.003
    assert np.mean([fit.sync_intercept_s for fit in fits]) < 0.0025


def test_times_without_noise_are_known_to_be_without() -> None:
    fit = fit_of(*noisy_windows(0.0))
    assert np.sqrt(fit.noise_2) < 0.001
    assert fit.fixed.overhead_s[:4] == pytest.approx(0.002, rel=0.05)


def test_a_slow_first_window_hardly_makes_noise() -> None:
    sizes = 0.1 * RATES
    slow = Window(sizes, 2 * sizes / RATES, 0.01, 0.001, JOB.window_steps)
    assert np.sqrt(fit_of(slow, window(sizes)).noise_2) < 0.07


def test_a_network_that_turns_eight_times_slower_is_not_taken_for_overlap() -> None:
    fit = fit_of(window(0.05 * RATES, sync_s=0.01), window(0.06 * RATES, sync_s=0.08))
    assert (fit.sync_slope, fit.sync_intercept_s) == pytest.approx((0.0, 0.08))


def test_a_rank_that_was_never_measured_counts_as_the_mean_of_the_others() -> None:
    sizes = np.array([100.0, 100.0, 100.0, np.nan])
    assert fitted(window(sizes)).seconds_per_sample_W[3] == pytest.approx((1 / RATES[:3]).mean())


def test_nothing_measured_is_no_model_and_changes_nothing() -> None:
    assert StepTimeFit.empty(JOB).model(JOB) is None
    fit = fit_of(window(np.full(4, 100.0)))
    assert fit.observe(JOB, Window(np.full(4, np.nan), np.full(4, np.nan), np.nan, np.nan, JOB.window_steps)) is fit


def test_stale_rows_and_rows_without_samples_or_times_do_not_count() -> None:
    obs_WF = np.full((4, len(RANK_FEATURES)), np.nan, dtype=np.float32)
    obs_WF[:, RANK_INDEX["num_samples"]] = (1000, 1000, 0, 1000)
    obs_WF[:, RANK_INDEX["compute_time_s"]] = (0.1, 0.1, 0.1, np.nan)
    obs_WF[:, RANK_INDEX["sync_time_s"]] = (0.03, 0.01, 0.02, 0.001)
    obs_WF[:, RANK_INDEX["step_time_s"]] = (0.14, 0.12, 0.13, 0.11)
    obs_WF[:, RANK_INDEX["age_windows"]] = (0, 1, 0, 0)
    seen = window_of(JOB, obs_WF, stretched(np.nan))
    assert seen.samples_W == pytest.approx([100.0, np.nan, np.nan, np.nan], nan_ok=True)
    assert (seen.sync_s, seen.rest_s) == pytest.approx((0.03, 0.01), rel=1e-5)


@pytest.mark.parametrize(("stretch", "times"), [(np.nan, 1), (1.0, 1), (4.0, 4), (16.0, 16), (-3.0, 1), (1e30, 1)])
def test_samples_of_a_window_that_lasts_longer_are_divided_by_its_own_steps(stretch: float, times: int) -> None:
    obs_WF = np.zeros((4, len(RANK_FEATURES)), dtype=np.float32)
    obs_WF[:, RANK_INDEX["num_samples"]] = 1000 * times
    obs_WF[:, RANK_INDEX["compute_time_s"]] = 0.1
    seen = window_of(JOB, obs_WF, stretched(stretch))
    assert seen.num_steps == JOB.window_steps * times
    assert seen.samples_W.tolist() == [1000 / JOB.window_steps] * 4


def test_what_is_packed_comes_back() -> None:
    fit = fit_of(window(0.1 * RATES, overhead_s=0.005), window(0.13 * RATES, overhead_s=0.005))
    again = StepTimeFit.unpack(fit.pack(), JOB)
    for name in ("seconds_per_sample_W", "samples_W", "compute_W"):
        assert getattr(again, name) == pytest.approx(getattr(fit, name), rel=1e-6)
    assert again.pairs.values == pytest.approx(fit.pairs.values, rel=1e-6)
    for name in ("sync_intercept_s", "sync_slope", "rest_s", "slope_sums", "barrier_s", "sync_s", "noise_2"):
        assert getattr(again, name) == getattr(fit, name)
    assert again.pack() == fit.pack()


@pytest.mark.parametrize("packed", [b"", b"x", bytes(400)])
def test_foreign_bytes_are_an_empty_memory(packed: bytes) -> None:
    assert StepTimeFit.unpack(packed, JOB).model(JOB) is None


@pytest.mark.parametrize("world_size", [1, 10_000, 20_000, 50_000, 131_072])
def test_the_memory_fits_the_carry_for_any_number_of_ranks(world_size: int) -> None:
    job = examples.job({"node-a": tuple(range(world_size))})
    packed = StepTimeFit.empty(job).pack()
    assert len(packed) <= MAX_CARRY_BYTES - 64
    assert StepTimeFit.unpack(packed, job).pack() == packed


def test_of_many_ranks_some_speak_for_all() -> None:
    """One in sixteen of a thousand; each fourth rank takes 10 ms more and is as fast."""
    job = examples.job({"node-a": tuple(range(1000))}, initial_local_batch_sizes=(100,) * 1000)
    overhead_s = np.where(np.arange(1000) % 4 == 0, 0.012, 0.002)
    fit = StepTimeFit.empty(job)
    for size in (100.0, 150.0, 200.0):
        sizes = np.full(1000, size)
        fit = fit.observe(job, Window(sizes, overhead_s + sizes / 1000, 0.01, 0.001, job.window_steps))
        fit = StepTimeFit.unpack(fit.pack(), job)
    model = fit.model(job)
    assert model is not None
    assert model.overhead_W[::16] == pytest.approx(0.012, rel=0.05)  # they happen to be of the first kind
    assert model.compute_s(np.full(1000, 200.0)) == pytest.approx(overhead_s + 0.2, rel=0.03)
