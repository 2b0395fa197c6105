"""Owners: who sums which elements, and the sum of a tensor at its owners.

With shares s a rank owns about s_r / sum(s) of the elements, in one range. All ranks push their addends to the owners,
and pull the sums back: a slow link that owns less carries less, which the ring of an all-reduce cannot do. Gradient
servers are owners behind the ranks.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .codec import BucketView, ExchangeCodec, Member
from .collectives import Leg, ServedSum, Sum, Trade

HALF_TYPES = (torch.float16, torch.bfloat16)
MOST_CHUNKS = 8
"""In a bucket: the first one's way there and the last one's way back overlap with nothing."""
LEAST_CHUNK_BYTES = 64 * 1024
"""Each chunk costs 4 (N - 1) messages."""


class OwnedRange(NamedTuple):
    """The elements that one rank owns."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def owned_ranges(num_elements: int, member: Member, block: int = 1) -> list[OwnedRange]:
    """What each rank and then each server owns: ranges of whole blocks, only the last may end with a part of one."""
    num_owners = member.world_size + member.num_servers
    shares = member.shares or (1.0,) * num_owners
    if len(shares) != num_owners or min(shares) < 0 or not sum(shares) > 0:
        raise ValueError(f"shares {shares} for {num_owners} owners: one for each, none negative, not all 0")
    num_blocks = -(-num_elements // block)
    ends, so_far, total = [0], 0.0, sum(shares)
    for share in shares:
        so_far += share
        ends.append(min(round(so_far / total * num_blocks) * block, num_elements))
    ends[-1] = num_elements
    return [OwnedRange(start, stop) for start, stop in pairwise(ends)]


def sum_over_ranks(tensor: Tensor, member: Member) -> Leg:
    """Make a flat tensor the sum over ranks, as the member's route says: at owners in rank order."""
    if member.world_size == 1:
        return
    if not member.shares:
        yield Sum(tensor)
        return
    lengths = [each.length for each in owned_ranges(len(tensor), member)]
    mine = [lengths[member.rank]] * member.world_size
    served = ServedSum.make(lengths[member.world_size :])
    from_all = [*mine, *[0] * member.num_servers]
    addends = tensor.new_empty(sum(mine))
    yield Trade(addends, tensor, from_all, lengths, served)
    total = sum_in_rank_order(list(torch.split(addends, mine)))
    yield Trade(tensor, total.repeat(member.world_size), lengths, from_all, served, is_answer=True)


def sum_in_rank_order(addends: list[Tensor]) -> Tensor:
    """The sum, one addend after the other, of half precision in float32; the first one is overwritten."""
    first, *others = addends
    total = first.float() if first.dtype in HALF_TYPES else first
    for addend in others:
        total.add_(addend)
    return total.to(first.dtype)


def chunks_of(bucket: BucketView, num_bytes: float) -> list[BucketView]:
    """A bucket of so many bytes in parts: while the sum of one comes back, the next one is on its way.

    For codecs that care for nothing but the numbers: the parts say nothing of parameters.
    """
    count = min(MOST_CHUNKS, max(1, int(num_bytes // LEAST_CHUNK_BYTES)))
    return [bucket._replace(flat=flat, parts=()) for flat in torch.tensor_split(bucket.flat, count)]


def legs_of(codec: ExchangeCodec, bucket: BucketView, member: Member) -> list[Leg]:
    """The sum of a bucket, in the parts that travel one behind the other: gradients as they are to ranks in chunks.

    Chunks to gradient servers were slower than whole buckets (docs/communication.md).
    """
    if isinstance(codec, PlainExchange) and member.shares and not member.num_servers:
        return [codec.reduce(chunk, member) for chunk in chunks_of(bucket, bucket.flat.nbytes)]
    return [codec.reduce(bucket, member)]


class PlainExchange:
    """The codec `none`: gradients as they are, by the all-reduce or to owners."""

    name = "none"
    is_lossless = True

    def reduce(self, bucket: BucketView, member: Member) -> Leg:
        """Sum as `ExchangeCodec.reduce`."""
        return sum_over_ranks(bucket.flat, member)
