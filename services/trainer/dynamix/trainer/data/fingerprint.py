"""The fingerprint of a data set: by it the ranks find out that each was given a part, or data of its own.

Without it that would pass unseen where the parts are equally long: every rank would use a slice of its own part. It is
taken from the first and the last sample where reading them costs nothing and changes nothing.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

ONE_PART = (
    "must be the same on all ranks, session.loader gives each its part. Take out its division by rank (islice by rank, "
    "Subset, shard, split_dataset_by_node, split_by_node), or seed the random numbers that it is made of"
)
"""The fix, for an error."""


def fingerprint_of(dataset: Any) -> int:
    """A number by which data sets of the same kind and length differ; the same for all of which nothing is known."""
    return digest(list(_ends(dataset)))


def _ends(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, TensorDataset):
        yield from ((tensor[0], tensor[-1]) for tensor in dataset.tensors)
    elif isinstance(dataset, Subset):
        yield int(dataset.indices[0]), int(dataset.indices[-1])
        yield from _ends(dataset.dataset)
    elif isinstance(dataset, list | tuple):
        yield dataset[0], dataset[-1]
    elif hasattr(dataset, "with_format") and hasattr(dataset, "num_rows"):  # of Hugging Face's datasets: undecoded rows
        rows = dataset.with_format("arrow")
        yield from (rows[index].to_pylist() for index in (0, dataset.num_rows - 1))


def divides_by_rank(stream: Any) -> str | None:
    """What divides a stream by rank, where its class tells."""
    if getattr(stream, "_distributed", None) is not None:  # of Hugging Face's datasets
        return "split_dataset_by_node"
    names = {getattr(stage, "__name__", "") for stage in stages_of(stream)}
    return next((name for name in ("split_by_node", "single_node_only") if name in names), None)


def makes_batches(stream: Any) -> bool:
    """Whether a webdataset pipeline yields batches instead of samples."""
    return any(getattr(getattr(stage, "f", None), "__name__", "") == "_batched" for stage in stages_of(stream))


def seeds_of(stream: Any) -> list[Any]:
    """The seeds by which a webdataset pipeline shuffles: orders of a few shards can differ and begin alike."""
    stages = stages_of(stream)
    curried = [stage.kw for stage in stages if any(getattr(stage, "args", ()))]  # shuffle(0) shuffles nothing
    return curried + [stage.seed for stage in stages if getattr(stage, "bufsize", 0)]


def stages_of(stream: Any) -> list[Any]:
    """The stages of a webdataset pipeline; of anything else none."""
    stages = getattr(stream, "pipeline", None)
    return stages if isinstance(stages, list) else []


def digest(value: Any) -> int:
    """A number that differs between samples of numbers, text and tensors."""
    return zlib.crc32(b"\0".join(_pieces(value)))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _pieces(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _pieces(item)
    elif value is None or isinstance(value, str | bytes | int | float):
        yield repr(value).encode()
    else:
        yield type(value).__name__.encode()
