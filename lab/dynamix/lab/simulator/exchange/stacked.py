"""Stacked int8: the codec `int8` of all ranks at once, with the same bits.

N ranks code N (N - 1) messages of a bucket, each by some small tensor operations: 1.4 s a step with 128 ranks, of the
smallest model. Its scales belong to blocks, not to messages, so that the rows of a matrix can be narrowed at once, in
25 ms. `LossyExchange` says what is computed; a test compares both bit for bit.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dynamix.trainer.exchange.codec import CodedSquares, Member
from dynamix.trainer.exchange.int8 import Int8
from dynamix.trainer.exchange.lossy import BLOCK
from dynamix.trainer.exchange.owners import OwnedRange, owned_ranges

from .traffic import CollectiveTraffic

STACKED = "int8"
"""The codec that is computed like this."""


class StackedInt8:
    """The ranks' codecs of one bucket."""

    def __init__(self) -> None:
        self._narrowing = Int8()
        self._residuals: Tensor | None = None
        self.coded = CodedSquares()
        """All ranks together; unlike real ones, it counts what owners keep for themselves as sent."""

    def take_residuals(self, rows: Tensor) -> None:
        """Add to the gradients of all ranks, a row each, what was not sent of earlier ones."""
        if self._residuals is not None:
            rows.add_(self._residuals[:, : rows.shape[1]])
            self._residuals = None

    @property
    def largest_residual(self) -> float:
        """The largest number that a rank has not sent yet."""
        return 0.0 if self._residuals is None else float(self._residuals.abs().max())

    def reduce(self, rows: Tensor, member: Member) -> tuple[tuple[CollectiveTraffic, ...], bool]:
        """Make every row the sum over ranks; False where something is not finite, and rows stay as they are."""
        num_ranks, length = rows.shape
        values = rows.new_zeros(num_ranks, -(-length // BLOCK) * BLOCK)
        values[:, :length] = rows
        if self._residuals is not None:
            values.add_(self._residuals)
        ranges = owned_ranges(values.shape[1], member, BLOCK)
        own = [values[rank, each.start : each.stop].clone() for rank, each in enumerate(ranges)]
        wanted = torch.linalg.vector_norm(values).item() ** 2
        addends = self._narrowed(values)
        sent = torch.linalg.vector_norm(addends).item() ** 2
        total = torch.zeros_like(values[0])
        for rank, (each, mine) in enumerate(zip(ranges, own, strict=True)):
            addends[rank, each.start : each.stop] = mine
            total.add_(addends[rank])
        summed = self._narrowed(total)
        if not bool(summed.isfinite().all()):
            return _traffic(self._narrowing, ranges), False
        self.coded = self.coded.and_more(CodedSquares(wanted, sent))
        for rank, each in enumerate(ranges):
            values[rank, each.start : each.stop] = total[each.start : each.stop]
        self._residuals = values
        rows.copy_(summed[:length].expand_as(rows))
        return _traffic(self._narrowing, ranges), True

    def _narrowed(self, values: Tensor) -> Tensor:
        """What arrives of numbers; what they lack is left in them."""
        flat = values.view(-1)
        message = flat.new_empty(self._narrowing.message_bytes(len(flat)), dtype=torch.uint8)
        self._narrowing.write(flat, message)
        arrived = torch.empty_like(flat)
        self._narrowing.read(message, arrived)
        return arrived.view(values.shape)


def _traffic(narrowing: Int8, ranges: Sequence[OwnedRange]) -> tuple[CollectiveTraffic, ...]:
    """What goes to the owners, and back."""
    sizes = np.array([narrowing.message_bytes(each.length) for each in ranges], dtype=np.float64)
    away, home = sizes.sum() - sizes, (len(sizes) - 1) * sizes
    owners = (sizes > 0).astype(np.int64)
    num_messages = int((owners.sum() - owners + (len(sizes) - 1) * owners).max())
    return (
        CollectiveTraffic(away, home, is_ring=False, num_messages=num_messages),
        CollectiveTraffic(home, away, is_ring=False, num_messages=num_messages),
    )
