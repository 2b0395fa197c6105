"""The codec `powersgd`: a gradient matrix as the product of two thin ones, with error feedback (arXiv 1905.13727).

For each parameter with two or more dimensions, as a matrix M of n rows and m columns, with M = gradient + residual:

    P = orthogonal columns of sum_i M_i Q        n x r, one sum over ranks
    Q = sum_i M_i' P                             m x r, another one
    the sum over ranks is taken to be P Q', and rank i keeps M_i - P (M_i' P)' for the next step

which is exact where the sum has no more than r directions. It sends r (n + m) numbers of n m; matrices of which that
saves less than half, and vectors, are sent as they are, with the first sum. Q is kept for the next step.

P and Q are summed, so all ranks have the same bits of them; what is made of them here uses only operations that IEEE
754 defines to the last bit (no matrix product, no reduction of the library's), whatever processors the ranks have.
Where something is not finite the bucket is sent as it is, and the residuals stay as they were.
"""

import zlib
from typing import NamedTuple, Self

import torch
from torch import Tensor

from dynamix.trainer.exchange.codec import BucketPart, BucketView, ErrorFeedback, Leg, Member, sum_over_ranks

RANK = 4
WORTH = 0.5
"""Largest size of both factors over the matrix; above it, the matrix is sent unchanged."""
NOTHING = 1e-15
"""Squared length that a column has left over that it had, below which it is nothing but rounding."""


class _Matrix(NamedTuple):
    """A parameter that is sent as two factors."""

    key: str
    start: int
    stop: int
    num_rows: int
    rank: int

    @classmethod
    def of_part(cls, part: BucketPart, rank: int) -> Self | None:
        """A parameter as a matrix, if two factors are so much smaller."""
        size = part.stop - part.start
        if len(part.shape) < 2 or not size:
            return None
        rows = part.shape[0]
        columns = size // rows
        rank = min(rank, rows, columns)
        return cls(part.key, part.start, part.stop, rows, rank) if rank * (rows + columns) <= WORTH * size else None

    @property
    def num_columns(self) -> int:
        """Number of columns of the matrix."""
        return (self.stop - self.start) // self.num_rows

    def of(self, flat: Tensor) -> Tensor:
        """View a parameter's gradient in a bucket as a matrix."""
        return flat[self.start : self.stop].view(self.num_rows, -1)


class LowRankExchange(ErrorFeedback):
    """The codec `powersgd`, for one model."""

    name = "powersgd"

    def __init__(self, rank: int = RANK) -> None:
        super().__init__()
        self._rank = rank
        self._factors: dict[str, Tensor] = {}
        """Q by parameter's key, of the newest step, the same on all ranks."""

    def reduce(self, bucket: BucketView, member: Member) -> Leg:
        """Sum as `ExchangeCodec.reduce`: vectors and first factors, then second factors."""
        if member.world_size == 1:
            return
        matrices = [matrix for part in bucket.parts if (matrix := _Matrix.of_part(part, self._rank)) is not None]
        values = self.residuals.of(bucket) + bucket.flat
        firsts = [matrix.of(values) @ self._factor(matrix, values) for matrix in matrices]
        edges = [0, *(edge for matrix in matrices for edge in (matrix.start, matrix.stop)), len(values)]
        vectors = [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if stop > start]
        packed = torch.cat([*(values[start:stop] for start, stop in vectors), *(each.flatten() for each in firsts)])
        yield from sum_over_ranks(packed, member)
        if not bool(packed.isfinite().all()):
            yield from sum_over_ranks(bucket.flat, member)
            return

        sizes = [*(stop - start for start, stop in vectors), *(each.numel() for each in firsts)]
        pieces = torch.split(packed, sizes)
        summed = torch.empty_like(values)
        for (start, stop), piece in zip(vectors, pieces[: len(vectors)], strict=True):
            summed[start:stop] = piece
            values[start:stop] = 0
        bases = [
            orthogonal(piece.view(matrix.num_rows, -1))
            for matrix, piece in zip(matrices, pieces[len(vectors) :], strict=True)
        ]
        own = [matrix.of(values).T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        if own:
            seconds = torch.cat([each.flatten() for each in own])
            yield from sum_over_ranks(seconds, member)
            if not bool(seconds.isfinite().all()):
                yield from sum_over_ranks(bucket.flat, member)
                return
            factors = [
                each.view(matrix.num_columns, -1)
                for matrix, each in zip(matrices, torch.split(seconds, [each.numel() for each in own]), strict=True)
            ]
            for matrix, basis, mine, factor in zip(matrices, bases, own, factors, strict=True):
                matrix.of(values).sub_(basis @ mine.T)
                product = matrix.of(summed).zero_()
                for column, row in zip(basis.unbind(1), factor.unbind(1), strict=True):
                    product.add_(torch.outer(column, row))  # a product and a sum at a time, each rounded by itself
            self._factors.update((matrix.key, each.clone()) for matrix, each in zip(matrices, factors, strict=True))
        bucket.flat.copy_(summed)
        if bucket.flat.dtype != summed.dtype and member.rank == 0:  # what the gradient's own type took away, once
            values += summed.sub_(bucket.flat).nan_to_num_(0.0, 0.0, 0.0)
        self.residuals.put(bucket, values)

    def _factor(self, matrix: _Matrix, like: Tensor) -> Tensor:
        """Q of the step before, or a first one that is the same on all ranks."""
        known = self._factors.get(matrix.key)
        if known is not None and known.shape == (matrix.num_columns, matrix.rank) and bool(known.any()):
            return known
        generator = torch.Generator().manual_seed(zlib.crc32(matrix.key.encode()))
        first = torch.randn(matrix.num_columns, matrix.rank, generator=generator, dtype=torch.float64)
        return first.to(like.device, like.dtype)


def orthogonal(columns: Tensor) -> Tensor:
    """Orthogonal columns of length 1 with the same span, the same bits on every processor; zero where one adds nothing.

    Gram-Schmidt, twice, in float64.
    """
    found: list[Tensor] = []
    for given in columns.double().unbind(1):
        column, before = given, exact_dot(given, given)
        for _ in range(2):
            for each in found:
                column = column - exact_dot(column, each) * each
        squared = exact_dot(column, column)
        is_new = bool(squared > NOTHING * before)
        found.append(column / squared.sqrt() if is_new else torch.zeros_like(column))
    return torch.stack(found, 1).to(columns.dtype)


def exact_dot(one: Tensor, other: Tensor) -> Tensor:
    """A scalar product whose order of additions is its own: halves are added until one number is left."""
    products = one * other
    while len(products) > 1:
        half = len(products) // 2
        rest = products[2 * half :]
        products = torch.cat([products[:half] + products[half : 2 * half], rest])
    return products[0]
