"""Shared by the adapters of frameworks: batches of a session that is attached with the first of them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dynamix.trainer.data.plan import ReferenceSteps
from dynamix.trainer.data.source import read_loader
from dynamix.trainer.gradient.models import unwrapped
from dynamix.trainer.session import Session


def require_ddp(model: torch.nn.Module, framework: str) -> None:
    """Make sure that a hook weighs where a framework owns the backward pass, out of reach of `session.scale_loss`.

    Raises:
        ValueError: for FSDP, DeepSpeed and whatever else shards the model over several ranks.
    """
    inner = unwrapped(model)
    if dist.is_initialized() and dist.get_world_size() > 1 and not isinstance(inner, DistributedDataParallel):
        raise ValueError(
            f"{framework} trains a {type(inner).__name__} here, which dynamix cannot weigh from outside: use DDP, or, "
            "for FSDP, a loop of your own with session.scale_loss(loss).backward()"
        )


def batches_per_epoch(loader: DataLoader[Any], world_size: int, steps: int) -> int:
    """Batches of a rank in an epoch, `steps` to each optimizer step; raises as `read_loader`."""
    source = read_loader(loader, world_size)
    global_batch_size = source.local_batch_size * steps * world_size
    return steps * ReferenceSteps(source.orders.identity.num_samples, global_batch_size, source.drop_last).per_epoch


class SessionBatches:
    """The batches of a session that is attached with the first of them, when model and optimizer are set up."""

    def __init__(self, attached: Callable[[], Session], loader: DataLoader[Any], num_batches: int | None) -> None:
        """`num_batches` of an epoch; `None` where steps vary in length. Trainers log the length of `dataset`."""
        self.attached = attached
        self.dataset = loader.dataset
        self._loader = loader
        self._num_batches = num_batches

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError("with an adaptive global batch an epoch has no fixed number of batches")
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        yield from epoch_of(self.attached(), self._loader)


def epoch_of(session: Session, loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of the next epoch, whose number the framework would set in the sampler of its `loader`."""
    inner: Any = getattr(loader, "base_dataloader", loader).batch_sampler
    sampler = getattr(getattr(inner, "batch_sampler", inner), "sampler", None)
    if (set_epoch := getattr(sampler, "set_epoch", None)) is not None:
        set_epoch(session.loader.next_start().epoch)
    yield from session.loader
