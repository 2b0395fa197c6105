"""Sketch: the lossless homomorphic compression of sparse gradients, with integer cells.

A bitmap of the elements that are not zero is united over ranks; each rank adds its values to a table of 1.24 cells per
element of the union (`sparse.peeling`), the owners add the tables, cell by cell and without looking inside, and every
rank takes the sums out again. In floating point that has a loss, by cancellation; here values are integers of a common
unit (`sparse.fixed_point`), so their sum is exact in any order. Cells have as many bits as the sums need
(`sparse.cells`), 36 for normal values in float32 on 4 ranks: the small ones that would need more, 1 in 128, send what
is below the unit beside the table, to all ranks (`sparse.exception_list`).

Where the mask was the same in two steps, the next ones first ask whether a rank touched anything else, and send the
bitmap only then. A bucket travels as it is where that is cheaper or its values are too far apart (64 bits), and is
looked at again after `LOOK_AGAIN` steps; also where something is not finite, in that step. The union tells all ranks
the same.
"""

from collections.abc import Generator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .codec import BucketPart, BucketView, Member
from .collectives import Collective, Leg, ServedSum, Trade, Union
from .owners import owned_ranges, sum_over_ranks
from .signed_zeros import settle_zeros
from .sparse.background_call import BackgroundCall
from .sparse.bitmap import minus_zeros, positions, unpack_bits
from .sparse.cells import GROUP, pack_cells, packed_bytes, unpack_cells
from .sparse.exception_list import ExceptionList
from .sparse.fixed_point import EXCEPTIONS, MAX_WIDTH, from_fixed, to_fixed, width_of_sums
from .sparse.heads import HEAD_BYTES, Head, TouchedElements
from .sparse.peeling import CELLS_PER_ELEMENT, HashedElements, Peeling, hashed_elements

WORTH = 0.7
"""Most bytes of a sketch over those of the bucket: above, the bucket travels as it is."""
LOOK_AGAIN = 50
"""Steps that a bucket is left alone, and steps without a bitmap before the next one."""


class _Mask(NamedTuple):
    """What the ranks touched in a bucket the last time, the same on all of them."""

    union: Tensor
    hashed: HashedElements
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
            bucket.flat, expected and expected.union, expected.hashed.elements if expected is not None else None
        )
        zeros = minus_zeros(bucket.flat) if own.has_minus_zero else None
        agreed = yield from _agree(own, expected)
        if agreed.head.is_not_finite:
            yield from sum_over_ranks(bucket.flat, member)
            return
        width = None if agreed.head.is_too_dense else width_of_sums(agreed.head.span, member.world_size)
        known = memory.mask if memory.mask is not None and torch.equal(memory.mask.union, agreed.union) else None
        elements = known.hashed.elements if known is not None else _elements_of(agreed.union, own, len(bucket.flat))
        if width is None or not _is_worth_it(len(elements), width, bucket.flat):
            yield from sum_over_ranks(bucket.flat, member)
            self._memories[bucket.number] = _Memory(bucket.parts, alone=LOOK_AGAIN)
            return
        summed = yield from _sum_sketch(_Addend(bucket.flat, own, agreed, width), elements, known, member)
        if summed is None:
            yield from sum_over_ranks(bucket.flat, member)
            return
        bucket.flat.index_copy_(0, elements, summed.numbers.to(bucket.flat.dtype))
        yield from settle_zeros(bucket.flat, zeros, one_has_none=agreed.head.lacks_minus_zero)
        self._memories[bucket.number] = _Memory(bucket.parts, summed.mask)


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
    union = own.bitmap.clone()
    yield Union(union)
    return _Agreed(head, union, LOOK_AGAIN)


def _is_worth_it(num_elements: int, width: int, flat: Tensor) -> bool:
    """Whether cells of that width, and the bitmap, are much less than the bucket."""
    num_bytes = num_elements * CELLS_PER_ELEMENT * width / 8 + len(flat) / 8
    return num_bytes <= WORTH * len(flat) * flat.element_size()


def _elements_of(union: Tensor, own: TouchedElements, length: int) -> Tensor:
    """The elements of a bitmap, which is often this rank's own."""
    is_own = not own.fits and torch.equal(union, own.bitmap)  # where it fits, its elements are those expected
    return own.elements if is_own else positions(unpack_bits(union, length))


