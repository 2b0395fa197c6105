"""The codec `sketch`: lossless homomorphic compression of sparse gradients, with integer cells.

A bitmap of the elements that are not zero is united over ranks; each rank adds its values to a table of 1.24 cells per
element of the union, the owners add the tables, cell by cell and without looking inside, and every rank takes the sums
out again ("peeling"). In floating point that has a loss, by cancellation; here values are integers of a common unit, so
their sum is exact in any order. Cells have as many bits as the sums need, 36 for normal values in float32 on 4 ranks:
the small ones that would need more, 1 in 128, send what is below the unit beside the table, to all ranks.

Where the mask was the same in two steps, the next ones first ask whether a rank touched anything else, and send the
bitmap only then. A bucket is sent as it is where that is cheaper or its values are too far apart (64 bits), and is
checked again after `LOOK_AGAIN` steps; also where something is not finite, in that step. The union tells all ranks
the same. It is for aggregators that can only add; `rows` was faster in every case measured (docs/communication.md).
"""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from dynamix.trainer.exchange.codec import (
    BucketPart,
    BucketView,
    Collective,
    Leg,
    Member,
    Trade,
    Union,
    owned_ranges,
    sum_over_ranks,
)
from dynamix.trainer.exchange.rows import (
    INTEGERS,
    minus_zeros,
    pack_bits,
    positions,
    settle_zeros,
    unpack_bits,
)

PLANES = {64: torch.int64, 32: torch.int32, 16: torch.int16, 8: torch.int8}
GROUP = 32
"""Cells are packed in groups of so many, so that every plane begins where its type may begin."""


def packed_bytes(num_cells: int, width: int) -> int:
    """Size of so many cells, which are whole groups."""
    return num_cells // 8 * width


def pack_cells(cells: Tensor, width: int) -> Tensor:
    """The lowest bits of cells in int64, whole groups, as bytes."""
    planes = []
    for low, bits in _planes(width):
        plane = cells >> low
        planes.append(pack_bits((plane & 1).to(torch.bool)) if bits == 1 else plane.to(PLANES[bits]).view(torch.uint8))
    return torch.cat(planes)


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
    """Lowest bit and number of bits of each plane."""
    low = 0
    for bits in (*PLANES, *[1] * 7):
        if width - low >= bits:
            yield low, bits
            low += bits


PLACE_BYTES = 4
ALIGNMENT = 8
"""Messages end where numbers of any type may begin: cells of the next rank lie behind one."""


HIGHEST = 1100
"""Exponents lie between plus and minus this, also those of float64."""
EXCEPTIONS = 128
"""One exception is permitted per this many numbers."""

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


def width_of_sums(span: Span, num_ranks: int) -> int | None:
    """Bits of a sum of integers over ranks, with a sign; `None` where 64 are too few."""
    if span == NOTHING:
        return 1
    width = max(span.top - span.unit, 0) + (num_ranks - 1).bit_length() + 1
    return width if width <= MAX_WIDTH and span.unit >= LOWEST_UNIT else None


