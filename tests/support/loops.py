"""What the tests of training loops share: two unequal ranks, and the gradient of one big batch to compare with."""

from collections.abc import Iterator
from typing import Any

import torch
from tests.support.training import Numbered, gather, make_model
from torch import nn

from dynamix.trainer import Session

OPTIONS: dict[str, Any] = {"local_batch_size": (9, 40), "min_local_batch_size": 0, "window_steps": 1, "connect": False}
"""Two unequal ranks, a window per step, no bus."""

SIZES = [(9, 40), (50, 3), (0, 20), (17, 17)]
"""What the loops move through."""


MOVING: dict[str, Any] = {"local_batch_size": (9, 4), "window_steps": 1, "max_lag_windows": 9}
"""A job whose steps are of the sizes `MOVES` in turn."""

MOVES = [(9, 4), (13, 0), (3, 20), (17, 17)]


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean loss of a batch of `Numbered`."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def gradient_of(model: nn.Module) -> torch.Tensor:
    """All gradients in one vector."""
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def whole_gradient(data: Numbered, used: list[int], seed: int = 0) -> torch.Tensor:
    """The gradient of one big batch, on one process."""
    model = make_model(seed=seed)
    nn.functional.cross_entropy(model(data.inputs[used].double()), data.targets[used]).backward()
    return gradient_of(model)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, over the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def gathered(indices: list[int]) -> list[int]:
    """The samples of all ranks."""
    return [index for each in gather(indices) for index in each]


def train_compared(session: Session, model: nn.Module, optimizer: Any, data: Numbered) -> Iterator[float]:
    """Train an epoch; yields before each update the error of the gradient against that of one big batch."""
    parameter = next(model.parameters())
    for inputs, targets, indices in session.loader:
        optimizer.zero_grad()
        moved = inputs.to(parameter.device, parameter.dtype, non_blocking=True)
        loss = nn.functional.cross_entropy(model(moved), targets.to(parameter.device, non_blocking=True))
        loss.backward()
        used = gathered(indices[: session.num_samples].tolist())
        yield relative_error(gradient_of(model).double().cpu(), whole_gradient(data, used))
        optimizer.step()
        session.step(loss)
