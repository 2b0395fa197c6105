"""N virtual workers against one big batch, in plain PyTorch and float64."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests.support import virtual
from torch import nn

from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.simulator.gradients import (
    Gradients,
    gradients_of,
)
from dynamix.lab.workloads import Data, Part, Workload, make_optimizer, workload_named
from dynamix.trainer.data.orders import epoch_order
from dynamix.trainer.data.plan import Counts, StepPlan

MLP, CNN = workload_named("fashion-14-mlp"), workload_named("fashion-14-cnn")
UNEVEN = ((20, 20, 20, 20), (61, 3, 0, 7), (1, 40, 2, 40), (33, 0, 0, 1))
NUM_STEPS = 30
SINGLE, DOUBLE = torch.zeros(1), torch.zeros(1, dtype=torch.float64)


def close(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("workload", [MLP, CNN], ids=lambda workload: workload.name)
def test_steps_of_unequal_workers_equal_steps_on_one_big_batch(workload: Workload, optimizer: str) -> None:
    data = virtual.data(500, dtype=torch.float64)
    scenario = virtual.scenario(
        workload=workload.name,
        optimizer=optimizer,
        learning_rate=0.05 if optimizer == "sgd" else 0.002,
        weight_decay=0.01,
        window_steps=3,
        lag_windows=0,
        min_local_batch_size=0,
        time_limit_s=1e6,
        evaluate_every_s=1e6,
        noise_every=2,
    )
    cluster = VirtualCluster(scenario, data, seed=3, policy="static", initial_local_batch_size=20)
    while cluster.position.step < NUM_STEPS:
        cluster.run_window()
        cluster.offer(virtual.action(cluster.job, cluster.window - 1, UNEVEN[cluster.window % len(UNEVEN)]))
    expected = _one_big_batch(workload, optimizer, [sum(UNEVEN[step // 3 % len(UNEVEN)]) for step in range(NUM_STEPS)])
    assert close(_parameters(cluster), expected) < 1e-12


def _parameters(cluster: VirtualCluster) -> torch.Tensor:
    return cluster.gradients.parameters.detach()


def _one_big_batch(workload: Workload, optimizer: str, sizes: Sequence[int]) -> torch.Tensor:
    """The same training in plain PyTorch: one model, one batch per step, the learning rate times sqrt(B / 128)."""
    torch.manual_seed(3)
    model = workload.model().double()
    rate = 0.05 if optimizer == "sgd" else 0.002
    plain = make_optimizer(optimizer, model.parameters(), rate, weight_decay=0.01)
    inputs, labels = virtual.data(500, dtype=torch.float64).train
    epoch, offset = 0, 0
    for size in sizes:
        if offset == 500:
            epoch, offset = epoch + 1, 0
        left = 500 - offset
        taken = min(size, left) if left <= size or left >= 2 * size else (left + 1) // 2
        batch = torch.from_numpy(epoch_order(500, 3, epoch, shuffle=True)[offset : offset + taken])
        offset += len(batch)
        plain.param_groups[0]["lr"] = rate * (size / 128) ** 0.5
        plain.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        plain.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("workload", [MLP, CNN], ids=lambda workload: workload.name)
@pytest.mark.parametrize("sizes", UNEVEN)
def test_norms_losses_and_correct_answers_are_those_of_each_workers_own_batch(
    workload: Workload, sizes: tuple[int, ...]
) -> None:
    gradients = gradients_of(workload, seed=5, like=DOUBLE)
    inputs, labels = (tensor[: sum(sizes)] for tensor in virtual.data(200, dtype=torch.float64).train)
    plan = StepPlan(0, 0, 0, Counts(sizes))
    measured = gradients.step(inputs, labels, plan, measured=True)
    gradient = gradients.parameters.grad.clone()
    plain = gradients.step(inputs, labels, plan, measured=False)
    assert close(gradients.parameters.grad, gradient) < 1e-12
    assert plain.norms is None
    for rank, (start, count) in enumerate(zip(plan.counts.starts, sizes, strict=False)):
        loss, correct, norm = _alone(gradients, workload, inputs[start : start + count], labels[start : start + count])
        for sums in (measured, plain):
            assert sums.loss[rank] == pytest.approx(loss, rel=1e-12)
            assert sums.num_correct[rank] == correct
        assert measured.norms.local[rank] == pytest.approx(norm, rel=1e-12)
    assert measured.norms.reduced == pytest.approx(float(gradient @ gradient), rel=1e-12)


def _alone(
    gradients: Gradients, workload: Workload, inputs: torch.Tensor, labels: torch.Tensor
) -> tuple[float, float, float]:
    """Summed loss, correct answers and |g_i|^2 of one worker, by autograd on its own batch."""
    if len(labels) == 0:
        return 0.0, 0.0, 0.0
    outputs = gradients.model(inputs)
    parts = torch.autograd.grad(workload.loss(outputs, labels), list(gradients.model.parameters()))
    norm = sum(float((part * part).sum()) for part in parts)
    return workload.loss(outputs, labels, "sum").item(), workload.num_correct(outputs, labels), norm


def test_more_workers_than_a_block_holds_are_measured_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, inputs = (1, 2, 0, 3, 4, 5, 6), virtual.data(200, dtype=torch.float64).train
    plan = StepPlan(0, 0, 0, Counts(sizes))
    whole = gradients_of(MLP, seed=1, like=DOUBLE)
    monkeypatch.setattr("dynamix.lab.simulator.gradients.MAX_BLOCK", 3 * whole.parameters.numel())
    parts = gradients_of(MLP, seed=1, like=DOUBLE)
    norms = [each.step(*(t[:21] for t in inputs), plan, measured=True).norms for each in (whole, parts)]
    assert np.allclose(norms[0].local, norms[1].local, rtol=1e-12)
    assert close(parts.parameters.grad, whole.parameters.grad) < 1e-12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cluster_trains_where_its_data_lies() -> None:
    made = virtual.data(500, dtype=torch.float64)
    there = Data(*(Part(*(tensor.cuda() for tensor in part)) for part in made))
    scenario = virtual.scenario(workload=CNN.name, time_limit_s=0.5, fixed_time_s=0.5, target_accuracy=1.0)
    runs = [VirtualCluster(scenario, data, seed=3, policy="static") for data in (made, there)]
    for run in runs:
        while run.run_window():
            pass
    assert close(_parameters(runs[1]).cpu(), _parameters(runs[0])) < 1e-9
    assert runs[1].time_s == runs[0].time_s
