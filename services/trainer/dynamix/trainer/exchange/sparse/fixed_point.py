"""Fixed point: floating-point numbers as integers over one power of two, so that sums are exact in any order.

Numbers below 2^top that are all multiples of 2^unit are integers of (top - unit) bits. A few small ones would make that
many: of normal values the smallest in 200,000 needs 12 bits more than all but the smallest 1 %. So the unit is that of
all but a few numbers, the exceptions; what these have below the unit, their rest, travels beside the integers.

All ranks must use the same span: a rank's own is a vector of bits whose bitwise OR over ranks is the span of all.
"""

from typing import NamedTuple

import torch
from torch import Tensor

HIGHEST = 1100
"""Exponents lie between plus and minus this, also those of float64."""
SPAN_BITS = 4 * HIGHEST
EXCEPTIONS = 128
"""One number of so many may be an exception."""

FRACTION_BITS = 52
FRACTION = (1 << FRACTION_BITS) - 1
EXPONENT = 0x7FF
BIAS = 1023
LOWEST_UNIT = -1000
"""The factor 2^-unit would overflow below."""
MAX_WIDTH = 64


class Span(NamedTuple):
    """All numbers are below 2^top, and all but the exceptions multiples of 2^unit; top < unit where all are zero."""

    top: int
    unit: int


NOTHING = Span(-HIGHEST, HIGHEST)
"""The span of no number."""


class FixedPoint(NamedTuple):
    """Numbers of a span as integers, and as exceptions the rest of those that are not whole."""

    integers: Tensor
    """In int64."""
    places: Tensor
    """Where the exceptions are."""
    rests: Tensor
    """What they have more than their integers; as exact as the numbers are."""


def find_span(numbers: Tensor) -> Span:
    """The span of finite numbers in float64, zeros left out."""
    bits = numbers.view(torch.int64)
    fraction, exponent = bits & FRACTION, (bits >> FRACTION_BITS) & EXPONENT
    fraction += (exponent > 0).to(torch.int64) << FRACTION_BITS
    lowest_bit = (fraction & -fraction).double().view(torch.int64) >> FRACTION_BITS
    counts = exponent.clamp_(min=1).add_(lowest_bit).bincount(minlength=BIAS + 1)
    counts[: BIAS + 1] = 0  # zeros have no lowest bit
    counts = counts.cumsum(0)
    if not counts[-1]:
        return NOTHING
    unit = int((counts <= counts[-1] // EXCEPTIONS).sum()) - 2 * BIAS - FRACTION_BITS
    return Span(int(torch.frexp(numbers.abs().amax()).exponent), unit)


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


def width_of_sums(span: Span, num_ranks: int) -> int | None:
    """Bits of a sum of integers over ranks, with a sign; `None` where 64 are too few."""
    if span == NOTHING:
        return 1
    width = max(span.top - span.unit, 0) + (num_ranks - 1).bit_length() + 1
    return width if width <= MAX_WIDTH and span.unit >= LOWEST_UNIT else None


def to_fixed(numbers: Tensor, span: Span) -> FixedPoint:
    """Numbers in float64 that are within the span."""
    if span == NOTHING:
        nowhere = numbers.new_zeros(0)
        return FixedPoint(torch.zeros_like(numbers, dtype=torch.int64), nowhere.to(torch.int64), nowhere)
    units = numbers * 2.0**-span.unit
    whole = units.trunc()
    rests = units.sub_(whole)
    places = rests.nonzero().flatten()
    return FixedPoint(whole.to(torch.int64), places, rests.index_select(0, places).mul_(2.0**span.unit))


def from_fixed(integers: Tensor, span: Span, width: int) -> Tensor:
    """Integers modulo 2^width as float64, rounded where they have more than 53 bits; zero is +0.0."""
    if span == NOTHING:
        return torch.zeros_like(integers, dtype=torch.float64)
    unused = MAX_WIDTH - width
    return ((integers << unused) >> unused).double().mul_(2.0**span.unit)
