"""Heads: what a rank says of its bucket before a sketch, in a few bytes whose bitwise OR is what all ranks say."""

from typing import NamedTuple

import torch
from torch import Tensor

from .bitmap import minus_zeros, pack_bits, positions, touched_rows, unpack_bits
from .fixed_point import NOTHING, SPAN_BITS, Span, find_span, read_span, span_bits

NUM_FLAGS = 8
HEAD_BYTES = (NUM_FLAGS + SPAN_BITS) // 8


class Head(NamedTuple):
    """What a rank says, and then what all say."""

    span: Span
    """Over all numbers; only meant where no other field but the last is true."""
    is_not_finite: bool = False
    """A rank has NaN or infinity."""
    is_too_dense: bool = False
    """Most elements of a rank are not zero."""
    touches_more: bool = False
    """A rank touched what was not expected."""
    lacks_minus_zero: bool = False
    """A rank has -0.0 nowhere."""

    def packed(self, like: Tensor) -> Tensor:
        """The head as bytes, on the device of another tensor."""
        flags = [*self[1:], *[False] * (NUM_FLAGS - len(self[1:]))]
        return pack_bits(torch.cat([torch.tensor(flags, device=like.device), span_bits(self.span, like)]))

    @classmethod
    def read(cls, packed: Tensor) -> "Head":
        """The head of all ranks."""
        bits = unpack_bits(packed, NUM_FLAGS + SPAN_BITS)
        flags = bits[:NUM_FLAGS].tolist()
        return cls(read_span(bits[NUM_FLAGS:]), *flags[: len(cls._fields) - 1])


class TouchedElements(NamedTuple):
    """What a rank touched in a bucket."""

    bitmap: Tensor
    elements: Tensor
    """All touched ones, and others where more are expected."""
    numbers: Tensor
    """Their values in float64; those of the whole bucket where it is dense."""
    is_dense: bool
    fits: bool
    """Whether all that is touched was expected."""
    has_minus_zero: bool

    @classmethod
    def of(cls, flat: Tensor, union: Tensor | None, elements: Tensor | None) -> "TouchedElements":
        """What was touched by its bits, or by value where there is a -0.0; expected elements also come as a bitmap."""
        found = cls._among(flat, touched_rows(flat, len(flat)), union, elements)
        if found.is_dense or (found.has_minus_zero and not found.fits):
            return cls._among(flat, flat != 0, union, elements)._replace(has_minus_zero=True)
        return found

    @classmethod
    def _among(cls, flat: Tensor, mask: Tensor, union: Tensor | None, elements: Tensor | None) -> "TouchedElements":
        bitmap = pack_bits(mask)
        fits = union is not None and not bool((bitmap & ~union).any())
        chosen = elements if elements is not None and fits else positions(mask)
        is_dense = 2 * len(chosen) > len(flat)
        numbers = flat if is_dense else flat.index_select(0, chosen).double()
        return cls(bitmap, chosen, numbers, is_dense, fits, not is_dense and bool(minus_zeros(numbers).any()))

    def head(self) -> Head:
        """What the other ranks need to know of it."""
        is_finite = bool(self.numbers.isfinite().all())
        return Head(
            find_span(self.numbers) if is_finite and not self.is_dense else NOTHING,
            is_not_finite=not is_finite,
            is_too_dense=self.is_dense,
            touches_more=not self.fits,
            lacks_minus_zero=not self.has_minus_zero,
        )
