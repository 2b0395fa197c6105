"""Sums of what the ranks sent to a server: of numbers in rank order, of cells modulo their width."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dynamix.trainer.exchange.owners import sum_in_rank_order
from dynamix.trainer.exchange.sparse.cells import pack_cells, packed_bytes, unpack_cells


def sum_of_pieces(pieces: Sequence[Tensor], width: int) -> Tensor:
    """The sum, as the ranks want it back.

    Args:
        pieces: by rank, of one type and size; they may be overwritten.
        width: bits of the cells that the pieces hold as bytes, 0 for numbers. Cells of sketches are added as they are:
            the sum of sketches is the sketch of the sum.
    """
    if not width or not len(pieces[0]):
        return sum_in_rank_order(list(pieces))
    total = unpack_cells(pieces[0], width)
    for piece in pieces[1:]:
        total += unpack_cells(piece, width)
    packed = torch.empty(packed_bytes(len(total), width), dtype=torch.uint8)
    pack_cells(total, width, packed)
    return packed
