import math
from typing import Any

import pytest
import torch

from dynamix.trainer.gradient.learning_rate import correct_second_moments, scale_every_step


def _one_parameter() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.ones_like(parameter)
    return parameter


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_rule_does_not_compound_with_a_scheduler(as_tensor: bool) -> None:
    parameter = _one_parameter()
    rate = torch.tensor(0.1, dtype=torch.float64) if as_tensor else 0.1
    optimizer = torch.optim.SGD([parameter], lr=rate)
    ratios = iter([1.0, 4.0, 9.0, 0.25])
    handles = scale_every_step(optimizer, lambda: math.sqrt(next(ratios)))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    seen, taken = [], []
    for _ in range(4):
        before = parameter.item()
        optimizer.step()
        taken.append(before - parameter.item())
        seen.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step()
    assert seen == pytest.approx([0.1, 0.05, 0.025, 0.0125], rel=1e-12)
    assert taken == pytest.approx([0.1, 2 * 0.05, 3 * 0.025, 0.5 * 0.0125], rel=1e-12)

    for handle in handles:
        handle.remove()
    before = parameter.item()
    optimizer.step()
    assert before - parameter.item() == pytest.approx(0.00625, rel=1e-12)


def test_every_group_keeps_its_own_rate() -> None:
    first, second = _one_parameter(), _one_parameter()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.01}])
    scale_every_step(optimizer, lambda: 3.0)
    optimizer.step()
    assert (first.item(), second.item()) == pytest.approx((-3.0, -0.03))
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.01]


def test_a_step_that_raises_leaves_no_factor_behind() -> None:
    parameter = _one_parameter()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scale_every_step(optimizer, lambda: 2.0)

    def failing() -> float:
        raise RuntimeError("the closure failed")

    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(failing)
    optimizer.step()
    assert parameter.item() == pytest.approx(-0.2)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"weight_decay": 0.1}])
def test_second_moments_of_a_part_of_the_samples_have_the_noise_of_all(options: dict[str, Any]) -> None:
    """Gradients 2 and 0 in turn: the moment is 1 of the mean and a quarter of the variance 1, then that of any step."""
    weights = torch.nn.Parameter(torch.zeros(3))
    optimizer, shares = torch.optim.AdamW([weights, _one_parameter()], betas=(0.999, 0.9), **options), [0.25]
    correct_second_moments(optimizer, lambda: shares[0])

    def moment(num_steps: int) -> float:
        for step in range(num_steps):
            weights.grad = torch.full_like(weights, 2.0 * (step % 2))
            optimizer.step()
        return float(optimizer.state[weights]["exp_avg_sq"].mean())

    assert (moment(1000) + moment(999)) / 2 == pytest.approx(1.25, rel=0.01)
    shares[0] = 1.0
    assert (moment(1000) + moment(999)) / 2 == pytest.approx(2.0, rel=0.01)
