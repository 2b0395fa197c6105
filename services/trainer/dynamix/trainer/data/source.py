"""The data of a job: from the script's own `DataLoader`, or from a data set and arguments of `attach`."""

import contextlib
import logging
from collections.abc import Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from dynamix.trainer.arguments import AtLeast1, checked

from .loader import LoaderOptions, Source
from .orders import DistributedOrders, InterleavedOrders, Orders, OwnSampler, Permutations, SampledOrders
from .stream import StreamOrders

_log = logging.getLogger("dynamix.trainer")


def source_of(given: Mapping[str, Any], options: LoaderOptions, world_size: int) -> Source:
    """The data of a job by the arguments that `attach` was `given`; `None` leaves them to a loader, or to the default.

    Raises:
        TypeError: when sizes are missing.
        ValueError: when the data cannot be used, or an argument contradicts the loader, naming the fix.
    """
    data, size = given["data"], given["local_batch_size"]
    steps: int = checked("gradient_accumulation_steps", given["gradient_accumulation_steps"], AtLeast1)
    seed = given["seed"] or 0
    if isinstance(data, DataLoader):
        told = ("shuffle", "drop_last", "sampler", *(() if isinstance(data.dataset, IterableDataset) else ("seed",)))
        asked = {**{name: given[name] for name in told}, **options}
        if named := [name for name, value in asked.items() if value is not None]:
            raise ValueError(
                f"{', '.join(named)}: the loader has its own, give it to your DataLoader or sampler, not to attach"
            )
        found = read_loader(data, world_size, seed)
        _check_length(data, steps)
        return found._replace(local_batch_size=found.local_batch_size * steps if size is None else size)
    if size is None:
        raise TypeError("attach needs local_batch_size=... beside a data set; a DataLoader brings its own")
    orders = _orders_of(data, given["sampler"], seed, shuffle=given["shuffle"] is not False)
    return Source(data, orders, size, bool(given["drop_last"]), options)


def _orders_of(dataset: Dataset[Any], sampler: OwnSampler | None, seed: int, *, shuffle: bool) -> Orders:
    """The order of an epoch's samples. With a sampler a data set needs no length."""
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


def _check_length(loader: DataLoader[Any], steps: int) -> None:
    """Refuse a loader without batches; warn if the batches of an epoch do not fill its last step."""
    with contextlib.suppress(TypeError):  # of a stream without a length
        if len(loader) == 0:
            raise ValueError(
                "the loader has no batch, because of drop_last=True and a batch_size above the samples of a rank: "
                "lower batch_size"
            )
        if (rest := len(loader) % steps) and not (dist.is_initialized() and dist.get_rank()):
            _log.warning(
                "the last %d batches of each epoch of the loader do not fill a step of gradient_accumulation_steps=%d: "
                "they become a step of so many smaller batches, which len(loader) counts, or are left out if the "
                "DataLoader has drop_last=True",
                rest,
                steps,
            )


def read_loader(loader: DataLoader[Any], world_size: int, seed: int = 0) -> Source:
    """Read a script's `DataLoader`, or one that Accelerate or Lightning has made of it.

    Raises:
        ValueError: when it makes its own batches.
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
    draws_for_all = outer is not inner or (world_size == 1 and not isinstance(drawn, DistributedSampler))
    if draws_for_all and type(drawn) is SequentialSampler:
        orders = Permutations(len(drawn), 0, shuffle=False)
    elif draws_for_all:
        orders = SampledOrders(drawn, _seed_of(drawn, loader), sets_epoch=False)
    elif type(drawn) is DistributedSampler:
        if drawn.num_replicas != world_size:
            raise ValueError(f"the DistributedSampler divides by {drawn.num_replicas} ranks, but {world_size} train")
        orders = DistributedOrders(drawn)
    else:
        orders = InterleavedOrders(drawn, _seed_of(drawn, loader), world_size)
    return Source(loader.dataset, orders, size, inner.drop_last, options, loader)


def _seed_of(sampler: Any, loader: DataLoader[Any]) -> int:
    """The seed that the script gave to the numbers which its sampler draws by."""
    for generator in (getattr(sampler, "generator", None), loader.generator):
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return torch.initial_seed()
