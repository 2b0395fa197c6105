"""Small training jobs for tests, to be run by `tests.support.ranks.run_ranks`."""

import io
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from tests.support import examples
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dynamix import trainer as dynamix
from dynamix.schemas.messages.allocation import EXACT, Allocation, Exchange
from dynamix.trainer import Session

NUM_FEATURES = 6
NUM_CLASSES = 4


class Numbered(TensorDataset):
    """Samples that know their own index; the same on every rank."""

    def __init__(self, num_samples: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(num_samples, NUM_FEATURES, generator=generator, dtype=dtype)
        self.targets = torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)
        super().__init__(self.inputs, self.targets, torch.arange(num_samples))


def make_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Three layers, so that the gradient falls into several buckets when they are small."""
    torch.manual_seed(seed)
    layers = [nn.Linear(NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, NUM_CLASSES)]
    return nn.Sequential(*layers).to(dtype)


def distribute(model: nn.Module) -> DistributedDataParallel:
    """DDP with buckets of some hundred bytes: several of them, as in a real model."""
    return DistributedDataParallel(model, bucket_cap_mb=0.001)


def begin_job(
    data: Any, model: nn.Module | None = None, *, rate: float = 0.05, optimizer: Any = None, **options: Any
) -> tuple[Session, nn.Module, Any]:
    """Attach to a job without a bus that trains by SGD with momentum: session, model and optimizer.

    Without a model, one of the data's type under DDP.
    """
    if model is None:
        model = distribute(make_model(data.inputs.dtype if isinstance(data, Numbered) else torch.float64))
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    chosen: dict[str, Any] = {
        "local_batch_size": 8,
        "min_local_batch_size": 0,
        "policy": "static",
        "connect": False,
        "global_batch": "adaptive",
    } | options
    return dynamix.attach(model, optimizer, data, **chosen), model, optimizer


def train_step(
    session: Session, model: nn.Module, optimizer: Any, batch: Any, wait: Callable[[int, int], None] | None = None
) -> list[int]:
    """One step, as long as `wait(step, samples)` makes it; the indices of the samples that counted."""
    inputs, targets, indices = batch
    loss = nn.functional.cross_entropy(model(inputs), targets)
    if wait is not None:
        wait(session.step_index, session.num_samples)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    used: list[int] = indices[: session.num_samples].tolist()
    session.step(loss)
    return used


def offer(
    session: Session,
    sizes: Sequence[int],
    window: int | None = None,
    split: Literal["fixed", "tracking"] = "fixed",
    exchange: Exchange = EXACT,
    *,
    rate_factor: float = 1.0,
) -> None:
    """Offer sizes, as decided for the window before the current one; all ranks may call it, rank 0's counts."""
    session.offer(
        examples.action(
            session.window if window is None else window,
            job=session.job,
            generation=session.generation,
            allocation=Allocation(tuple(sizes), split, exchange, rate_factor),
            deltas=(0,) * len(sizes),
        )
    )


def kept_messages() -> list[str]:
    """What the trainer warns of in this process from now on."""
    found: list[str] = []
    logging.getLogger("dynamix.trainer").addFilter(lambda record: found.append(record.getMessage()) or False)  # type: ignore[func-returns-value]
    return found


def flat_parameters(model: nn.Module) -> torch.Tensor:
    """All parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gather(mine: Any) -> list[Any]:
    """One object of each rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def straight_and_resumed(
    begin: Callable[[], tuple[Session, nn.Module, Any]], train: Callable[..., list[Any]], cut: int
) -> dict[str, Any]:
    """What `train(session, model, optimizer, until)` returns straight through, and in halves around a checkpoint."""
    session, model, optimizer = begin()
    straight = train(session, model, optimizer, 10**9)
    parameters, place = flat_parameters(model), (session.position, session.local_batch_sizes)

    session, model, optimizer = begin()
    halves = train(session, model, optimizer, cut)
    file = io.BytesIO()
    torch.save([each.state_dict() for each in (model, optimizer, session)], file)
    is_pending = session._run.schedule.newest.local_batch_sizes != session.local_batch_sizes
    session.close()

    file.seek(0)
    session, model, optimizer = begin()
    for part, state in zip((model, optimizer, session), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    halves += train(session, model, optimizer, 10**9)
    session.close()
    return {
        "straight": straight,
        "halves": halves,
        "same_parameters": torch.equal(flat_parameters(model), parameters),
        "same_place": (session.position, session.local_batch_sizes) == place,
        "is_pending": is_pending,
        "generation": session.generation,
    }
