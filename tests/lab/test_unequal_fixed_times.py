"""`rule` finds the best global batch where workers differ in what a step costs them whatever the batch is."""

import math

import numpy as np
import pytest
from tests.support import virtual

from dynamix.arbitrator.policies.rule import Rule
from dynamix.arbitrator.policies.step_time import StepTime
from dynamix.lab.simulator.episode import run_episode
from dynamix.lab.simulator.scenario import Network, Workers
from dynamix.schemas.messages import Job
from dynamix.schemas.progress import most_worthwhile, progress

LEARNING_WINDOWS = 8
NETWORK = Network(bandwidth_mbit_s=10_000, latency_s=0.0, overlap=0.0, gradient_bytes=8_000_000)
COMMUNICATION_S = 2 * 3 / 4 * 8_000_000 / 1.25e9


class ObservedRule(Rule):
    """`rule`, with the global batches that it wanted, and by which noise scale."""

    def __init__(self) -> None:
        self.wanted: list[tuple[float, float, float, float]] = []
        """Global batch, noise scale, power of the learning rate, most that is worthwhile."""

    def _next(self, job: Job, current: float, model: StepTime | None, noise_scale: float) -> tuple[float, str]:
        found = super()._next(job, current, model, noise_scale)
        if math.isfinite(noise_scale):
            most = most_worthwhile(noise_scale, job.base_global_batch_size)
            self.wanted.append((found[0], noise_scale, self._exponent(job), most))
        return found


@pytest.mark.parametrize("rates", [(1000.0, 4000.0), (4000.0, 1000.0)])
def test_its_batch_is_within_a_fifth_of_the_best_with_2_and_40_ms(rates: tuple[float, float]) -> None:
    """The best is looked for by hand: batches that take each compute time, over what a step with it takes."""
    workers = tuple(
        Workers(count=2, samples_per_s=rate, overhead_s=fixed)
        for rate, fixed in zip(rates, (0.002, 0.040), strict=True)
    )
    scenario = virtual.scenario(
        workers=workers,
        network=NETWORK,
        decision=virtual.FREE,
        min_local_batch_size=1,
        window_steps=10,
        noise_every=1,
        target_accuracy=1.0,
        fixed_time_s=30.0,
        time_limit_s=30.0,
    )
    rule = ObservedRule()
    run_episode(scenario, rule, data=virtual.data(4000, noise=20.0), seed=3)
    compute_s = np.linspace(0.042, 1.0, 5000)
    batches = sum(
        2 * np.maximum((compute_s - fixed) * rate, 1.0) for rate, fixed in zip(rates, (0.002, 0.040), strict=True)
    )
    wanted = rule.wanted[LEARNING_WINDOWS:]
    assert len(wanted) > 10
    for global_batch, noise_scale, exponent, most in wanted:
        worth = progress(batches, noise_scale, exponent, most)
        best = batches[np.argmax(worth / (compute_s + COMMUNICATION_S))]
        assert 0.8 * best <= global_batch <= 1.2 * best
