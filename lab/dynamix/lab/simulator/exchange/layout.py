"""Layout: the buckets in which the gradient of a model travels, as DDP makes them. Pure.

The last parameters come first, since their gradients are ready first; forwards it is the order of the model. DDP's
buckets hold whole parameters; those of a virtual cluster are as large as each other, so that a parameter may lie in
several, cut between two of its rows.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Size, Tensor, nn

from dynamix.trainer.exchange.codec import BucketPart

T = TypeVar("T")


class BucketLayout(NamedTuple):
    """One bucket, as a range of the vector in which it travels."""

    start: int
    stop: int
    parts: tuple[BucketPart, ...]


class GradientLayout:
    """All buckets of a model whose gradient is one flat vector, in the order of its parameters."""

    def __init__(self, model: nn.Module, num_buckets: int, *, forwards: bool = False) -> None:
        """Cut into `num_buckets`, or as many as there are rows."""
        self._forwards = forwards
        named = [(name, each.shape) for name, each in model.named_parameters() if each.requires_grad]
        self._sizes = [shape.numel() for _, shape in named]
        whole, start = [], 0
        for name, shape in self._ordered(named):
            whole.append(BucketPart(name, start, start + shape.numel(), shape))
            start += shape.numel()
        cuts = sorted({0, start, *(_cut(whole, round(start * n / num_buckets)) for n in range(1, num_buckets))})
        self.num_elements = start
        self.buckets = [BucketLayout(first, stop, _parts(whole, first, stop)) for first, stop in pairwise(cuts)]

    def as_sent(self, gradients: Tensor) -> Tensor:
        """A copy of flat gradients, one per row, in the order in which they travel."""
        return torch.cat(self._ordered(torch.split(gradients, self._sizes, dim=-1)), dim=-1)

    def as_model(self, sent: Tensor, gradient: Tensor) -> None:
        """Write a vector that travelled back in the order of the model."""
        places = self._ordered(torch.split(gradient, self._sizes))
        for place, part in zip(places, torch.split(sent, self._ordered(self._sizes)), strict=True):
            place.copy_(part)

    def _ordered(self, each: Sequence[T]) -> list[T]:
        return list(each) if self._forwards else list(reversed(each))


def _row_length(shape: Size) -> int:
    return shape[1:].numel() if len(shape) > 1 else 1


def _cut(whole: Sequence[BucketPart], target: int) -> int:
    """The boundary of a row that is nearest to a place."""
    part = next(each for each in whole if target <= each.stop)
    length = _row_length(part.shape)
    return part.start + round((target - part.start) / length) * length


def _parts(whole: Sequence[BucketPart], first: int, stop: int) -> tuple[BucketPart, ...]:
    """What lies in a bucket: parameters, and rows of parameters under keys that say which."""
    found = []
    for part in whole:
        start, end = max(part.start, first), min(part.stop, stop)
        if start >= end:
            continue
        key, shape = part.key, part.shape
        if (start, end) != (part.start, part.stop):
            length = _row_length(shape)
            begin, rows = (start - part.start) // length, (end - start) // length
            key, shape = f"{key}[{begin}:{begin + rows}]", Size((rows, *shape[1:]))
        found.append(BucketPart(key, start - first, end - first, shape))
    return tuple(found)
