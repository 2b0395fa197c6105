"""Peeling: a table of cells to which elements are added by hash, and from which they are taken out one by one.

Each element is added to one cell in each of three sub-tables. A cell with a single element is that element's value; it
is subtracted from the other two cells, which leaves more cells with a single one, until none is left ("peeling", as in
invertible Bloom look-up tables; the homomorphic compression of arXiv:2402.07529). Tables of several ranks are added
cell by cell, and what is taken out of the sum is the elements' sum. The limit is 1.222 cells per element; with 1.24 a
large table peels but for rare ones, with 1.3 most small ones. As every rank knows the elements, all know of a table
that does not peel, and hash it again: a small one before it is sent, while the order of peeling of a large one is found
while it travels. Ranks need the same cells, not the same order of peeling.

Peeling 210,000 elements takes 20 ms of one core (2026), adding them 1 ms and taking them out 5 ms.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .cells import GROUP

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

Integers = npt.NDArray[np.int64]


class HashedElements(NamedTuple):
    """Where elements go in a table."""

    elements: Tensor
    """Different numbers, of int64."""
    cells: Tensor
    """The cells of each, as (tables, elements)."""
    num_cells: int

    @classmethod
    def of(cls, elements: Tensor, seed: int) -> "HashedElements":
        """Cells for elements, the same on every rank; others for another seed."""
        numbers = elements.cpu().numpy()
        share = CELLS_PER_ELEMENT_OF_MANY if seed == 0 and len(numbers) >= MANY else CELLS_PER_ELEMENT
        size = -(-int(len(numbers) * share) // NUM_TABLES) + SPARE_CELLS
        cells = torch.from_numpy(hash_cells(numbers, size, seed)).to(elements.device)
        return cls(elements, cells, -(-NUM_TABLES * size // GROUP) * GROUP)

    def insert(self, values: Tensor) -> Tensor:
        """A table of int64, in whole groups, to which the elements' values are added; sums wrap around at 2^64."""
        table = values.new_zeros(self.num_cells)
        for cells in self.cells:
            table.scatter_add_(0, cells, values)
        return table


class Peeling(NamedTuple):
    """In which order elements come out of a table."""

    order: Tensor
    """Their places, as they come out."""
    cells: Tensor
    """The cells of each, as they come out, as (tables, elements)."""
    single: Tensor
    """In which cell each is alone when its turn comes, as they come out."""
    rounds: list[int]
    """How many elements come out at a time."""

    @classmethod
    def of(cls, hashed: HashedElements) -> "Peeling | None":
        """A peeling; `None` when the table does not peel."""
        cells = hashed.cells.cpu().numpy()
        found = _peel(cells, hashed.num_cells)
        if found is None:
            return None
        order, single, rounds = found
        tensors = (
            torch.from_numpy(each).to(hashed.cells.device) for each in (order, cells.take(order, axis=1), single)
        )
        places, in_order, alone = tensors
        return cls(places, in_order, alone, rounds)

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


def hash_cells(elements: Integers, size: int, seed: int) -> Integers:
    """A cell in each of three tables of that size, as (tables, elements); the tables lie behind each other."""
    first = _mixed(elements.astype(np.uint64) + np.uint64(seed << 48))
    second = _mixed(first)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    parts = (first >> half, first & low, second >> half)
    found = [((part * np.uint64(size)) >> half) + np.uint64(number * size) for number, part in enumerate(parts)]
    return np.stack(found).view(np.int64)


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each number's bits spread over 64: the finalizer of splitmix64."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _peel(cells: Integers, num_cells: int) -> tuple[Integers, Integers, list[int]] | None:
    """Peel without values; returns the order, the single cells and the rounds, or `None` when some are left."""
    num_elements = cells.shape[1]
    table = np.zeros(num_cells, dtype=np.int64)
    marks = np.arange(ONE, ONE + num_elements)
    for each in cells:
        np.add.at(table, each, marks)
    order, single, chosen = [marks[:0]], [marks[:0]], np.empty(num_elements, dtype=np.int64)
    candidates = np.flatnonzero(table >> 40 == 1)
    while len(candidates):
        alone = table.take(candidates) - ONE
        turns = np.arange(len(alone))
        chosen[alone] = turns  # an element may be alone in several cells, and a cell named twice: one of them counts
        kept = chosen.take(alone) == turns
        alone, candidates = alone[kept], candidates[kept]
        order.append(alone)
        single.append(candidates)
        left = cells.take(alone, axis=1)
        gone = alone + ONE
        for each in left:
            np.subtract.at(table, each, gone)
        touched = left.ravel()
        candidates = touched[table.take(touched) >> 40 == 1]
    if sum(map(len, order)) < num_elements:
        return None
    return np.concatenate(order), np.concatenate(single), [len(each) for each in order]
