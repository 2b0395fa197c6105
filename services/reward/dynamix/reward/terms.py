"""The terms of the reward, each with its unit and its place in the method (section IV-D).

A term is a number, or `None` where the window does not know enough to compute it: a missing term is left out of the
message, so that "not measured" cannot be mistaken for 0.
"""

import math

from dynamix.schemas.messages import MetricWindow, RankMetrics

SMALLEST_PUBLISHED_SIZE_LOG2 = 5.0
"""log2(32): the published size term is 0 at b = 32 and 5 at b = 1024, so it only ever penalises LARGE batches."""


def accuracy(rank: RankMetrics) -> float | None:
    """A_mean: mean training accuracy of the rank's batches, 0 ... 1."""
    return rank.training.accuracy


def accuracy_rise(rank: RankMetrics) -> float | None:
    """max(0, dA): rise of the rank's mean accuracy since its last window, 0 ... 1; a fall counts as 0."""
    change = rank.training.accuracy_change
    return None if change is None else max(0.0, change)


def iteration_time_s(rank: RankMetrics) -> float:
    """T_iter: mean time of a step in seconds; under a barrier the same for all ranks, whichever was slow."""
    return rank.training.step_time_s


def size_log2(rank: RankMetrics) -> float | None:
    """log2(b) - 5: local batch size in doublings above 32; `None` for a rank without samples."""
    size = rank.training.local_batch_size
    return math.log2(size) - SMALLEST_PUBLISHED_SIZE_LOG2 if size > 0 else None


def gradient_noise(window: MetricWindow) -> float | None:
    """sigma_norm^2 + sigma_norm, without unit (method section 5.2); `None` while it is masked."""
    square = window.job_metrics.sigma_norm_sq
    return None if square is None or square < 0 else square + math.sqrt(square)


def job_accuracy_change(window: MetricWindow) -> float | None:
    """DA of the whole job, a mean over samples, with its sign."""
    return window.job_metrics.accuracy_change


def window_time_s(window: MetricWindow) -> float:
    """Training time of the whole window in seconds, slowest rank."""
    return window.job_metrics.step_time_s * window.num_steps
