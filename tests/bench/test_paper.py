"""Long jobs: a killed one goes on where it was kept, and one that is led as one before it is not trained again."""

from functools import partial
from pathlib import Path

import bench.paper
import pytest
import torch
from bench.paper import OtherDecisionError, PatchProduct, SampledCluster

from dynamix.arbitrator.policies.registry import policy_named
from dynamix.lab.simulator.cluster import VirtualCluster
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


def _run(file: Path, *, policy: str = "rule", windows: int = 1_000_000) -> Episode:
    left = iter(range(windows))

    def count(_: object) -> None:
        if next(left, None) is None:
            raise _KilledError

    return run_episode(
        SCENARIO,
        policy_named(policy),
        data=workload_data(SCENARIO.workload, None),
        seed=0,
        on_window=count,
        make_cluster=partial(SampledCluster.begun, file, 20_000),  # type: ignore[arg-type] # called like it
    )


def test_a_killed_job_ends_as_one_that_ran_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _run(tmp_path / "whole.job")
    monkeypatch.setattr(bench.paper, "KEPT_EVERY_S", 0.0)
    with pytest.raises(_KilledError):
        _run(tmp_path / "killed.job", windows=5)
    monkeypatch.undo()
    assert _run(tmp_path / "killed.job") == whole
    assert whole.samples_seen >= 20_000
    assert any(action.allocation.exchange.every > 1 for action in whole.actions)


def test_only_a_policy_that_decides_the_same_takes_the_job_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ended.job"
    whole = _run(file)
    with pytest.raises(OtherDecisionError):
        _run(file, policy="static")
    trained: list[int] = []
    step = VirtualCluster._step
    monkeypatch.setattr(VirtualCluster, "_step", lambda self: (trained.append(self.position.step), step(self)))
    assert _run(file) == whole
    assert trained == list(range(SCENARIO.window_steps))  # the first window, to compare it


def test_a_product_of_patches_is_a_convolution() -> None:
    generator = torch.Generator().manual_seed(0)
    images, weight, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True)
        for size in ((5, 3, 4, 4), (7, 3, 3, 3), (7,))
    )
    outputs = [torch.conv2d(images, weight, bias, padding=1), PatchProduct.apply(images, weight, bias)]
    found = [[out, *torch.autograd.grad(out.square().sum(), (images, weight, bias))] for out in outputs]
    torch.testing.assert_close(*found)