def to_fixed(numbers: Tensor, span: Span) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers in float64 that are within the span as int64; places and parts below the unit of the exceptions."""
    if span == NOTHING:
        nowhere = numbers.new_zeros(0)
        return torch.zeros_like(numbers, dtype=torch.int64), nowhere.to(torch.int64), nowhere
    units = numbers * 2.0**-span.unit
    whole = units.trunc()
    rests = units.sub_(whole)
    places = rests.nonzero().flatten()
    return whole.to(torch.int64), places, rests.index_select(0, places).mul_(2.0**span.unit)


def from_fixed(integers: Tensor, span: Span, width: int) -> Tensor:
    """Integers modulo 2^width as float64, rounded where they have more than 53 bits; zero is +0.0."""
    if span == NOTHING:
        return torch.zeros_like(integers, dtype=torch.float64)
    unused = MAX_WIDTH - width
    return ((integers << unused) >> unused).double().mul_(2.0**span.unit)


NUM_FLAGS = 8
HEAD_BITS = NUM_FLAGS + 4 * HIGHEST


class Head(NamedTuple):
    """The head of one rank, then of all."""

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
        """The head as bytes, on the device of another tensor: one run of bits per end, longer for a wider span."""
        bits = like.new_zeros(HEAD_BITS, dtype=torch.bool)
        bits[: len(self) - 1] = torch.tensor(self[1:])
        top, unit = bits[NUM_FLAGS:].view(2, -1)
        top[: self.span.top + HIGHEST] = True
        unit[: HIGHEST - self.span.unit] = True
        return pack_bits(bits)

    @classmethod
    def read(cls, packed: Tensor) -> "Head":
        """The head of all ranks, with the least span that has all of theirs."""
        bits = unpack_bits(packed, HEAD_BITS)
        top, unit = bits[NUM_FLAGS:].view(2, -1).sum(1).tolist()
        return cls(Span(top - HIGHEST, HIGHEST - unit), *bits[: len(cls._fields) - 1].tolist())


class TouchedElements(NamedTuple):
    """The elements that a rank touched in a bucket."""

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
        """Find the touched elements; expected ones also as a bitmap."""

        def among(mask: Tensor) -> "TouchedElements":
            bitmap = pack_bits(mask)
            fits = union is not None and not bool((bitmap & ~union).any())
            chosen = elements if elements is not None and fits else positions(mask)
            is_dense = 2 * len(chosen) > len(flat)
            numbers = flat if is_dense else flat.index_select(0, chosen).double()
            return cls(bitmap, chosen, numbers, is_dense, fits, not is_dense and bool(minus_zeros(numbers).any()))

        found = among(flat.view(INTEGERS[flat.element_size()]) != 0)
        if found.is_dense or (found.has_minus_zero and not found.fits):
            return among(flat != 0)._replace(has_minus_zero=True)
        return found

    def head(self) -> Head:
        """The head for the other ranks."""
        is_finite = bool(self.numbers.isfinite().all())
        return Head(
            find_span(self.numbers) if is_finite and not self.is_dense else NOTHING,
            is_not_finite=not is_finite,
            is_too_dense=self.is_dense,
            touches_more=not self.fits,
            lacks_minus_zero=not self.has_minus_zero,
        )


MANY = 8192
"""Elements of a large table."""
CELLS_PER_ELEMENT = 1.3
CELLS_PER_ELEMENT_OF_MANY = 1.24
SPARE_CELLS = 8
"""More cells per sub-table, for small ones, in which elements that share all their cells are not rare."""
NUM_SEEDS = 8
NUM_TABLES = 3
ONE = 1 << 40
"""A cell counts its elements from this bit on, and adds up their places below."""


class HashedElements(NamedTuple):
    """Cells of the elements in a table."""

    elements: Tensor
    """Different numbers, of int64."""
    cells: Tensor
    """The cells of each, as (tables, elements)."""
    num_cells: int

    @classmethod
    def of(cls, elements: Tensor, seed: int) -> "HashedElements":
        """Cells for elements, the same on every rank; others for another seed. The tables lie behind each other."""

        def mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
            """Each number's bits spread over 64: the finalizer of splitmix64."""
            numbers = numbers * np.uint64(0x9E3779B97F4A7C15)
            numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return numbers ^ (numbers >> np.uint64(31))

        share = CELLS_PER_ELEMENT_OF_MANY if seed == 0 and len(elements) >= MANY else CELLS_PER_ELEMENT
        size = -(-int(len(elements) * share) // NUM_TABLES) + SPARE_CELLS
        first = mixed(elements.cpu().numpy().astype(np.uint64) + np.uint64(seed << 48))
        second, half, low = mixed(first), np.uint64(32), np.uint64(0xFFFFFFFF)
        parts = (first >> half, first & low, second >> half)
        found = [((part * np.uint64(size)) >> half) + np.uint64(number * size) for number, part in enumerate(parts)]
        cells = torch.from_numpy(np.stack(found).view(np.int64)).to(elements.device)
        return cls(elements, cells, -(-NUM_TABLES * size // GROUP) * GROUP)

    def insert(self, values: Tensor) -> Tensor:
        """A table of int64, in whole groups, to which the elements' values are added; sums wrap around at 2^64."""
        table = values.new_zeros(self.num_cells)
        for cells in self.cells:
            table.scatter_add_(0, cells, values)
        return table


class Peeling(NamedTuple):
    """Order in which elements are taken out of a table."""

    order: Tensor
    """Their places, as they come out."""
    cells: Tensor
    """The cells of each, as they come out, as (tables, elements)."""
    single: Tensor
    """Cell in which each element is alone when it is taken out, in that order."""
    rounds: list[int]
    """Numbers of elements that are taken out together."""

    @classmethod
    def of(cls, hashed: HashedElements) -> "Peeling | None":
        """A peeling, made without values; `None` when the table does not peel."""
        cells = hashed.cells.cpu().numpy()
        num_elements = cells.shape[1]
        table = np.zeros(hashed.num_cells, dtype=np.int64)
        marks = np.arange(ONE, ONE + num_elements)
        for each in cells:
            np.add.at(table, each, marks)
        rounds, singles, chosen = [marks[:0]], [marks[:0]], np.empty(num_elements, dtype=np.int64)
        candidates = np.flatnonzero(table >> 40 == 1)
        while len(candidates):
            alone = table.take(candidates) - ONE
            turns = np.arange(len(alone))
            # an element may be alone in several cells, and a cell named twice: one of them counts
            chosen[alone] = turns
            kept = chosen.take(alone) == turns
            alone, candidates = alone[kept], candidates[kept]
            rounds.append(alone)
            singles.append(candidates)
            left = cells.take(alone, axis=1)
            for each in left:
                np.subtract.at(table, each, alone + ONE)
            touched = left.ravel()
            candidates = touched[table.take(touched) >> 40 == 1]
        order = np.concatenate(rounds)
        if len(order) < num_elements:
            return None
        arrays = (order, cells.take(order, axis=1), np.concatenate(singles))
        places, in_order, single = (torch.from_numpy(each).to(hashed.cells.device) for each in arrays)
        return cls(places, in_order, single, [len(each) for each in rounds])

    def take_out(self, table: Tensor) -> Tensor:
        """The elements' values in a table, modulo 2^64; what remains in it is zero."""
        values, start = table.new_empty(len(self.order)), 0
        for count in self.rounds:
            stop = start + count
            found = table.index_select(0, self.single[start:stop])
            values[start:stop] = found
            found.neg_()
            for cells in self.cells:
                table.scatter_add_(0, cells[start:stop], found)
            start = stop
        return torch.empty_like(values).index_copy_(0, self.order, values)


def hashed_elements(elements: Tensor) -> Iterator[tuple[HashedElements, Peeling | None]]:
    """Attempts to hash elements, the same on every rank: small tables that peel, large ones that still have to."""
    for seed in range(NUM_SEEDS):
        hashed = HashedElements.of(elements, seed)
        peeling = Peeling.of(hashed) if len(elements) < MANY else None
        if peeling is not None or len(elements) >= MANY:
            yield hashed, peeling


WORTH = 0.7
"""Largest size of a sketch over the bucket; above it, the bucket is sent unchanged."""
LOOK_AGAIN = 50
"""Steps that a bucket is left alone, and steps without a bitmap before the next one."""


class _Mask(NamedTuple):
    """Elements that the ranks touched in a bucket the last time, the same on all ranks."""

    union: Tensor
    hashed: HashedElements
    peeling: Peeling
    steps_left: int
    """Steps for which the mask is expected again, after it was the same twice; a mask may also shrink."""


class _Memory(NamedTuple):
    """State of the codec for one bucket."""

    parts: tuple[BucketPart, ...]
    mask: _Mask | None = None
    alone: int = 0
    """Steps for which the bucket is still left alone."""


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
        head, union, steps_left = yield from _agree(own, expected)
        if head.is_not_finite:
            yield from sum_over_ranks(bucket.flat, member)
            return
        width = None if head.is_too_dense else width_of_sums(head.span, member.world_size)
        known = memory.mask if memory.mask is not None and torch.equal(memory.mask.union, union) else None
        if known is not None:
            elements = known.hashed.elements
        elif not own.fits and torch.equal(union, own.bitmap):  # where it fits, its elements are those expected
            elements = own.elements
        else:
            elements = positions(unpack_bits(union, len(bucket.flat)))
        num_bytes = len(elements) * CELLS_PER_ELEMENT * (width or 0) / 8 + len(bucket.flat) / 8  # cells, and the bitmap
        if width is None or num_bytes > WORTH * bucket.flat.nbytes:
            yield from sum_over_ranks(bucket.flat, member)
            self._memories[bucket.number] = _Memory(bucket.parts, alone=LOOK_AGAIN)
            return
        summed = yield from _sum_sketch(
            bucket.flat, own, head.span, width=width, elements=elements, known=known, member=member
        )
        if summed is None:
            yield from sum_over_ranks(bucket.flat, member)
            return
        sums, hashing = summed
        mask = None if hashing is None else _Mask(union, *hashing, 0 if known is None else steps_left)
        bucket.flat.index_copy_(0, elements, sums.to(bucket.flat.dtype))
        yield from settle_zeros(bucket.flat, zeros, one_has_none=head.lacks_minus_zero)
        self._memories[bucket.number] = _Memory(bucket.parts, mask)


def _agree(own: TouchedElements, expected: _Mask | None) -> Generator[Collective, None, tuple[Head, Tensor, int]]:
    """Exchange the masks of all ranks, with the bitmap only if the union is unknown.

    Returns the head of all, the union, and for how many steps that is expected again if it is the one of the step
    before: equal on all ranks.
    """
    said = own.head().packed(own.bitmap)
    if expected is None:
        message = torch.cat([said, own.bitmap])
        yield Union(message)
        return Head.read(message[: HEAD_BITS // 8]), message[HEAD_BITS // 8 :], LOOK_AGAIN
    yield Union(said)
    head = Head.read(said)
    if not head.touches_more:
        return head, expected.union, expected.steps_left - 1
    union = own.bitmap.clone()
    yield Union(union)
    return head, union, LOOK_AGAIN


def _sum_sketch(
    flat: Tensor,
    own: TouchedElements,
    span: Span,
    *,
    width: int,
    elements: Tensor,
    known: _Mask | None,
    member: Member,
) -> Generator[Collective, None, tuple[Tensor, tuple[HashedElements, Peeling] | None] | None]:
    """Sum the elements of the union, in float64 with cells of `width` bits; also returns how they were hashed.

    `None` where no table peels, or something else came out than went in. All other elements are zero on all ranks.
    """
    if not len(elements):
        return flat.new_zeros(0, dtype=torch.float64), None
    numbers = own.numbers if elements is own.elements else flat.index_select(0, elements).double()
    integers, places, rests = to_fixed(numbers, span)
    capacity = len(elements) // EXCEPTIONS
    # the message beside the table: places, then numbers; what is not used is zero, at place 0
    assert len(places) <= capacity, "a span has no more exceptions"
    parts = (places.to(torch.int32), rests.to(flat.dtype))
    beside = torch.cat([pad(each, (0, capacity - len(places))).view(torch.uint8) for each in parts])
    beside = pad(beside, (0, -len(beside) % ALIGNMENT))
    attempts = iter([(known.hashed, known.peeling)]) if known is not None else hashed_elements(elements)
    for hashed, ready in attempts:
        table = hashed.insert(integers)
        if ready is not None:
            all_beside, peeling = (yield from _add_tables(table, width, beside, member)), ready
            break
        with ThreadPoolExecutor(1, "dynamix exchange peeling") as pool:
            work = pool.submit(Peeling.of, hashed)
            all_beside = yield from _add_tables(table, width, beside, member)
            found = work.result()
        if found is not None:
            peeling = found
            break
    else:
        return None
    sums = from_fixed(peeling.take_out(table), span, width)
    if bool((table << (MAX_WIDTH - width)).any()):
        return None
    end = capacity * PLACE_BYTES
    for message in all_beside:  # in the same order on every rank
        added = message[end : end + capacity * flat.dtype.itemsize].clone().view(flat.dtype)
        sums.index_add_(0, message[:end].clone().view(torch.int32), added.to(sums.dtype))
    return sums, (hashed, peeling)


def _add_tables(table: Tensor, width: int, beside: Tensor, member: Member) -> Generator[Collective, None, list[Tensor]]:
    """Make a table the sum over ranks, modulo 2^width, added by the owners of its cells.

    Returns what all ranks have `beside` it, by rank: bytes, as many on each, that travel to all with the addends.
    """
    assert not member.num_servers, "gradient servers cannot add cells"
    ranges, rank, num_ranks = owned_ranges(len(table), member, GROUP), member.rank, member.world_size
    theirs = [packed_bytes(len(each), width) for each in ranges]
    own, mine = ranges[rank], [theirs[rank]] * num_ranks
    mine[rank] = theirs[rank] = 0

    pushed = [
        torch.cat([pack_cells(table[each.start : each.stop], width), beside]) if owner != rank else beside
        for owner, each in enumerate(ranges)
    ]
    sizes = [size + len(beside) for size in mine]
    addends = beside.new_empty(sum(sizes))
    yield Trade(addends, torch.cat(pushed), sizes, [len(each) for each in pushed])

    total, messages = table[own.start : own.stop], torch.split(addends, sizes)
    for message, size in zip(messages, mine, strict=True):
        if size:
            total += unpack_cells(message[:size], width)
    answer = pack_cells(total, width)
    sums = beside.new_empty(sum(theirs))
    answers = answer.repeat(sum(1 for size in mine if size))
    yield Trade(sums, answers, theirs, mine)
    for owned, message in zip(ranges, torch.split(sums, theirs), strict=True):
        if len(message):
            table[owned.start : owned.stop] = unpack_cells(message, width)
    return [message[size:] for message, size in zip(messages, mine, strict=True)]