class _Addend(NamedTuple):
    """What a rank adds to the sketch of a bucket."""

    flat: Tensor
    own: TouchedElements
    agreed: _Agreed
    width: int
    """Bits of a cell."""


class _Summed(NamedTuple):
    """What came out of a sketch."""

    numbers: Tensor
    """The sums of the elements, in float64."""
    mask: _Mask | None


def _sum_sketch(
    addend: _Addend, elements: Tensor, known: _Mask | None, member: Member
) -> Generator[Collective, None, _Summed | None]:
    """Sum the elements of the union; `None` where no table peels, or something else came out than went in.

    All others are zero on all ranks.
    """
    flat, span, width = addend.flat, addend.agreed.head.span, addend.width
    if not len(elements):
        return _Summed(flat.new_zeros(0, dtype=torch.float64), None)
    is_own = elements is addend.own.elements
    fixed = to_fixed(addend.own.numbers if is_own else flat.index_select(0, elements).double(), span)
    exceptions = ExceptionList(len(elements) // EXCEPTIONS, flat.dtype)
    beside = exceptions.packed(fixed.places, fixed.rests)
    attempts = iter([(known.hashed, known.peeling)]) if known is not None else hashed_elements(elements)
    for hashed, ready in attempts:
        table = hashed.insert(fixed.integers)
        if ready is not None:
            rests, peeling = (yield from _add_tables(table, width, beside, member)), ready
            break
        with BackgroundCall(partial(Peeling.of, hashed)) as work:
            rests = yield from _add_tables(table, width, beside, member)
            found = work.result()
        if found is not None:
            peeling = found
            break
    else:
        return None
    sums = from_fixed(peeling.take_out(table), span, width)
    if bool((table << (MAX_WIDTH - width)).any()):
        return None
    for rest in rests:
        exceptions.add(rest, sums)
    return _Summed(
        sums, _Mask(addend.agreed.union, hashed, peeling, addend.agreed.steps_left if known is not None else 0)
    )


def _add_tables(table: Tensor, width: int, beside: Tensor, member: Member) -> Generator[Collective, None, list[Tensor]]:
    """Make a table the sum over ranks, modulo 2^width, added by the owners of its cells.

    Returns what all ranks have `beside` it, by rank: bytes, as many on each, that travel to all with the addends.
    Servers get cells alone, and add them as they are.
    """
    ranges, rank, num_ranks = owned_ranges(len(table), member, GROUP), member.rank, member.world_size
    theirs = [packed_bytes(each.length, width) for each in ranges]
    own, mine = ranges[rank], [theirs[rank]] * num_ranks
    mine[rank] = theirs[rank] = 0
    served, from_servers = ServedSum.make(theirs[num_ranks:], width), [0] * member.num_servers

    pushed = [
        _message(table[each.start : each.stop], width, beside if owner < num_ranks else beside[:0])
        if owner != rank
        else beside
        for owner, each in enumerate(ranges)
    ]
    sizes = [size + len(beside) for size in mine]
    addends = beside.new_empty(sum(sizes))
    yield Trade(addends, torch.cat(pushed), [*sizes, *from_servers], [len(each) for each in pushed], served)

    total, messages = table[own.start : own.stop], torch.split(addends, sizes)
    for message, size in zip(messages, mine, strict=True):
        if size:
            total += unpack_cells(message[:size], width)
    answer = _message(total, width, beside[:0])
    sums = beside.new_empty(sum(theirs))
    answers = answer.repeat(sum(1 for size in mine if size))
    yield Trade(sums, answers, theirs, [*mine, *from_servers], served, is_answer=True)
    for owned, message in zip(ranges, torch.split(sums, theirs), strict=True):
        if len(message):
            table[owned.start : owned.stop] = unpack_cells(message, width)
    return [message[size:] for message, size in zip(messages, mine, strict=True)]


def _message(cells: Tensor, width: int, beside: Tensor) -> Tensor:
    """Cells packed, and behind them some bytes."""
    size = packed_bytes(len(cells), width)
    message = beside.new_empty(size + len(beside))
    if size:
        pack_cells(cells, width, message[:size])
    message[size:] = beside
    return message
