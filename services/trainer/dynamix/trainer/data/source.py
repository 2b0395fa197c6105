"""The source of the samples: which orders suit the script's data set."""

from collections.abc import Sized
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from .fingerprint import stages_of
from .orders import Orders, OwnSampler, Permutations, SampledOrders
from .sampler import PlanSampler, SamplerOptions
from .schedule import Schedule
from .stream import StreamOrders, StreamSampler


def orders_of(dataset: Dataset[Any], sampler: OwnSampler | None, seed: int, *, shuffle: bool) -> Orders:
    """Which samples an epoch has. With a sampler of its own a data set needs no length.

    Raises:
        TypeError: when the data set is a loader.
        ValueError: when it cannot be used, naming the fix.
    """
    if isinstance(dataset, DataLoader) or any(isinstance(stage, DataLoader) for stage in stages_of(dataset)):
        raise TypeError(
            f"the data set is a {type(dataset).__name__}: pass its data set and its options; session.loader replaces "
            "it, and session.state_dict() saves its place"
        )
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


def sampler_of(orders: Orders, schedule: Schedule, options: SamplerOptions) -> PlanSampler:
    """What draws this rank's batches."""
    if isinstance(orders, StreamOrders):
        return StreamSampler(orders, schedule, **options)
    return PlanSampler(orders, schedule, **options)
