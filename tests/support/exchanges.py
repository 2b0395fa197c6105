"""Buckets for exchange codecs, and the ranks of a job in one process."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from dynamix.trainer.exchange.codec import BucketPart, BucketView, ExchangeCodec, Member, leg_of, run_alike
from dynamix.trainer.exchange.plan import exchange_codec

Shapes = dict[str, tuple[int, ...]]
"""Parameters of a bucket, by key, in order."""


def make_parts(shapes: Shapes) -> tuple[BucketPart, ...]:
    """Parts that lie behind each other."""
    ends = list(accumulate((torch.Size(shape).numel() for shape in shapes.values()), initial=0))
    return tuple(
        BucketPart(key, start, stop, torch.Size(shape))
        for (key, shape), start, stop in zip(shapes.items(), ends[:-1], ends[1:], strict=True)
    )


class VirtualRanks:
    """A codec per rank, run in lockstep on a bucket after the other."""

    def __init__(self, codec: str, num_ranks: int, shares: tuple[float, ...] = ()) -> None:
        self.codecs: list[ExchangeCodec] = [exchange_codec(codec) for _ in range(num_ranks)]
        self.shares = shares

    def members(self) -> list[Member]:
        """The ranks, as codecs know them."""
        return [Member(rank, len(self.codecs), self.shares) for rank in range(len(self.codecs))]

    def reduce(
        self, gradients: Sequence[torch.Tensor], shapes: Shapes | None = None, *, number: int = 0, flush: bool = False
    ) -> torch.Tensor:
        """The sum that all ranks agree on, bit for bit; gradients are flat, by rank, and not changed."""
        parts = make_parts(shapes or {"weight": (len(gradients[0]),)})
        buckets = [BucketView(number, gradient.clone(), parts) for gradient in gradients]
        run_alike([leg_of(*each, flushes=flush) for each in zip(self.codecs, buckets, self.members(), strict=True)])
        first = buckets[0].flat
        assert all(same_bits(bucket.flat, first) for bucket in buckets), "ranks have different sums"
        return first


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same bit for bit: NaN is NaN, and -0.0 is not 0.0."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def dense_sum(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the all-reduce makes of them, in rank order."""
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total


def masked(
    num_ranks: int, length: int, density: float, seed: int, *, alike: bool = False, multiplied: bool = False
) -> list[torch.Tensor]:
    """Random normal gradients of float32 by rank, of which that share is not zero; `alike`, in the same places.

    With `multiplied`, by a mask of 0.0 and 1.0, half of the zeros are -0.0.
    """
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(length, generator=generator) < density
    found = []
    for _ in range(num_ranks):
        numbers = torch.randn(length, generator=generator)
        found.append(numbers * mask if multiplied else torch.where(mask, numbers, 0.0))
        if not alike:
            mask = torch.rand(length, generator=generator) < density
    return found
