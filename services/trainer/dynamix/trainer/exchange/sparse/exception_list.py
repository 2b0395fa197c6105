"""Exception list: a few numbers and their places, in a message of a size that all ranks know before."""

from typing import NamedTuple

import torch
from torch import Tensor

PLACE_BYTES = 4
ALIGNMENT = 8
"""Messages end where numbers of any type may begin: cells of the next rank lie behind one."""


class ExceptionList(NamedTuple):
    """Messages with so many numbers of a type at most."""

    capacity: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of a message."""
        return -(-self._used_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def _used_bytes(self) -> int:
        return self.capacity * (PLACE_BYTES + self.dtype.itemsize)

    def packed(self, places: Tensor, numbers: Tensor) -> Tensor:
        """A message: places, then numbers; what is not used is zero, at place 0."""
        assert len(places) <= self.capacity, "a span has no more exceptions"
        all_places = places.new_zeros(self.capacity, dtype=torch.int32)
        all_numbers = numbers.new_zeros(self.capacity, dtype=self.dtype)
        all_places[: len(places)], all_numbers[: len(numbers)] = places, numbers
        unused = all_places.new_zeros(self.num_bytes - self._used_bytes, dtype=torch.uint8)
        return torch.cat([all_places.view(torch.uint8), all_numbers.view(torch.uint8), unused])

    def add(self, message: Tensor, sums: Tensor) -> None:
        """Add the numbers of a message to those at their places; several messages in the same order on every rank."""
        places = message[: self.capacity * PLACE_BYTES].clone().view(torch.int32)
        numbers = message[self.capacity * PLACE_BYTES : self._used_bytes].clone().view(self.dtype)
        sums.index_add_(0, places, numbers.to(sums.dtype))
