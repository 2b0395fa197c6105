"""Models whose gradients depend on their parameters, so that ranks that step alone come apart."""

import torch
from torch import nn


class Curved(nn.Module):
    """A model whose gradient depends on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(inputs)
        return result


class Normalised(nn.Module):
    """A model with buffers: means that move, a count, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(40, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.register_buffer("constant", torch.tensor([0.1, 0.7, float("inf")]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        twice = inputs.repeat(2, 1) if len(inputs) == 1 else inputs  # BatchNorm refuses a single sample
        result: torch.Tensor = self.layers(twice)[: len(inputs)]
        return result


def mean_loss(outputs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The mean squared difference."""
    return (outputs - factors).square().mean()


def momentum_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with a state that ranks can differ in."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
