"""A virtual job under the policy `random`, for calibration to find its known numbers again."""

from functools import lru_cache
from typing import Any

from tests.support import virtual

from dynamix.arbitrator.policies.registry import policy_named
from dynamix.lab.simulator.episode import Episode, run_episode
from dynamix.lab.simulator.scenario import Network, Scenario, Stragglers, Workers

WORKERS = (
    Workers(samples_per_s=4000, overhead_s=0.002, saturation=60, count=2),
    Workers(samples_per_s=2000, overhead_s=0.040),
    Workers(samples_per_s=1000, overhead_s=0.004, saturation=48),
)
NETWORK = Network(bandwidth_mbit_s=1000, gradient_bytes=8_000_000, overlap=0.6)
COMMUNICATION_S = 0.0972
"""C: 2 * 3 / 4 * 8 MB at 125 MB/s, and 6 latencies of 50 us for each of 4 buckets."""


def known_scenario(**changes: Any) -> Scenario:
    """Two nodes, four workers of three speeds, a link that matters, 5 % jitter; 80 s."""
    fields: dict[str, Any] = {
        "workers": WORKERS,
        "network": NETWORK,
        "stragglers": Stragglers(jitter=0.05),
        "decision": virtual.FREE,
        "ranks_per_node": 2,
        "initial_local_batch_size": 64,
        "min_local_batch_size": 8,
        "max_local_batch_size": 200,
        "window_steps": 4,
        "target_accuracy": 1.0,
        "fixed_time_s": 80.0,
        "time_limit_s": 80.0,
        "evaluate_every_s": 50.0,
        "noise_every": 1000,
    }
    return virtual.scenario(**(fields | changes))


@lru_cache
def known_job(scenario: Scenario, seed: int = 1) -> Episode:
    """The job with its windows; some 120 windows, a second of a core, and so much data that few are of two epochs."""
    return run_episode(scenario, policy_named("random"), data=virtual.data(20_000), seed=seed, keep_messages=True)
