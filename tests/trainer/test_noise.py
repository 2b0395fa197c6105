import math

import numpy as np
import pytest

from dynamix.schemas.messages import GradientNoise
from dynamix.trainer.data.plan import Counts
from dynamix.trainer.gradient.noise import NoiseAverage, NoiseSums, is_measured, window_moments

DIMENSIONS = 50
MEAN = 0.2
"""Each coordinate: |G_true|^2 = 50 * 0.04 = 2."""
SIGMA = 1.5
"""Each coordinate: S = 50 * 2.25 = 112.5."""


def _rank_sums(steps: list[Counts]) -> list[NoiseSums]:
    """Sums of all ranks over steps whose per-sample gradients are Gaussian: N(MEAN, SIGMA^2) in each coordinate."""
    generator = np.random.default_rng(1)
    sums = [NoiseSums() for _ in steps[0].values]
    for counts in steps:
        local = [
            MEAN + SIGMA / math.sqrt(count) * generator.standard_normal(DIMENSIONS) if count else np.zeros(DIMENSIONS)
            for count in counts.values
        ]
        mean = sum(count / counts.total * gradient for count, gradient in zip(counts.values, local, strict=True))
        for rank, gradient in enumerate(local):
            sums[rank].add_step(counts, rank, float(gradient @ gradient), float(mean @ mean))
    return sums


SIZES = [(32, 32, 32, 32), (8, 24, 64, 32), (2, 10, 100, 16), (1, 1, 1, 125), (5, 0, 3, 120), (0, 64, 0, 64)]
CHANGING = [(1, 1, 1, 125), (40, 3, 0, 9), (16, 16, 16, 16)]


@pytest.mark.parametrize("sizes", [*([each] * 6000 for each in SIZES), CHANGING * 3000])
def test_the_noise_scale_is_unbiased_for_unequal_batches_and_such_that_change(sizes: list[tuple[int, ...]]) -> None:
    moments = window_moments(_rank_sums([Counts(each) for each in sizes]))
    assert moments is not None
    assert moments.trace == pytest.approx(DIMENSIONS * SIGMA**2, rel=0.02)
    assert moments.squared_norm == pytest.approx(DIMENSIONS * MEAN**2, rel=0.02)
    assert moments.trace / moments.squared_norm == pytest.approx(56.25, rel=0.02)


def test_a_norm_that_is_not_finite_leaves_out_the_step_on_all_ranks_or_the_window_where_one_rank_alone_has_it() -> None:
    counts, kept = Counts([4, 4]), [(3.0, 2.0), (5.0, 4.0)]
    sums = [[NoiseSums(), NoiseSums()] for _ in range(3)]
    for rank in (0, 1):
        for one, bad in zip(sums, ([], [(1.0, math.nan)], [(math.inf if rank else 1.0, 1.0)]), strict=True):
            for local, reduced in [*kept, *bad]:
                one[rank].add_step(counts, rank, local, reduced)
    expected, everywhere, alone = map(window_moments, sums)
    assert expected is not None
    assert everywhere == expected
    assert alone is None


def test_one_active_rank_says_nothing_about_noise() -> None:
    sums = [NoiseSums(), NoiseSums()]
    for rank, part in enumerate(sums):
        part.add_step(Counts([0, 8]), rank, 1.0, 1.0)
    assert window_moments(sums) is None
    average = NoiseAverage()
    average.observe_window(None)
    assert average.value is None


@pytest.mark.parametrize(("window", "share"), [(6, 0.76), (10, 0.75), (20, 0.75), (37, 0.75), (200, 0.95)])
def test_a_growing_noise_scale_is_a_quarter_too_low_at_first_and_nine_windows_late_later(
    window: int, share: float
) -> None:
    average = NoiseAverage()
    for number in range(1, window + 1):  # B_noise = 100 number
        average.observe_window(GradientNoise(trace=100.0, squared_norm=1 / number))
    assert average.value is not None
    assert average.value.trace / average.value.squared_norm == pytest.approx(share * 100 * window, rel=0.01)


def test_the_first_steps_are_all_measured_and_then_one_of_some() -> None:
    assert [step for step in range(42) if is_measured(step, 10)] == [*range(20), 20, 30, 40]
    assert all(is_measured(step, 1) for step in range(42))
