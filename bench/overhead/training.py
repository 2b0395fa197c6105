"""The model that is trained, and one step of it: in plain DDP, and with a session."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dynamix.runtime.settings import BusSettings
from dynamix.trainer import Session, attach
from dynamix.trainer.data.loader import Loader

WINDOW_STEPS = 20
HIDDEN = {"small": 32, "large": 512}
"""Sizes of the hidden layer: what weighing and norms cost grows with the model, the rest does not."""
LOCAL_BATCH_SIZE = 32
BASE_GLOBAL_BATCH_SIZE = 48
"""Not the batch in use, so that the learning rate is scaled on every step."""

Step = Callable[[], None]


def made_data() -> TensorDataset:
    """Images of noise: what they show does not change what a step costs."""
    return TensorDataset(torch.randn(20_000, 1, 28, 28), torch.randint(0, 10, (20_000,)))


def make_model(hidden: int) -> nn.Module:
    """A small CNN for 28 x 28 images; nearly all of its parameters are in the hidden layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


def plain_arm(data: TensorDataset, hidden: int, pace_s: float) -> tuple[Step, DistributedDataParallel]:
    """A step without a session, and its model: DDP as it is, torch's sampler and loader."""
    model, optimizer = _replica(hidden)
    loader = DataLoader(data, batch_size=LOCAL_BATCH_SIZE, sampler=DistributedSampler(data), drop_last=True)
    batches = _repeat(loader)

    def step() -> None:
        _train_step(model, optimizer, next(batches), pace_s)

    return step, model


def steered_arm(data: TensorDataset, hidden: int, pace_s: float, bus: BusSettings) -> tuple[Step, Session]:
    """A step of the same model with a session."""
    model, optimizer = _replica(hidden)
    session = attach(
        model,
        optimizer,
        data,
        local_batch_size=LOCAL_BATCH_SIZE,
        base_global_batch_size=BASE_GLOBAL_BATCH_SIZE,
        window_steps=WINDOW_STEPS,
        name="overhead",
        policy="static",
        connect=bus,
    )
    batches = _repeat(session.loader)

    def step() -> None:
        session.step(_train_step(model, optimizer, next(batches), pace_s))

    return step, session


def _replica(hidden: int) -> tuple[DistributedDataParallel, torch.optim.SGD]:
    model = DistributedDataParallel(make_model(hidden))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, pace_s: float) -> torch.Tensor:
    """What the user's loop does in one step."""
    inputs, targets = batch
    loss = nn.functional.cross_entropy(model(inputs), targets)
    time.sleep(pace_s)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def _repeat(loader: DataLoader[Any] | Loader) -> Iterator[Any]:
    while True:
        yield from loader
