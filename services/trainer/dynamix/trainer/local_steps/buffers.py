"""The buffers of a model in local steps, which DDP would broadcast in each forward pass."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dynamix.trainer.communication.model_exchange import ModelExchange


class SharedBuffers:
    """The buffers that DDP broadcasts: as rank 0 has them when local steps begin, then averaged as parameters are."""

    def __init__(self, tensors: Sequence[Tensor], exchange: ModelExchange, *, is_first: bool) -> None:
        """A collective; `is_first` is rank 0."""
        self._tensors = [torch.view_as_real(each) if each.is_complex() else each for each in tensors]
        self._exchange = exchange
        self._is_first = is_first
        self._starts: list[Tensor] = []
        for tensor, value in zip(self._tensors, self._summed(float(is_first), lambda mine, _: mine), strict=True):
            tensor.copy_(value)

    def begin(self) -> None:
        """Note where they are as a round begins."""
        self._starts = [_widened(tensor) for tensor in self._tensors]

    def average(self, weight: float) -> None:
        """Put them where they began, moved by the weighted mean; a collective."""
        moved = self._summed(weight, lambda mine, number: _moved(mine, self._starts[number]))
        for tensor, start, value in zip(self._tensors, self._starts, moved, strict=True):
            tensor.copy_(start + value)

    def _summed(self, weight: float, value: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
        """Values of all ranks, weighted and summed; of whole numbers rank 0's."""
        values = []
        for number, tensor in enumerate(self._tensors):
            mine = value(_widened(tensor), number)
            if mine.is_floating_point():
                values.append(mine.mul_(weight) if weight else mine.zero_())
            else:
                values.append(mine if self._is_first else mine.zero_())
        under_way = [self._exchange.send_plainly(each) for each in values]
        for each in under_way:
            each.wait()
        return values


def _moved(now: Tensor, start: Tensor) -> Tensor:
    """The difference; zero where infinities stayed, as in a mask."""
    return torch.where(now == start, torch.zeros_like(now), now - start)


def _widened(tensor: Tensor) -> Tensor:
    """A copy in which a weighted mean is computed; whole numbers in int64."""
    if not tensor.is_floating_point():
        return tensor.to(torch.int64, copy=True)
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32, copy=True)
