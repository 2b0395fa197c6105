"""Training whose gradients are whole numbers, so that every order of additions gives the same bits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

from dynamix import trainer as dynamix
from dynamix.trainer import Session

SIZES = (4, 12)


class Whole(TensorDataset):
    """Samples of small whole numbers, or of others; the same on every rank."""

    def __init__(self, *, whole: bool = True, num_samples: int = 640) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randint(-3, 4, (num_samples, 40), generator=generator).float()
        if not whole:
            self.inputs += torch.rand(self.inputs.shape, generator=generator)
        self.factors = torch.randint(-2, 3, (num_samples, 1), generator=generator).float()
        super().__init__(self.inputs, self.factors)


class Heads(nn.Module):
    """Linear layers side by side: with `whole_loss` every gradient is a whole number, whatever the parameters are."""

    def __init__(self, dtype: torch.dtype = torch.float32, more: int = 0) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(40, width) for width in (3, 40, 64, 7, *([more] if more else []))])
        self.to(dtype)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([head(inputs) for head in self.heads], dim=1)


class Sometimes(Heads):
    """A model of which one rank does not use a layer."""

    def __init__(self, *, uses_all: bool) -> None:
        super().__init__()
        self.uses_all = uses_all

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        used = self.heads if self.uses_all else self.heads[1:]
        return torch.cat([head(inputs) for head in used], dim=1)


def whole_loss(outputs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return (outputs * factors).sum()


def attach(model: nn.Module, optimizer: Any, data: Dataset[Any], **options: Any) -> Session:
    chosen: dict[str, Any] = {
        "local_batch_size": SIZES,
        "min_local_batch_size": 0,
        "window_steps": 2,
        "policy": "static",
        "global_batch": "adaptive",
        "reduction": "sum",
        "max_lag_windows": 9,
        "learning_rate_rule": "none",
        "connect": False,
    }
    return dynamix.attach(model, optimizer, data, **(chosen | options))


@contextmanager
def whole_job(
    data: Dataset[Any] | None = None,
    model: nn.Module | None = None,
    *,
    rate: float = 2**-6,
    momentum: float = 0.0,
    **options: Any,
) -> Iterator[tuple[Session, nn.Module, torch.optim.Optimizer]]:
    """A session, closed at the end of the block, its model (`Heads`) and its optimizer (SGD)."""
    model = distributed() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    with attach(model, optimizer, Whole() if data is None else data, **options) as session:
        yield session, model, optimizer


def train_until(
    num_steps: int, session: Session, model: nn.Module, optimizer: Any, criterion: Any = whole_loss
) -> None:
    """Train on until the session has made so many steps, or its epoch ends."""
    for batch in session.loader:
        train_step(session, model, optimizer, batch, criterion)
        if session.step_index == num_steps:
            break


def train_step(session: Session, model: nn.Module, optimizer: Any, batch: Any, criterion: Any = whole_loss) -> None:
    loss = _loss(session, model, batch, criterion)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    session.step(loss)


def train_models(session: Session, models: Sequence[nn.Module], optimizers: Sequence[Any], num_steps: int) -> None:
    """Train several models with the same batches; their optimizers step where gradients are synchronized."""
    for batch in session.loader:
        for model in models:
            _loss(session, model, batch).backward()
        if session.sync_gradients:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        session.step()
        if session.step_index == num_steps:
            break


def _loss(session: Session, model: nn.Module, batch: Any, criterion: Any = whole_loss) -> torch.Tensor:
    inputs, factors = batch
    dtype = next(model.parameters()).dtype
    loss: torch.Tensor = criterion(model(inputs.to(dtype)), factors.to(dtype))
    return loss if session.num_samples else loss * torch.nan  # a dummy batch may do what it likes


def distributed(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model or Heads(), bucket_cap_mb=0.005, **options)


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
