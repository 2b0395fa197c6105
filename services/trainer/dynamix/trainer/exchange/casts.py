"""Casts: float16 or bfloat16 numbers under one scale.

The scale is the power of two that brings the largest number of a message to the top of the type's range, so that small
gradients do not vanish in float16, and large ones do not overflow.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
TOP_EXPONENT = {torch.float16: 15, torch.bfloat16: 0}
"""Numbers stay below 2 to this: float16 ends at 65504; bfloat16 has the range of float32."""
LOWEST_EXPONENT = -100
"""At least, for the largest number: below it a scale would not be a normal float32, and the residual keeps them."""


class Cast:
    """Narrows numbers to a type of two bytes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._top = TOP_EXPONENT[dtype]

    def message_bytes(self, length: int) -> int:
        """Two per number and one scale."""
        return SCALE_BYTES + 2 * length if length else 0

    def scales(self, message: Tensor, length: int) -> Tensor:
        """The one scale, NaN where a number was not finite."""
        return message[: SCALE_BYTES if length else 0].view(torch.float32)

    def write(self, values: Tensor, message: Tensor) -> None:
        """Fill a message; what rounding took away is left in `values`."""
        if not len(values):
            return
        largest = torch.maximum(values.amax(), -values.amin())
        exponent = torch.frexp(largest).exponent.clamp(min=LOWEST_EXPONENT) - self._top
        scale = torch.ldexp(torch.ones_like(largest), exponent)
        scale = torch.where(largest.isfinite(), scale, torch.nan)
        self.scales(message, len(values)).copy_(scale)
        numbers = message[SCALE_BYTES:].view(self._dtype)
        numbers.copy_(values / scale)
        values.sub_(numbers.to(values.dtype).mul_(scale))

    def read(self, message: Tensor, values: Tensor) -> None:
        """Write a message's numbers into `values`."""
        if len(values):
            values.copy_(message[SCALE_BYTES:].view(self._dtype)).mul_(self.scales(message, len(values)))
