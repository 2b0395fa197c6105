"""Numbers of 8 bits: 127 steps up and down, under one scale per block."""

import torch
from torch import Tensor

from .lossy import BLOCK

SCALE_BYTES = 4
STEPS = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A block below this has the scale 0: the inverse would overflow. The residual keeps its numbers."""


class Int8:
    """Narrows numbers to int8, with a scale in float32 for each block of `BLOCK`."""

    def message_bytes(self, length: int) -> int:
        """One per number and four per block."""
        return length + SCALE_BYTES * (length // BLOCK)

    def scales(self, message: Tensor, length: int) -> Tensor:
        """One per block, not finite where a number of it was not."""
        return message[: SCALE_BYTES * (length // BLOCK)].view(torch.float32)

    def write(self, values: Tensor, message: Tensor) -> None:
        """Fill a message; what rounding took away is left in `values`."""
        if not len(values):
            return
        blocks, scales, numbers = self._parts(values, message)
        largest = torch.maximum(blocks.amax(1, keepdim=True), -blocks.amin(1, keepdim=True))
        scale = (largest / STEPS).float()
        scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)  # a NaN stays
        scales.copy_(scale)
        steps = (blocks * torch.where(scale == 0, 0.0, 1 / scale)).round_()
        numbers.copy_(steps)
        blocks.sub_(steps.mul_(scale))

    def read(self, message: Tensor, values: Tensor) -> None:
        """Write a message's numbers into `values`."""
        if len(values):
            blocks, scales, numbers = self._parts(values, message)
            blocks.copy_(numbers).mul_(scales)

    def _parts(self, values: Tensor, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The numbers, the scales and the bytes, each by block."""
        scales = self.scales(message, len(values))
        numbers = message[SCALE_BYTES * len(scales) :].view(torch.int8)
        return values.view(-1, BLOCK), scales.view(-1, 1), numbers.view(-1, BLOCK)
