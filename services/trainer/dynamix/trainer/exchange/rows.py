"""Codec `rows`: only those rows of a table are sent that some rank touched, without loss.

A bitmap of the rows that are not zero is united over ranks; the rows of the union, packed, are summed as any gradient
is. A parameter with most rows in the union is sent as it is from the next step on, and is checked again after
`LOOK_AGAIN` steps.

By their bits -0.0 and NaN are not zero: what no rank touched is +0.0 on all, and so is its sum. The sum of zeros is
-0.0 only where all ranks have it. Gradients that were multiplied by a mask are full of -0.0: a codec that leaves them
out must agree on their signs, in one bit per element (`settle_zeros`).
"""

from collections.abc import Iterable
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dynamix.trainer.exchange.codec import BucketPart, BucketView, Leg, Member, Union, sum_over_ranks

INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
"""Integer types by their size in bytes."""


def minus_zeros(gradient: Tensor) -> Tensor:
    """Positions at which a flat gradient is -0.0, as bool."""
    bits = INTEGERS[gradient.element_size()]
    return gradient.view(bits) == torch.iinfo(bits).min


def _any_of_row(mask: Tensor, num_rows: int) -> Tensor:
    if len(mask) == num_rows:
        return mask
    return mask.view(torch.uint8).view(num_rows, -1).amax(1).view(torch.bool)  # any() takes 5 times as long


def pack_bits(mask: Tensor) -> Tensor:
    """A bool tensor as bytes, the first element in the lowest bit of the first byte."""
    return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))


def unpack_bits(packed: Tensor, length: int) -> Tensor:
    """The first `length` bits as bool."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=length, bitorder="little")).view(torch.bool)


def positions(mask: Tensor) -> Tensor:
    """Indices at which a bool tensor is true, as int64; numpy is 18 times as fast as torch."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def settle_zeros(flat: Tensor, minus: Tensor | None, *, one_has_none: bool) -> Leg:
    """Give the zeros of a bucket the signs of their sums; nothing else in it may be -0.0.

    Args:
        flat: the bucket; parts that are sent in another way are overwritten later, or have their sums already.
        minus: where this rank's own gradient is -0.0; `None` for nowhere, only where `one_has_none`.
        one_has_none: whether a rank has -0.0 nowhere, which all ranks know.
    """
    if one_has_none:
        if minus is not None:
            flat.add_(0.0)
        return
    assert minus is not None, "every rank has -0.0"
    others = pack_bits(minus.logical_not())
    yield Union(others)
    flat.add_(0.0).index_fill_(0, positions(unpack_bits(others, len(flat)).logical_not_()), -0.0)


DENSE = 0.7
"""Share of rows in the union above which packing them saves too little."""
MANY = 0.3
"""Share of rows of this rank above which it looks for rows that are nothing but zeros of both signs."""
LOOK_AGAIN = 50
"""Steps that a parameter is left alone."""


class _Piece(NamedTuple):
    """A range of the bucket that is sent, whole or by rows."""

    start: int
    stop: int
    num_rows: int = 1
    rows: Tensor | None = None
    """Indices of the rows; `None` for all of the range."""

    @property
    def length(self) -> int:
        """Numbers that are sent."""
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
        tables = [
            part
            for part in bucket.parts
            if len(part.shape) > 1 and part.stop > part.start and part.key not in self._dense
        ]
        if not tables:
            yield from sum_over_ranks(bucket.flat, member)
            self._leave_alone(bucket, [])
            return
        touched = [_touched(bucket.flat[part.start : part.stop], part.shape[0]) for part in tables]
        skips_zeros = any(skips for _, skips in touched)
        head = bucket.flat.new_tensor([not skips_zeros], dtype=torch.uint8)
        said = torch.cat([head, pack_bits(torch.cat([mask for mask, _ in touched]))])
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

    def _leave_alone(self, bucket: BucketView, dense: list[BucketPart]) -> None:
        """Count a step for the parameters that are excluded, and exclude further ones."""
        for part in bucket.parts:
            left = self._dense.pop(part.key, 0) - 1
            if left > 0:
                self._dense[part.key] = left
        self._dense.update((part.key, LOOK_AGAIN) for part in dense)


def _pieces(bucket: BucketView, rows: dict[str, Tensor]) -> list[_Piece]:
    """The ranges of a bucket that are sent, in order: tables by their rows, everything between them as one piece."""
    pieces, start = [], 0
    for part in bucket.parts:
        if part.key in rows:
            pieces += [_Piece(start, part.start), _Piece(part.start, part.stop, part.shape[0], rows[part.key])]
            start = part.stop
    pieces.append(_Piece(start, len(bucket.flat)))
    return [piece for piece in pieces if piece.length]


def _sum_pieces(flat: Tensor, pieces: list[_Piece], member: Member, zeros: Tensor | None, *, one_has_none: bool) -> Leg:
    """Sum the packed ranges and fill in the rest; nothing is sent if no rank touched anything."""
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


def _touched(table: Tensor, num_rows: int) -> tuple[Tensor, bool]:
    """Mask of the rows that were touched, and whether another row may have a -0.0.

    Rows are told by their bits, or by value where that makes a difference to many rows.
    """
    row_bytes = len(table) // num_rows * table.element_size()
    width = gcd(8, row_bytes, table.storage_offset() * table.element_size())
    rows = _any_of_row(table.view(INTEGERS[width]) != 0, num_rows)
    count = int(rows.count_nonzero())
    if count > MANY * num_rows:
        valued = _any_of_row(table != 0, num_rows)  # twice the time
        if int(valued.count_nonzero()) < count:
            return valued, True
    return rows, False


TABLES = (nn.Embedding, nn.EmbeddingBag)


def table_share(models: Iterable[nn.Module]) -> float:
    """Share of all numbers that are trained which lie in embedding tables, 0 ... 1.

    A table that another module has too, as where input and output are tied, has a dense gradient; of one with
    `sparse=True` PyTorch sends only the touched rows by itself. Neither counts.
    """
    modules = [module for model in models for module in model.modules()]
    dense = {
        id(each) for module in modules if not isinstance(module, TABLES) for each in module.parameters(recurse=False)
    }
    in_tables = {
        id(module.weight): module.weight.numel()
        for module in modules
        if isinstance(module, TABLES) and module.weight.requires_grad and not module.sparse
    }
    trained = {
        id(each): each.numel() for module in modules for each in module.parameters(recurse=False) if each.requires_grad
    }
    return sum(size for key, size in in_tables.items() if key not in dense) / max(sum(trained.values()), 1)
