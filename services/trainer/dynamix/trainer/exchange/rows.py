"""Rows: only those rows of a table travel that some rank touched, without loss.

An embedding's gradient is zero but for the rows of the batch. A bitmap of the rows that are not zero is united over
ranks; the rows of the union, packed, are summed as any gradient is. Of a table with rows of d float32 numbers that
costs the share of its rows in the union, and 1 / (32 d).

Rows of -0.0 are touched, unless there are many of them, as in a gradient that was multiplied by a mask (`zeros`).
A parameter with most rows in the union travels as it is from the next step on, without a bitmap, and is looked at again
after `LOOK_AGAIN` steps. The union tells all ranks the same.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .codec import BucketPart, BucketView, Member
from .collectives import Leg, Union
from .owners import sum_over_ranks
from .signed_zeros import settle_zeros
from .sparse.bitmap import minus_zeros, pack_bits, positions, touched_rows, unpack_bits, valued_rows

DENSE = 0.7
"""Share of rows in the union above which packing them saves too little."""
MANY = 0.3
"""Share of rows of this rank above which it looks for rows that are nothing but zeros of both signs."""
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
        masks = [_touched(bucket.flat[part.start : part.stop], part.shape[0]) for part in tables]
        skips_zeros = any(mask.skips_zeros for mask in masks)
        head = bucket.flat.new_tensor([not skips_zeros], dtype=torch.uint8)
        said = torch.cat([head, pack_bits(torch.cat([mask.rows for mask in masks]))])
        yield Union(said)
        lengths = [part.shape[0] for part in tables]
        union = torch.split(unpack_bits(said[1:], sum(lengths)), lengths)
        rows = {part.key: positions(mask) for part, mask in zip(tables, union, strict=True)}
        dense = [part for part in tables if len(rows[part.key]) > DENSE * part.shape[0]]
        for part in dense:
            del rows[part.key]
        if rows:
            zeros = minus_zeros(bucket.flat) if skips_zeros else None
            yield from _sum_pieces(bucket.flat, _pieces(bucket, rows), member, zeros, one_has_none=bool(said[0]))
        else:
            yield from sum_over_ranks(bucket.flat, member)
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


def _sum_pieces(flat: Tensor, pieces: list[_Piece], member: Member, zeros: Tensor | None, *, one_has_none: bool) -> Leg:
    """Sum what travels, packed, and settle the rest; nothing travels where no rank touched anything."""
    packed = flat.new_empty(sum(piece.length for piece in pieces))
    places = list(zip(pieces, torch.split(packed, [piece.length for piece in pieces]), strict=True))
    for piece, place in places:
        whole = flat[piece.start : piece.stop]
        if piece.rows is None:
            place.copy_(whole)
        else:
            torch.index_select(whole.view(piece.num_rows, -1), 0, piece.rows, out=place.view(len(piece.rows), -1))
    if pieces:
        yield from sum_over_ranks(packed, member)
    yield from settle_zeros(flat, zeros, one_has_none=one_has_none)
    for piece, place in places:
        whole = flat[piece.start : piece.stop]
        if piece.rows is None:
            whole.copy_(place)
        else:
            whole.view(piece.num_rows, -1).index_copy_(0, piece.rows, place.view(len(piece.rows), -1))


class _Touched(NamedTuple):
    """Rows of a table that this rank touched."""

    rows: Tensor
    """One bool per row."""
    skips_zeros: bool = False
    """Whether another row may have a -0.0."""


def _touched(table: Tensor, num_rows: int) -> _Touched:
    """The rows that were touched, by their bits, or by value where that makes a difference to many rows."""
    rows = touched_rows(table, num_rows)
    count = int(rows.count_nonzero())
    if count > MANY * num_rows:
        valued = valued_rows(table, num_rows)
        if int(valued.count_nonzero()) < count:
            return _Touched(valued, skips_zeros=True)
    return _Touched(rows)
