"""Traits of a framework's `DataLoader` that `attach` needs, read from the loader."""

from collections.abc import Callable, Iterator, Sized
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler

from dynamix.trainer.data.loader import LoaderOptions
from dynamix.trainer.data.plan import ReferenceSteps
from dynamix.trainer.gradient.models import unwrapped
from dynamix.trainer.session import Session

LOADER_OPTIONS = tuple(name for name in LoaderOptions.__annotations__ if name != "generator")
"""Taken as they are; a generator would be that of another order."""


class LoaderTraits(NamedTuple):
    """Traits of a loader, as arguments of `attach`."""

    dataset: Dataset[Any]
    num_samples: int
    """Samples of an epoch."""
    micro_batch_size: int
    """Samples in a rank's batch."""
    options: dict[str, Any]
    """`shuffle` or `sampler`, `drop_last`, and how data are loaded."""

    def batches_per_epoch(self, world_size: int, steps: int) -> int:
        """Batches of a rank in an epoch of plain training, `steps` to each optimizer step."""
        global_batch_size = self.micro_batch_size * steps * world_size
        return steps * ReferenceSteps(self.num_samples, global_batch_size, self.options["drop_last"]).per_epoch

    def arguments(self, steps: int) -> dict[str, Any]:
        """Arguments of `attach` for a loop with so many gradient accumulation steps."""
        size = self.micro_batch_size * steps
        return {**self.options, "local_batch_size": size, "gradient_accumulation_steps": steps}


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


def traits_of(loader: DataLoader[Any], world_size: int) -> LoaderTraits:
    """Read a `DataLoader`, or what Accelerate and Lightning make of one.

    Raises:
        ValueError: when it makes batches in a way of its own, or divides samples among ranks.
    """
    outer: Any = loader.batch_sampler
    inner = getattr(outer, "batch_sampler", outer)  # Accelerate's shard of a batch sampler
    dataset = loader.dataset
    if type(inner) is not BatchSampler or not isinstance(dataset, Sized):
        raise ValueError(
            f"the training loader draws batches by {type(inner).__name__}, dynamix draws them itself, "
            "from a map-style data set with a length; give DataLoader batch_size and shuffle, no batch_sampler"
        )
    size = inner.batch_size // world_size if getattr(outer, "split_batches", False) else inner.batch_size
    options = {name: getattr(loader, name) for name in LOADER_OPTIONS} | {"drop_last": inner.drop_last}
    sampler: Any = inner.sampler
    if type(sampler) is SequentialSampler or type(sampler) is DistributedSampler:
        return LoaderTraits(dataset, len(dataset), size, options | {"shuffle": getattr(sampler, "shuffle", False)})
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset):
        return LoaderTraits(dataset, len(dataset), size, options | {"shuffle": True})
    if hasattr(sampler, "num_replicas"):
        raise ValueError(
            f"the training loader draws samples by {type(sampler).__name__}, which gives each rank a part of them: "
            "dynamix does that itself; with Lightning, Trainer(use_distributed_sampler=False) leaves your sampler alone"
        )
    return LoaderTraits(dataset, len(sampler), size, options | {"sampler": sampler})


class SessionBatches:
    """The batches of a session that is attached with the first of them, when model and optimizer are set up."""

    def __init__(self, attached: Callable[[], Session], dataset: Any, num_batches: int | None) -> None:
        """`num_batches` of an epoch; `None` where steps vary in length. Trainers log the length of `dataset`."""
        self.attached = attached
        self.dataset = dataset
        self._num_batches = num_batches

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError("with an adaptive global batch an epoch has no fixed number of batches")
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.attached().loader
