import math

import msgspec
import pytest
from tests.support import examples

from dynamix.reward.formula import Weights, reward_of
from dynamix.reward.service import RewardSettings
from dynamix.schemas.messages import MetricWindow, RankMetrics, SystemMetrics

WEIGHTS = Weights(accuracy=1.0, alpha=2.0, beta=0.5, delta=0.1, eta=0.01)


def window_with(family: str = "sgd", **training: object) -> MetricWindow:
    rank = RankMetrics(rank=0, training=examples.training(**training), system=SystemMetrics())
    return msgspec.structs.replace(examples.window(optimizer_family=family), ranks=(rank,))


def test_the_published_reward_for_sgd_is_the_sum_of_its_named_terms() -> None:
    reward = reward_of(window_with(local_batch_size=256), WEIGHTS).ranks[0]
    assert reward.terms == pytest.approx(
        {"accuracy": 0.75, "accuracy_rise": 2 * 0.01, "iteration_time": -0.5 * 0.1, "size": -0.1 * 3}
    )
    assert reward.reward == pytest.approx(0.75 + 0.02 - 0.05 - 0.3)


def test_adaptive_optimizers_also_pay_for_gradient_noise() -> None:
    reward = reward_of(window_with("adam"), WEIGHTS)
    assert reward.formula == "paper-adam"
    assert reward.ranks[0].terms["gradient_noise"] == pytest.approx(-0.01 * (4.0 + 2.0))


def test_a_term_that_was_not_measured_is_left_out() -> None:
    reward = reward_of(window_with(accuracy=None, accuracy_change=None), WEIGHTS).ranks[0]
    assert set(reward.terms) == {"iteration_time", "size"}
    assert reward.reward == pytest.approx(sum(reward.terms.values()))
    masked = examples.window(ranks=(0,), optimizer_family="adam", job_metrics=examples.job_metrics(sigma_norm_sq=None))
    assert "gradient_noise" not in reward_of(masked, WEIGHTS).ranks[0].terms


def test_the_time_aware_reward_of_a_run_is_its_accuracy_less_its_seconds() -> None:
    changes, times = [0.3, 0.2, -0.05, 0.1], [0.1, 0.2, 0.05, 0.1]
    total = sum(
        reward_of(
            examples.window(ranks=(0,), job_metrics=examples.job_metrics(accuracy_change=change, step_time_s=time)),
            WEIGHTS,
            "time-aware",
        )
        .ranks[0]
        .reward
        for change, time in zip(changes, times, strict=True)
    )
    assert total == pytest.approx(2 * 0.55 - 0.5 * 10 * 0.45)


def test_shrinking_the_batch_raises_the_published_reward_but_not_the_time_aware_one() -> None:
    """The known weakness of the published design: a quarter of the samples in a third of the time."""
    large = examples.window(ranks=(0,), job_metrics=examples.job_metrics(accuracy_change=0.04, step_time_s=0.3))
    small = examples.window(ranks=(0,), job_metrics=examples.job_metrics(accuracy_change=0.01, step_time_s=0.1))
    published = [
        reward_of(window_with(local_batch_size=size, step_time_s=time), WEIGHTS).ranks[0].reward
        for size, time in ((512, 0.3), (128, 0.1))
    ]
    assert published[1] > published[0]
    aware = [reward_of(w, Weights(alpha=100.0, beta=0.5), "time-aware").ranks[0].reward for w in (large, small)]
    assert aware[1] < aware[0]


def test_a_weight_that_is_no_finite_number_is_refused() -> None:
    with pytest.raises(ValueError, match="beta must be a finite number"):
        RewardSettings(beta=math.nan)
