"""`rule` on clusters of unequal fixed times and saturations, judged by an event simulation that knows no model."""

import numpy as np
import pytest
from tests.support import examples
from tests.support.event_cluster import Device, EventCluster

from dynamix.arbitrator.policies.rule import Rule
from dynamix.schemas.messages import Job

FAST, SLOW = Device(0.25e-3, 0.002), Device(1e-3, 0.002)
LATE_FAST, LATE_SLOW = Device(0.25e-3, 0.040), Device(1e-3, 0.040)
NARROW, LATE_NARROW = Device(1e-3, 0.002, saturation=32), Device(1e-3, 0.040, saturation=32)

CLUSTERS = {
    "2 and 40 ms": (SLOW,) * 4 + (LATE_SLOW,) * 4,
    "2 and 40 ms, four speeds": (FAST, LATE_SLOW, SLOW, LATE_FAST) * 2,
    "40 ms on the fast ones": (SLOW,) * 4 + (LATE_FAST,) * 4,
    "nothing gained under 32": (NARROW,) * 8,
    "nothing gained under 32 on half": (NARROW,) * 4 + (SLOW,) * 4,
    "both": (NARROW,) * 4 + (LATE_NARROW,) * 4,
    "both, on some": (NARROW, LATE_NARROW, SLOW, LATE_SLOW) * 2,
}


def job_of(size: int) -> Job:
    return examples.job(
        {f"node-{rank}": (rank,) for rank in range(8)},
        initial_local_batch_sizes=(size,) * 8,
        min_local_batch_size=1,
        policy="rule",
        supports_tracking=True,
        initial_split="tracking",
    )


def worth(total: float, noise_scale: float, step_s: float) -> float:
    """What the rule maximises, with the learning rate in proportion to the square root of the batch."""
    return total**1.25 / (total + noise_scale) / step_s


@pytest.mark.parametrize("noise_scale", [100.0, 1000.0])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_chosen_batch_is_within_20_percent_of_the_best(cluster: str, noise_scale: float) -> None:
    exact = EventCluster(CLUSTERS[cluster], noise_scale=noise_scale)
    totals = np.unique(np.geomspace(8, 4096, 40).astype(int))
    times_s = [exact.best_time_s(int(total), job_of(64)) for total in totals]
    fine = np.geomspace(8, 4096, 2000)
    values = worth(fine, noise_scale, np.interp(fine, totals, times_s))
    for size, jitter in ((16, 0.0), (64, 0.03), (256, 0.03)):
        found = EventCluster(exact.devices, noise_scale=noise_scale, jitter=jitter).run(Rule(), job_of(size), 30)
        total = float(np.median(found[-8:]))
        assert total == pytest.approx(fine[values.argmax()], rel=0.2)
        assert worth(total, noise_scale, exact.best_time_s(round(total), job_of(size))) > 0.97 * values.max()
