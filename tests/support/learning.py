"""Small courses of learning: seconds long, on made-up data."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import virtual

from dynamix.arbitrator.learned.policy_file import PPOSettings
from dynamix.lab.learning import LearningPlan, plan_named, run
from dynamix.lab.simulator.scenario import Scenario
from dynamix.lab.workloads import Data

SETTINGS = PPOSettings(hidden_sizes=(8,), num_minibatches=2, update_epochs=2)


def scenarios() -> tuple[Scenario, ...]:
    """Two to learn from and one that must not be."""
    easy = virtual.scenario(
        name="two-speeds", target_accuracy=0.65, time_limit_s=2.0, evaluate_every_s=0.05, window_steps=2
    )
    return (
        easy,
        msgspec.structs.replace(easy, name="slow-start", initial_local_batch_size=64, window_steps=3),
        msgspec.structs.replace(easy, name="held-back", learn=False),
    )


def plan(policy: str = "ppo", **changes: Any) -> LearningPlan:
    """Three updates on a small surrogate."""
    fields: dict[str, Any] = {
        "num_updates": 3,
        "jobs_per_scenario": 2,
        "windows_per_job": 8,
        "validate_every": 2,
        "num_validation_seeds": 1,
        "num_score_seeds": 1,
        "settings": SETTINGS,
    }
    return plan_named(policy, scenarios(), **(fields | changes))


def with_made_up_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes in this process train on `virtual.data`."""
    made = virtual.data()

    def data(workload: str, directory: Path | None) -> Data:  # noqa: ARG001 - the loader's arguments
        return made

    monkeypatch.setattr(run, "workload_data", data)
