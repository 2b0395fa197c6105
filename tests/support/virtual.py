"""Small virtual clusters on made-up data: ten blurred prototypes, learned in a hundred steps."""

from collections.abc import Iterable
from typing import Any

import torch
from tests.support import examples

from dynamix.collector.window import simulated_window
from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.simulator.scenario import DecisionCost, Network, Scenario, Workers
from dynamix.lab.workloads import Data, Part
from dynamix.reward.formula import Weights, reward_of
from dynamix.schemas.chain import seal
from dynamix.schemas.features import state_of
from dynamix.schemas.messages import Action, Job, MetricWindow, Report, Reward, State

FREE = DecisionCost(cost_s=0.0, cost_per_doubling_s=0.0)
MIXED = (Workers(count=2, samples_per_s=4000.0, overhead_s=0.002), Workers(count=2, samples_per_s=1000.0))


def scenario(**changes: Any) -> Scenario:
    """Four workers of two speeds."""
    fields: dict[str, Any] = {
        "family": "mixed",
        "workload": "fashion-14-mlp",
        "workers": MIXED,
        "target_accuracy": 0.5,
        "fixed_time_s": 1.0,
        "time_limit_s": 4.0,
        "evaluate_every_s": 0.25,
        "initial_local_batch_size": 32,
        "base_global_batch_size": 128,
        "window_steps": 5,
        "network": Network(gradient_bytes=1_000_000),
    }
    return Scenario(**(fields | changes))


def data(num_samples: int = 1000, *, dtype: torch.dtype = torch.float32, noise: float = 5.0) -> Data:
    """Images of 14 x 14 in ten classes; validation and test are a fifth as large."""
    generator = torch.Generator().manual_seed(11)
    prototypes = torch.randn(10, 1, 14, 14, generator=generator, dtype=torch.float64)

    def part(count: int) -> Part:
        labels = torch.randint(0, 10, (count,), generator=generator)
        blur = torch.randn(count, 1, 14, 14, generator=generator, dtype=torch.float64)
        return Part((prototypes[labels] + noise * blur).to(dtype), labels)

    return Data(part(num_samples), part(num_samples // 5), part(num_samples // 5))


def cluster(of: Scenario | None = None, **arguments: Any) -> VirtualCluster:
    """A cluster under seed 3 and policy `static`, on the data above."""
    given: dict[str, Any] = {"seed": 3, "policy": "static"}
    chosen = given | arguments
    return VirtualCluster(of or scenario(), chosen.pop("data", None) or data(), **chosen)


def action(job: Job, window: int, sizes: tuple[int, ...], **changes: Any) -> Action:
    """A decision about a job."""
    fields = {"job": job.job, "generation": job.generation, "policy": job.policy, "local_batch_sizes": sizes}
    return seal(examples.action(window, deltas=(0,) * len(sizes), **(fields | changes)), b"")


def messages_of(reports: Iterable[Report]) -> tuple[list[MetricWindow], list[State], list[Reward]]:
    """What the services make of the reports of a virtual job."""
    windows = [simulated_window(report) for report in reports]
    return windows, [state_of(window) for window in windows], [reward_of(window, Weights(), None) for window in windows]
