"""Cells as bits: integers of any width in so many bits, in planes of 32, 16, 8 and single bits.

Sums wrap around at the width, as they do in a machine's own integers: only the lowest bits of an addend are needed for
the lowest bits of a sum.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .bitmap import pack_bits, unpack_bits

PLANES = {64: torch.int64, 32: torch.int32, 16: torch.int16, 8: torch.int8}
GROUP = 32
"""Cells are packed in groups of so many, so that every plane begins where its type may begin."""


def packed_bytes(num_cells: int, width: int) -> int:
    """Size of so many cells, which are whole groups."""
    return num_cells // 8 * width


def pack_cells(cells: Tensor, width: int, packed: Tensor) -> None:
    """Write the lowest bits of cells in int64, whole groups."""
    start = 0
    for low, bits in _planes(width):
        stop = start + packed_bytes(len(cells), bits)
        plane = cells >> low if low else cells
        packed[start:stop].copy_(
            pack_bits((plane & 1).to(torch.bool)) if bits == 1 else plane.to(PLANES[bits]).view(torch.uint8)
        )
        start = stop


def unpack_cells(packed: Tensor, width: int) -> Tensor:
    """The cells in int64, from 0 to below 2^width where that is below 2^64."""
    num_cells = len(packed) * 8 // width
    cells, start = packed.new_zeros(num_cells, dtype=torch.int64), 0
    for low, bits in _planes(width):
        stop = start + packed_bytes(num_cells, bits)
        piece = packed[start:stop]
        plane = unpack_bits(piece, num_cells) if bits == 1 else piece.view(PLANES[bits])
        found = plane.to(torch.int64)
        if 1 < bits < 64:
            found &= (1 << bits) - 1
        cells += found << low if low else found
        start = stop
    return cells


def _planes(width: int) -> Iterator[tuple[int, int]]:
    """The lowest bit of each plane, and its bits."""
    low = 0
    for bits in (*PLANES, *[1] * 7):
        if width - low >= bits:
            yield low, bits
            low += bits
