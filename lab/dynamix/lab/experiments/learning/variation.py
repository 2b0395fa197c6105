"""Clusters drawn at random, to learn on what is not one cluster but a family of them.

A draw is a pure function of family, number and seed. Each family is about one thing that no formula tells: how much of
a run's noise is worth following, how long local steps may go on, which codec under congestion that comes in bursts.
"""

import hashlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from dynamix.lab.simulator.scenario import Congestion, Network, Scenario, Stragglers, Workers

Generator = np.random.Generator
Changes = dict[str, Any]

TARGETS = (0.85, 0.82)
"""Accuracies to reach: without label noise to speak of, and with it."""
LEARNING_RATES = {"sgd": 0.1, "adam": 0.002}
GRADIENT_BYTES = 8_000_000


def _noise(drawn: Generator) -> Changes:
    """Labels of which some are wrong, with either optimizer; gradients are exact."""
    return _optimizer(drawn) | {"label_noise": float(drawn.uniform(0.0, 0.2))}


def _local(drawn: Generator) -> Changes:
    """Slow links, where local steps are permitted."""
    network = Network(bandwidth_mbit_s=_between(drawn, 300, 3000), gradient_bytes=GRADIENT_BYTES)
    return _optimizer(drawn) | {"exchange": "local", "network": network}


def _bursts(drawn: Generator) -> Changes:
    """A network that congests for seconds; codecs with loss are permitted, and sometimes local steps."""
    network = Network(bandwidth_mbit_s=_between(drawn, 1000, 6000), gradient_bytes=GRADIENT_BYTES)
    congestion = Congestion(
        factor=_between(drawn, 3, 15),
        mean_clear_s=_between(drawn, 1.5, 8),
        mean_congested_s=_between(drawn, 1, 5),
        retransmits_per_s=200.0,
    )
    permission = "local" if drawn.random() < 0.5 else "lossy"
    return {"exchange": permission, "network": network, "congestion": congestion}


def _drift(drawn: Generator) -> Changes:
    """Local steps over slow links with wrong labels and workers that straggle: the ranks drift apart."""
    stragglers = Stragglers(
        factor=_between(drawn, 1.5, 5),
        mean_normal_s=_between(drawn, 4, 20),
        mean_slow_s=_between(drawn, 1, 5),
        jitter=0.05,
    )
    return _local(drawn) | {"label_noise": float(drawn.uniform(0.0, 0.2)), "stragglers": stragglers}


FAMILIES: Mapping[str, Callable[[Generator], Changes]] = MappingProxyType(
    {"noise": _noise, "local": _local, "bursts": _bursts, "drift": _drift}
)


def drawn_scenarios(family: str, number: int, *, seed: int = 0, num_workers: int = 4, **changes: Any) -> list[Scenario]:
    """So many clusters of a family; any key of a scenario can be changed in all of them.

    Raises:
        KeyError: when there is no such family.
    """
    return [_scenario(family, index, seed, num_workers, changes) for index in range(number)]


def _scenario(family: str, index: int, seed: int, num_workers: int, changes: Changes) -> Scenario:
    drawn = np.random.default_rng((seed, index, int.from_bytes(hashlib.sha256(family.encode()).digest()[:4])))
    speeds = [_between(drawn, 500, 4000) for _ in range(num_workers)]
    found = FAMILIES[family](drawn)
    optimizer = found.get("optimizer", "sgd")
    target_accuracy = TARGETS[int(found.get("label_noise", 0.0) > 0.05)]
    scenario = Scenario(
        family=family,
        name=f"{family}-{seed}-{index}",
        workload="fashion-14-mlp",
        workers=tuple(Workers(samples_per_s=speed, overhead_s=0.002) for speed in speeds),
        optimizer=optimizer,
        learning_rate=LEARNING_RATES[optimizer],
        base_global_batch_size=512,
        initial_local_batch_size=64,
        target_accuracy=target_accuracy,
        fixed_time_s=0.0,
        time_limit_s=120.0,
        evaluate_every_s=0.25,
        evaluation_samples=2000,
        noise_every=4,
        network=Network(gradient_bytes=GRADIENT_BYTES),
        stragglers=Stragglers(jitter=0.05),
    )
    return msgspec.structs.replace(scenario, **(found | changes))


def _optimizer(drawn: Generator) -> Changes:
    optimizer = "adam" if drawn.random() < 0.5 else "sgd"
    return {"optimizer": optimizer, "learning_rate": LEARNING_RATES[optimizer]}


def _between(drawn: Generator, low: float, high: float) -> float:
    """Log-uniform, to three digits."""
    return float(f"{np.exp(drawn.uniform(np.log(low), np.log(high))):.3g}")
