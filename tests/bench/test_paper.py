"""A long job that is killed goes on where it was kept, as if nothing had happened."""

from functools import partial
from pathlib import Path

import bench.paper
import pytest
from bench.paper import SampledCluster

from dynamix.arbitrator.policies.registry import policy_named
from dynamix.lab.simulator.episode import Episode, run_episode, workload_data
from dynamix.lab.simulator.scenario import Network, Scenario, Workers

SCENARIO = Scenario(
    family="paper",
    workload="ncf-small",
    workers=(Workers(samples_per_s=4000, count=2), Workers(samples_per_s=1000, count=2)),
    target_accuracy=1.0,
    fixed_time_s=1.0,
    time_limit_s=100.0,
    optimizer="adam",
    learning_rate=0.002,
    network=Network(bandwidth_mbit_s=10.0),
    exchange="local",
)


class _KilledError(Exception):
    pass


def test_a_killed_job_ends_as_one_that_ran_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.paper, "KEPT_EVERY_S", 0.0)

    def run(file: Path, windows: int = 1_000_000) -> Episode:
        left = iter(range(windows))

        def count(_: object) -> None:
            if next(left, None) is None:
                raise _KilledError

        return run_episode(
            SCENARIO,
            policy_named("rule"),
            data=workload_data(SCENARIO.workload, None),
            seed=0,
            on_window=count,
            make_cluster=partial(SampledCluster.begun, file, 20_000),  # type: ignore[arg-type] # called like it
        )

    whole = run(tmp_path / "whole.job")
    with pytest.raises(_KilledError):
        run(tmp_path / "killed.job", windows=5)
    assert run(tmp_path / "killed.job") == whole
    assert whole.samples_seen >= 20_000
    assert any(action.allocation.exchange.every > 1 for action in whole.actions)
