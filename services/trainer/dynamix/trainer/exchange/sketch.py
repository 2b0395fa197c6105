"""Sketch: the lossless homomorphic compression of sparse gradients, with integer cells.

A bitmap of the elements that are not zero is united over ranks; each rank adds its values to a table of 1.3 cells per
element of the union (`sparse.peeling`), the owners add the tables, cell by cell and without looking inside, and every
rank takes the sums out again. In floating point that has a loss, by cancellation; here values are integers of a common
unit (`sparse.fixed_point`), so the sum is exact, in any order, and rounded once. Cells have as many bits as the sums
need (`sparse.cells`): about 50 for float32 values between 1e-6 and 10 on 4 ranks.

Where the mask was the same in two steps, the next ones first ask whether a rank touched anything else, and send the
bitmap only then. A bucket travels as it is where that is cheaper or its values are too far apart (100 bits), and is
looked at again after `LOOK_AGAIN` steps; also where something is not finite, in that step. The union tells all ranks
the same.
"""

from collections.abc import Generator, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .codec import BucketPart, BucketView, Member
from .collectives import Collective, Leg, Trade, Union
from .owners import OwnedRange, owned_ranges, sum_over_ranks
from .sparse.bitmap import minus_zeros, positions, unpack_bits
from .sparse.cells import GROUP, pack_cells, packed_bytes, unpack_cells
from .sparse.fixed_point import MAX_WIDTH, CellLayout
from .sparse.heads import HEAD_BYTES, Head, TouchedElements
from .sparse.peeling import CELLS_PER_ELEMENT, Peeling, find_peeling
from .zeros import settle_zeros

WORTH = 0.7
"""Most bytes of a sketch over those of the bucket: above, the bucket travels as it is."""
LOOK_AGAIN = 50
"""Steps that a bucket is left alone, and steps without a bitmap before the next one."""


class _Mask(NamedTuple):
    """What the ranks touched in a bucket the last time, the same on all of them."""

    union: Tensor
    peeling: Peeling
    steps_left: int
    """For which it is expected again, after it was the same twice; a mask may also shrink."""


class _Memory(NamedTuple):
    """What the codec knows of a bucket."""

    parts: tuple[BucketPart, ...]
    mask: _Mask | None = None
    alone: int = 0
    """Steps for which the bucket is still left alone."""


class _Agreed(NamedTuple):
    """What the first collectives told all ranks."""

    head: Head
    union: Tensor
    steps_left: int
    """For which the union is expected again, if it is the one of the step before."""


class SketchExchange:
    """The codec `sketch`, for one model."""

    name = "sketch"
    is_lossless = True

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}

    def reduce(self, bucket: BucketView, member: Member) -> Leg:
        """Sum as `ExchangeCodec.reduce`: the union of what is not zero, then the table to its owners and back."""
        if member.world_size == 1:
            return
        memory = self._memories.get(bucket.number)
        if memory is None or memory.parts != bucket.parts:
            memory = _Memory(bucket.parts)
        if memory.alone:
            yield from sum_over_ranks(bucket.flat, member)
            self._memories[bucket.number] = memory._replace(alone=memory.alone - 1)
            return
        expected = memory.mask if memory.mask is not None and memory.mask.steps_left else None
        own = TouchedElements.of(
            bucket.flat, expected and expected.union, expected.peeling.elements if expected is not None else None
        )
        agreed = yield from _agree(own, expected)
        if agreed.head.is_not_finite:
            yield from sum_over_ranks(bucket.flat, member)
            return
        layout = CellLayout.of(agreed.head.span, member.world_size)
        mask = None
        if layout.is_possible and not agreed.head.is_too_dense:
            mask = _next_mask(memory.mask, agreed, sum(layout.widths), bucket.flat)
        if mask is None:
            yield from sum_over_ranks(bucket.flat, member)
            self._memories[bucket.number] = _Memory(bucket.parts, alone=LOOK_AGAIN)
            return
        zeros = minus_zeros(bucket.flat) if own.has_minus_zero else None
        if (yield from _sum_sketch(bucket.flat, mask.peeling, layout, member)):
            yield from settle_zeros(bucket.flat, zeros, one_has_none=agreed.head.lacks_minus_zero)
        self._memories[bucket.number] = _Memory(bucket.parts, mask)


