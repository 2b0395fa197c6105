"""Fixed point: floating-point numbers as integers over one power of two, so that sums are exact in any order.

Numbers below 2^top that are all multiples of 2^unit are integers of (top - unit) bits. All ranks must use the same: a
rank's own span is a vector of bits whose bitwise OR over ranks is the span of all, so it travels with a bitmap.
"""

from typing import NamedTuple

import torch
from torch import Tensor

HIGHEST = 1100
"""Exponents lie between plus and minus this, also those of float64."""
SPAN_BITS = 4 * HIGHEST

FRACTION_BITS = 52
FRACTION = (1 << FRACTION_BITS) - 1
EXPONENT = 0x7FF
UNIT_EXPONENT = 1023 + FRACTION_BITS
LOWEST_UNIT = -1000
"""The factor 2^-unit would overflow below."""
MAX_WIDTH = 64
LOW_BITS = 48
"""Width of the first limb, without sign and ranks, where there are two."""


class Span(NamedTuple):
    """All numbers are below 2^top, and multiples of 2^unit; top < unit where all are zero."""

    top: int
    unit: int

    @property
    def num_bits(self) -> int:
        """Bits of the integers, without a sign."""
        return max(self.top - self.unit, 0)


NOTHING = Span(-HIGHEST, HIGHEST)
"""The span of no number."""


def find_span(numbers: Tensor) -> Span:
    """The span of finite numbers in float64."""
    bits = numbers.view(torch.int64)
    fraction, exponent = bits & FRACTION, (bits >> FRACTION_BITS) & EXPONENT
    fraction += (exponent > 0).to(torch.int64) << FRACTION_BITS
    lowest_bit = (fraction & -fraction).double().view(torch.int64) >> FRACTION_BITS
    unit = exponent.clamp_(min=1).add_(lowest_bit)
    unit[fraction == 0] = HIGHEST + 2 * UNIT_EXPONENT
    largest = numbers.abs().amax() if len(numbers) else numbers.new_zeros(())
    if not largest > 0:
        return NOTHING
    return Span(int(torch.frexp(largest).exponent), int(unit.amin()) - UNIT_EXPONENT - 1023)


def span_bits(span: Span, like: Tensor) -> Tensor:
    """A span as bool: one run of bits per end, the longer the wider the span."""
    bits = like.new_zeros(2, 2 * HIGHEST, dtype=torch.bool)
    bits[0, : span.top + HIGHEST] = True
    bits[1, : HIGHEST - span.unit] = True
    return bits.view(-1)


def read_span(bits: Tensor) -> Span:
    """The span of which `span_bits` made them, or the least that has all those that were united."""
    top, unit = bits.view(2, 2 * HIGHEST).sum(1).tolist()
    return Span(top - HIGHEST, HIGHEST - unit)


class CellLayout(NamedTuple):
    """How numbers of a span become integers whose sums over ranks are exact: one limb, or two where 64 bits are few."""

    span: Span
    num_ranks: int

    @classmethod
    def of(cls, span: Span, num_ranks: int) -> "CellLayout":
        """The layout for numbers of all ranks."""
        return cls(Span(0, 0) if span == NOTHING else span, num_ranks)

    @property
    def is_possible(self) -> bool:
        """Whether the numbers fit."""
        return self.span.num_bits <= LOW_BITS + FRACTION_BITS and self.span.unit >= LOWEST_UNIT

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of the sums, with a sign, by limb from the lowest."""
        more = (self.num_ranks - 1).bit_length() + 1
        if self.span.num_bits + more <= MAX_WIDTH:
            return (self.span.num_bits + more,)
        return (LOW_BITS + more, self.span.num_bits - LOW_BITS + more)

    def encode(self, numbers: Tensor) -> list[Tensor]:
        """The limbs, in int64, of numbers in float64."""
        units = numbers * 2.0**-self.span.unit
        if len(self.widths) == 1:
            return [units.to(torch.int64)]
        high = (units * 2.0**-LOW_BITS).trunc_()
        return [units.sub_(high, alpha=2.0**LOW_BITS).to(torch.int64), high.to(torch.int64)]

    def decode(self, limbs: list[Tensor]) -> Tensor:
        """Sums in float64, rounded once; zero is +0.0. Limbs are modulo their width."""
        low, *higher = [
            (limb << (MAX_WIDTH - width)) >> (MAX_WIDTH - width) for limb, width in zip(limbs, self.widths, strict=True)
        ]
        numbers = low.double()
        for high in higher:
            numbers.add_(high.double(), alpha=2.0**LOW_BITS)
        return numbers.mul_(2.0**self.span.unit)
