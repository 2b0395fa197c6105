"""Owners: who sums which elements, and the sum of a tensor at its owners.

With shares s a rank owns about s_r / sum(s) of the elements, in one range. All ranks push their addends to the owners,
and pull the sums back: a slow link that owns less carries less, which the ring of an all-reduce cannot do.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .codec import Member
from .collectives import Leg, Sum, Trade

HALF_TYPES = (torch.float16, torch.bfloat16)


class OwnedRange(NamedTuple):
    """The elements that one rank owns."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def owned_ranges(num_elements: int, member: Member, block: int = 1) -> list[OwnedRange]:
    """What each rank owns, by rank: ranges of whole blocks, only the last one may end with a part of one."""
    shares = member.shares or (1.0,) * member.world_size
    if len(shares) != member.world_size or min(shares) < 0 or not sum(shares) > 0:
        raise ValueError(f"shares {shares} for {member.world_size} ranks: one per rank, none negative, not all 0")
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
    addends = tensor.new_empty(sum(mine))
    yield Trade(addends, tensor, mine, lengths)
    total = sum_in_rank_order(list(torch.split(addends, mine)))
    yield Trade(tensor, total.repeat(member.world_size), lengths, mine)


def sum_in_rank_order(addends: list[Tensor]) -> Tensor:
    """The sum, one addend after the other, of half precision in float32; the first one is overwritten."""
    first, *others = addends
    total = first.float() if first.dtype in HALF_TYPES else first
    for addend in others:
        total.add_(addend)
    return total.to(first.dtype)