def _agree(own: TouchedElements, expected: _Mask | None) -> Generator[Collective, None, _Agreed]:
    """Let all ranks know what each has, with the bitmap only where the union is not known."""
    said = own.head().packed(own.bitmap)
    if expected is None:
        message = torch.cat([said, own.bitmap])
        yield Union(message)
        return _Agreed(Head.read(message[:HEAD_BYTES]), message[HEAD_BYTES:], LOOK_AGAIN)
    yield Union(said)
    head = Head.read(said)
    if not head.touches_more:
        return _Agreed(head, expected.union, expected.steps_left - 1)
    yield Union(own.bitmap)
    return _Agreed(head, own.bitmap, LOOK_AGAIN)


def _next_mask(before: _Mask | None, agreed: _Agreed, width: int, flat: Tensor) -> _Mask | None:
    """The mask of this step, for cells of that width; `None` where a sketch is not worth it, or not possible."""
    known = before if before is not None and torch.equal(before.union, agreed.union) else None
    elements = known.peeling.elements if known is not None else positions(unpack_bits(agreed.union, len(flat)))
    if len(elements) * CELLS_PER_ELEMENT * width / 8 + len(agreed.union) > WORTH * len(flat) * flat.element_size():
        return None
    if known is not None:
        return known._replace(steps_left=agreed.steps_left)
    peeling = find_peeling(elements)
    return None if peeling is None else _Mask(agreed.union, peeling, 0)


def _sum_sketch(
    flat: Tensor, peeling: Peeling, layout: CellLayout, member: Member
) -> Generator[Collective, None, bool]:
    """Sum the values of the union's elements; returns whether the zeros are still to be settled."""
    if not len(peeling.elements):
        return True
    limbs = layout.encode(flat.index_select(0, peeling.elements).double())
    tables = [_Table(peeling.insert(limb), width) for limb, width in zip(limbs, layout.widths, strict=True)]
    yield from _add_tables(tables, member)
    sums = layout.decode([peeling.take_out(each.cells) for each in tables])
    if any(bool((each.cells << (MAX_WIDTH - each.width)).any()) for each in tables):
        yield from sum_over_ranks(flat, member)  # what came out is not what went in: all ranks see the same remains
        return False
    flat.index_copy_(0, peeling.elements, sums.to(flat.dtype))
    return True


class _Table(NamedTuple):
    """Cells of which only so many low bits count."""

    cells: Tensor
    width: int


def _add_tables(tables: list[_Table], member: Member) -> Leg:
    """Make tables of one length the sums over ranks, modulo 2^width, added by the owners of the cells."""
    width, ranges = sum(each.width for each in tables), owned_ranges(len(tables[0].cells), member, GROUP)
    theirs = [packed_bytes(each.length, width) for each in ranges]
    own, mine = ranges[member.rank], [theirs[member.rank]] * member.world_size
    mine[member.rank] = theirs[member.rank] = 0

    pushed, addends = [tables[0].cells.new_empty(sum(sizes), dtype=torch.uint8) for sizes in (theirs, mine)]
    for owned, message in zip(ranges, torch.split(pushed, theirs), strict=True):
        _pack(tables, owned, message)
    yield Trade(addends, pushed, mine, theirs)

    for message in torch.split(addends, mine):
        for cells, addend in _unpacked(tables, own, message):
            cells.add_(addend)
    answer = pushed.new_empty(packed_bytes(own.length, width))
    _pack(tables, own, answer)
    sums = torch.empty_like(pushed)
    yield Trade(sums, answer.repeat(sum(1 for size in mine if size)), theirs, mine)
    for owned, message in zip(ranges, torch.split(sums, theirs), strict=True):
        for cells, total in _unpacked(tables, owned, message):
            cells.copy_(total)


def _pack(tables: list[_Table], owned: OwnedRange, message: Tensor) -> None:
    """Fill a message with a range of all tables; an empty one is left so."""
    if len(message):
        pieces = torch.split(message, [packed_bytes(owned.length, each.width) for each in tables])
        for each, piece in zip(tables, pieces, strict=True):
            pack_cells(each.cells[owned.start : owned.stop], each.width, piece)


def _unpacked(tables: list[_Table], owned: OwnedRange, message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """A range of each table, and the cells that a message has for it; nothing of an empty one."""
    if len(message):
        pieces = torch.split(message, [packed_bytes(owned.length, each.width) for each in tables])
        for each, piece in zip(tables, pieces, strict=True):
            yield each.cells[owned.start : owned.stop], unpack_cells(piece, each.width)
