"""Collectives as values: a codec yields them, a driver carries them out, over real ranks or virtual ones.

A generator of collectives never touches a process group, so the same code runs in a communication thread, in the
virtual cluster and in tests without processes. Its driver carries out what it yields, in place, and resumes it.
"""

import itertools
from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Sum(NamedTuple):
    """All-reduce: the tensor becomes the sum over ranks, the same bits on each."""

    tensor: Tensor


class Union(NamedTuple):
    """All-reduce: the tensor, of uint8, becomes the bitwise OR over ranks."""

    tensor: Tensor


class Largest(NamedTuple):
    """All-reduce: the tensor becomes the maximum over ranks, by element."""

    tensor: Tensor


_numbers = itertools.count()


class ServedSum(NamedTuple):
    """The sum by gradient servers of pieces that they receive in one exchange and return in another."""

    number: int
    """The same in both trades of a rank, and in no others of it."""
    sizes: tuple[int, ...]
    """Elements that each server gets from every rank, of the type of the tensors that are traded."""

    @classmethod
    def make(cls, sizes: Sequence[int]) -> "ServedSum | None":
        """A new one; `None` where there are no servers."""
        return cls(next(_numbers), tuple(sizes)) if sizes else None


class Trade(NamedTuple):
    """All-to-all: rank r's piece of `sent` goes to rank r, and what came from it is its piece of `received`.

    Pieces lie behind each other in rank order, in elements of the first dimension; both tensors are contiguous and of
    one type. A piece may be empty. Behind those of the ranks are those of the gradient servers, if they take part.
    """

    received: Tensor
    sent: Tensor
    received_sizes: list[int]
    sent_sizes: list[int]
    served: ServedSum | None = None
    """What gradient servers do with it, if they take part."""
    is_answer: bool = False
    """Whether servers send the sums of an earlier exchange."""


Collective = Sum | Union | Largest | Trade
Leg = Generator[Collective, None, None]
"""A generator of collectives; each is complete when the generator continues."""


def just(collective: Collective) -> Leg:
    """A generator of one collective."""
    yield collective


def run_alike(legs: Sequence[Leg]) -> None:
    """Run the generators of all ranks of one process in lockstep, summing in rank order.

    Raises:
        RuntimeError: when ranks yield different collectives, which would hang or corrupt real ones.
    """
    while True:
        asked = [next(leg, None) for leg in legs]
        yielded = [each for each in asked if each is not None]
        if not yielded:
            return
        if len(yielded) < len(asked):
            raise RuntimeError(f"ranks {[r for r, each in enumerate(asked) if each is None]} ended before the others")
        perform_alike(yielded)


def perform_alike(asked: Sequence[Collective]) -> None:
    """Carry out one collective, given the request of each rank.

    Raises:
        RuntimeError: when they do not fit together.
    """
    trades = [each for each in asked if isinstance(each, Trade)]
    if len(trades) == len(asked):
        pieces = [torch.split(trade.sent, trade.sent_sizes) for trade in trades]
        for rank, trade in enumerate(trades):
            for source, place in enumerate(torch.split(trade.received, trade.received_sizes)):
                piece = pieces[source][rank]
                if (len(piece), piece.dtype) != (len(place), place.dtype):
                    raise RuntimeError(
                        f"Trade: rank {source} sends {len(piece)} {piece.dtype} to rank {rank}, which expects "
                        f"{len(place)} {place.dtype}"
                    )
                place.copy_(piece)
        return
    kinds = {(type(each), None if isinstance(each, Trade) else each.tensor.shape) for each in asked}
    if len(kinds) > 1:
        raise RuntimeError(f"ranks ask for different collectives: {kinds}")
    tensors = [each.tensor for each in asked if not isinstance(each, Trade)]
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if isinstance(asked[0], Sum):
            total.add_(tensor)
        elif isinstance(asked[0], Union):
            total.bitwise_or_(tensor)
        else:
            torch.maximum(total, tensor, out=total)
    for tensor in tensors:
        tensor.copy_(total)
