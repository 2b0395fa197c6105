"""The baselines, each compared with its published formula on a cluster whose numbers are known."""

import numpy as np
import pytest
from tests.support import examples
from tests.support.toy_cluster import ToyCluster

from dynamix.arbitrator.policies.baselines import NUM_CANDIDATES, goodput
from dynamix.arbitrator.policies.policy import Decision
from dynamix.arbitrator.policies.registry import POLICIES
from dynamix.schemas.features import GLOBAL_INDEX
from dynamix.schemas.messages import Job

RATES = np.array([3000.0, 3000.0, 1000.0, 1000.0])


def job_of(policy: str, **options: float) -> Job:
    nodes = {"node-a": (0, 1, 2, 3)}
    return examples.job(nodes, policy=policy, policy_options=options, min_local_batch_size=8)


def run(policy: str, cluster: ToyCluster, windows: int = 30, **options: float) -> list[Decision]:
    return cluster.run(POLICIES[policy], job_of(policy, **options), windows)


def test_goodput_is_throughput_times_adaptdls_efficiency() -> None:
    """By hand: B = 300 in 0.1 s, B_noise = 100, B_0 = 100: scale 3, gain (1 + 1) / (1/3 + 1) = 1.5, efficiency 0.5."""
    assert goodput(np.array([300.0]), np.array([0.1]), 100.0, 100)[0] == pytest.approx(3000 * 0.5)


@pytest.mark.parametrize("noise_scale", [100.0, 1000.0, 20_000.0])
def test_goodput_settles_within_its_hysteresis_of_the_best_candidate(noise_scale: float) -> None:
    cluster = ToyCluster(RATES, communication_s=0.02, noise_scale=noise_scale)
    job = job_of("goodput")
    batches = np.geomspace(32, 4096, NUM_CANDIDATES)
    times_s = np.array([cluster.step_time_s(cluster.balanced(batch, job)) for batch in batches])
    best = goodput(batches, times_s, noise_scale, 512).max()
    sizes = np.array(run("goodput", cluster)[-1].allocation.local_batch_sizes, dtype=float)
    found = goodput(np.array([sizes.sum()]), np.array([cluster.step_time_s(sizes)]), noise_scale, 512)[0]
    assert found > best / 1.06


def test_the_batch_follows_the_noise_scale_to_the_bounds() -> None:
    cluster = ToyCluster(RATES, noise_scale=800.0)

    def grow(window: int) -> None:
        cluster.noise_scale = 800.0 if window < 20 else 1600.0

    decisions = cluster.run(POLICIES["noise-scale"], job_of("noise-scale"), 40, grow)
    assert sum(decisions[19].allocation.local_batch_sizes) == pytest.approx(800, rel=0.03)
    assert sum(decisions[39].allocation.local_batch_sizes) == pytest.approx(1600, rel=0.03)
    assert decisions[39].allocation.local_batch_sizes[0] == pytest.approx(600, rel=0.05)
    largest = run("noise-scale", ToyCluster(RATES, noise_scale=1e9))[-1].allocation.local_batch_sizes
    assert max(largest) == 1024
    assert run("noise-scale", ToyCluster(RATES, noise_scale=1e-3))[-1].allocation.local_batch_sizes == (8,) * 4


def test_the_batch_doubles_after_every_so_many_samples() -> None:
    """512 samples a step, ten steps a window: 10,240 samples are two windows, and the new size comes two later."""
    decisions = run("doubling", ToyCluster(RATES), windows=8, every_samples=10_240)
    totals = [decision.allocation.global_batch_size for decision in decisions]
    assert totals == [512, 1024, 1024, 2048, 4096, 4096, 4096, 4096]


def decide(job: Job, losses: list[float]) -> list[int]:
    """Global batches decided while the loss goes as given."""
    cluster, carry, sizes, totals = ToyCluster(RATES), b"", job.initial_local_batch_sizes, []
    for window, loss in enumerate(losses):
        obs_WF, global_F = cluster.observe(np.array(sizes), job, sizes)
        global_F[GLOBAL_INDEX["loss"]] = loss
        decision = POLICIES["doubling"].decide(job, window, obs_WF, global_F, carry)
        carry, sizes = decision.carry, decision.allocation.local_batch_sizes
        totals.append(sum(sizes))
    return totals


def test_the_batch_doubles_when_the_loss_stalls() -> None:
    job = job_of("doubling", patience_windows=3)
    assert decide(job, [0.5**window for window in range(8)]) == [512] * 8
    assert decide(job, [1.0] * 8) == [512, 512, 512, 1024, 1024, 1024, 2048, 2048]
