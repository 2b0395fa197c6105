"""The parameters of a model in a round of local steps: where they began, and by how much they moved."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dynamix.trainer.communication.model_exchange import ModelExchange
from dynamix.trainer.exchange.codec import BucketPart, BucketView

BUCKET_BYTES = 25 * 2**20
"""DDP's own, where a model does not say."""


class FlatBucket:
    """Some parameters of one model, one behind the other: where they began, and how far they came."""

    def __init__(self, number: int, named: Sequence[tuple[str, Tensor]]) -> None:
        """Note where all of them are now, in float32 or float64."""
        self._tensors = [each.detach() for _, each in named]
        is_double = any(each.dtype == torch.float64 for each in self._tensors)
        self._start = self._tensors[0].new_empty(
            sum(each.numel() for each in self._tensors), dtype=torch.float64 if is_double else torch.float32
        )
        parts, begin = [], 0
        for key, tensor in named:
            parts.append(BucketPart(key, begin, begin + tensor.numel(), tensor.shape))
            begin += tensor.numel()
        self._parts = tuple(parts)
        self._number = number
        for place, tensor in self._places(self._start):
            place.copy_(tensor)

    def moved(self, weight: float) -> BucketView:
        """How far they moved, times this rank's weight."""
        flat = torch.empty_like(self._start)
        for place, tensor in self._places(flat):
            place.copy_(tensor)
        flat.sub_(self._start)
        if weight:
            flat.mul_(weight)
        else:
            flat.zero_()  # not times zero: what does not count may be anything
        return BucketView(self._number, flat, self._parts)

    def move(self, by: Tensor) -> None:
        """Put them where they began, moved by so much."""
        self._start.add_(by)
        for place, tensor in self._places(self._start):
            tensor.copy_(place)

    def _places(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for part, tensor in zip(self._parts, self._tensors, strict=True):
            yield flat[part.start : part.stop].view(tensor.shape), tensor


def buckets_of(model: torch.nn.Module, exchange: ModelExchange) -> Iterator[FlatBucket]:
    """The parameters of a model that are trained, in buckets as large as DDP's."""
    most = getattr(model, "bucket_bytes_cap", BUCKET_BYTES)
    number, size = 0, 0
    held: list[tuple[str, Tensor]] = []
    last: Tensor | None = None
    for parameter, key in exchange.keys.items():
        if not parameter.requires_grad:
            continue
        is_alike = last is None or (parameter.dtype, parameter.device) == (last.dtype, last.device)
        if held and (size >= most or not is_alike):
            yield FlatBucket(number, held)
            number, held, size = number + 1, [], 0
        held.append((key, parameter))
        size += parameter.numel() * parameter.element_size()
        last = parameter
    if held:
        yield FlatBucket(number, held)
