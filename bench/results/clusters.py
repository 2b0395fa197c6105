"""The virtual clusters of the experiments: workers of four speeds, as in the train scenarios."""

from typing import Any

import msgspec

from dynamix.lab.simulator.scenario import Network, Scenario, Stragglers, Workers

SPEEDS = (4000.0, 2000.0, 1000.0, 500.0)
"""Samples per second of the four kinds of workers."""
OVERHEAD_S = 0.002
LEARNING_RATES = {"sgd": 0.1, "adam": 0.002, "adamw": 0.002}
"""As in the scenarios: for a global batch of 512."""


def mixed(name: str, *, num_workers: int = 8, **changes: Any) -> Scenario:
    """A cluster with as many workers of each speed, on a fast network; any key of a scenario can be changed."""
    scenario = Scenario(
        family=name,
        name=name,
        workload="fashion-14-mlp",
        workers=tuple(
            Workers(samples_per_s=speed, count=num_workers // len(SPEEDS), overhead_s=OVERHEAD_S) for speed in SPEEDS
        ),
        learning_rate=LEARNING_RATES[changes.get("optimizer", "sgd")],
        base_global_batch_size=512,
        initial_local_batch_size=64,
        target_accuracy=0.86,
        fixed_time_s=10.0,
        time_limit_s=240.0,
        evaluate_every_s=0.25,
        evaluation_samples=5000,
        noise_every=4,
        network=Network(gradient_bytes=8_000_000),
        stragglers=Stragglers(jitter=0.05),
    )
    return msgspec.structs.replace(scenario, **changes)
