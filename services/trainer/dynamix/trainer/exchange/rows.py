"""Rows: only those rows of a table travel that some rank touched, without loss.

An embedding's gradient is zero but for the rows of the batch. A bitmap of the rows that are not zero is united over
ranks; the rows of the union, packed, are summed as any gradient is. Of a table with rows of d float32 numbers that
costs the share of its rows in the union, and 1 / (32 d).

A parameter with most rows in the union travels as it is from the next step on, without a bitmap, and is looked at again
after `LOOK_AGAIN` steps. The union tells all ranks the same.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .bitmap import pack_bits, positions, touched_rows, unpack_bits
from .codec import BucketPart, BucketView, Member
from .collectives import Leg, Union
from .owners import sum_over_ranks

DENSE = 0.7
"""Share of rows in the union above which packing them saves too little."""
LOOK_AGAIN = 50
"""Steps that a parameter is left alone."""


class _Piece(NamedTuple):
    """A range of the bucket that travels, whole or by rows."""

    start: int
    stop: int
    num_rows: int = 1
    rows: Tensor | None = None
    """Indices of the rows; `None` for all of the range."""

    @property
    def length(self) -> int:
        """Numbers that travel."""
        length = self.stop - self.start
        return length if self.rows is None else length // self.num_rows * len(self.rows)


class RowsExchange:
    """The codec `rows`, for one model."""

    name = "rows"
    is_lossless = True

    def __init__(self) -> None:
        self._dense: dict[str, int] = {}
        """Steps for which a parameter is still left alone, by key."""

    def reduce(self, bucket: BucketView, member: Member) -> Leg:
        """Sum as `ExchangeCodec.reduce`: the union of the touched rows, then their sum."""
        if member.world_size == 1:
            return
        tables = [part for part in bucket.parts if len(part.shape) > 1 and self._is_open(part)]
        if not tables:
            yield from sum_over_ranks(bucket.flat, member)
            self._leave_alone(bucket, [])
            return
        union = pack_bits(
            torch.cat([touched_rows(bucket.flat[part.start : part.stop], part.shape[0]) for part in tables])
        )
        yield Union(union)
        touched = torch.split(
            unpack_bits(union, sum(part.shape[0] for part in tables)), [part.shape[0] for part in tables]
        )
        rows = {part.key: positions(mask) for part, mask in zip(tables, touched, strict=True)}
        dense = [part for part in tables if len(rows[part.key]) > DENSE * part.shape[0]]
        for part in dense:
            del rows[part.key]
        yield from _sum_pieces(bucket.flat, _pieces(bucket, rows), member)
        self._leave_alone(bucket, dense)

    def _is_open(self, part: BucketPart) -> bool:
        return part.stop > part.start and part.key not in self._dense

    def _leave_alone(self, bucket: BucketView, dense: list[BucketPart]) -> None:
        """Count a step for the parameters that are left alone, and begin with more of them."""
        for part in bucket.parts:
            left = self._dense.pop(part.key, 0) - 1
            if left > 0:
                self._dense[part.key] = left
        self._dense.update((part.key, LOOK_AGAIN) for part in dense)


def _pieces(bucket: BucketView, rows: dict[str, Tensor]) -> list[_Piece]:
    """What travels of a bucket, in order: tables by their rows, and all between them as one piece."""
    pieces, start = [], 0
    for part in bucket.parts:
        if part.key in rows:
            pieces += [_Piece(start, part.start), _Piece(part.start, part.stop, part.shape[0], rows[part.key])]
            start = part.stop
    pieces.append(_Piece(start, len(bucket.flat)))
    return [piece for piece in pieces if piece.length]


def _sum_pieces(flat: Tensor, pieces: list[_Piece], member: Member) -> Leg:
    """Sum what travels, packed; nothing travels where no rank touched anything."""
    if not pieces:
        return
    if len(pieces) == 1 and pieces[0].rows is None:
        yield from sum_over_ranks(flat[pieces[0].start : pieces[0].stop], member)
        return
    packed = flat.new_empty(sum(piece.length for piece in pieces))
    places = list(zip(pieces, torch.split(packed, [piece.length for piece in pieces]), strict=True))
    for piece, place in places:
        whole = flat[piece.start : piece.stop]
        if piece.rows is None:
            place.copy_(whole)
        else:
            torch.index_select(whole.view(piece.num_rows, -1), 0, piece.rows, out=place.view(len(piece.rows), -1))
    yield from sum_over_ranks(packed, member)
    for piece, place in places:
        whole = flat[piece.start : piece.stop]
        if piece.rows is None:
            whole.copy_(place)
        else:
            whole.view(piece.num_rows, -1).index_copy_(0, piece.rows, place.view(len(piece.rows), -1))
