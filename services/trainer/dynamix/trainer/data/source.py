"""The data of a job: from the script's own `DataLoader`, or from a data set and arguments of `attach`."""

from collections.abc import Mapping, Sized
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from .loader import LoaderOptions
from .orders import DistributedOrders, InterleavedOrders, Orders, OwnSampler, Permutations, SampledOrders
from .stream import StreamOrders


class Source(NamedTuple):
    """What is trained on, in which order and how it is loaded."""

    dataset: Dataset[Any]
    orders: Orders
    local_batch_size: Any
    """As `attach` takes it; of a script's loader the samples of a rank's step."""
    drop_last: bool
    options: LoaderOptions
    loader: DataLoader[Any] | None = None
    """The script's own."""


def source_of(
    data: Dataset[Any] | DataLoader[Any],
    *,
    local_batch_size: Any,
    gradient_accumulation_steps: int,
    seed: int,
    shuffle: bool | None,
    drop_last: bool | None,
    sampler: OwnSampler | None,
    options: LoaderOptions,
    world_size: int,
) -> Source:
    """The data of a job by arguments of `attach`; `None` leaves them to a script's loader, or to the default.

    Raises:
        TypeError: when sizes are missing.
        ValueError: when the data cannot be used, or an argument contradicts the loader, naming the fix.
    """
    if isinstance(data, DataLoader):
        given: Mapping[str, Any] = {"shuffle": shuffle, "drop_last": drop_last, "sampler": sampler, **options}
        if named := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{', '.join(named)}: the loader says it, give it to your DataLoader instead of attach")
        found = read_loader(data, world_size, seed)
        size = found.local_batch_size * gradient_accumulation_steps if local_batch_size is None else local_batch_size
        return found._replace(local_batch_size=size)
    if local_batch_size is None:
        raise TypeError("attach needs local_batch_size=... beside a data set; a DataLoader brings its own")
    return Source(
        data, _orders_of(data, sampler, seed, shuffle=shuffle is not False), local_batch_size, bool(drop_last), options
    )


def _orders_of(dataset: Dataset[Any], sampler: OwnSampler | None, seed: int, *, shuffle: bool) -> Orders:
    """The order of an epoch's samples. With a sampler of its own a data set needs no length."""
    if isinstance(dataset, IterableDataset):
        if sampler is not None:
            raise ValueError("sampler needs a data set with __getitem__: a stream (IterableDataset) has its own order")
        return StreamOrders(dataset, seed)
    if sampler is not None:
        return SampledOrders(sampler, seed)
    if isinstance(dataset, Sized) and hasattr(dataset, "__getitem__") and len(dataset) > 0:
        return Permutations(len(dataset), seed, shuffle=shuffle)
    raise ValueError(
        "the data set must be map-style (__getitem__ by index, and a __len__ of at least 1), or an IterableDataset "
        "whose __iter__ begins the stream again"
    )


def read_loader(loader: DataLoader[Any], world_size: int, seed: int = 0) -> Source:
    """What a script's `DataLoader` says, or one that Accelerate or Lightning has made of it.

    Raises:
        ValueError: when it makes batches in a way of its own.
    """
    loader = getattr(loader, "base_dataloader", loader)  # inside of Accelerate's
    kind = type(loader).__name__
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ValueError(f"the loader is a {kind}, whose own __iter__ dynamix cannot repeat: use torch's DataLoader")
    options: Any = {name: getattr(loader, name) for name in LoaderOptions.__annotations__}
    if isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None:
        orders: Orders = StreamOrders(loader.dataset, seed)
        return Source(loader.dataset, orders, loader.batch_size, loader.drop_last, options, loader)
    outer: Any = loader.batch_sampler
    inner = getattr(outer, "batch_sampler", outer)  # Accelerate's shard of a batch sampler
    if type(inner) is not BatchSampler:
        how = "has batch_size=None" if inner is None else f"draws batches by {type(inner).__name__}"
        raise ValueError(
            f"the training loader {how}, dynamix makes the batches itself, of other sizes: give DataLoader a "
            "batch_size, and shuffle or a sampler of single samples"
        )
    drawn: Any = inner.sampler
    size = inner.batch_size // world_size if getattr(outer, "split_batches", False) else inner.batch_size
    if outer is not inner or (world_size == 1 and not isinstance(drawn, DistributedSampler)):
        orders = _orders_of_all(drawn, loader)
    elif type(drawn) is DistributedSampler:
        if drawn.num_replicas != world_size:
            raise ValueError(f"the DistributedSampler divides by {drawn.num_replicas} ranks, but {world_size} train")
        orders = DistributedOrders(drawn)
    else:
        orders = InterleavedOrders(drawn, _seed_of(drawn, loader), world_size)
    return Source(loader.dataset, orders, size, inner.drop_last, options, loader)


def _orders_of_all(sampler: Any, loader: DataLoader[Any]) -> Orders:
    """The order of a sampler that draws for all ranks."""
    if type(sampler) is SequentialSampler:
        return Permutations(len(sampler), 0, shuffle=False)
    return SampledOrders(sampler, _seed_of(sampler, loader), sets_epoch=False)


def _seed_of(sampler: Any, loader: DataLoader[Any]) -> int:
    """The seed that the script gave to the numbers which its sampler draws by."""
    for generator in (getattr(sampler, "generator", None), loader.generator):
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return torch.initial_seed()
