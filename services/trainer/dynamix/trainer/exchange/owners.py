"""Owners: who sums which elements, and the sum of a tensor at its owners.

With shares s a rank owns about s_r / sum(s) of the elements, in one range. All ranks push their addends to the owners,
and pull the sums back: a slow link that owns less carries less, which the ring of an all-reduce cannot do. Gradient
servers are owners behind the ranks.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .codec import BucketView, Member
from .collectives import Leg, ServedSum, Sum, Trade

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


class PlainExchange:
    """The codec `none`: gradients as they are, by the all-reduce or to owners."""

    name = "none"
    is_lossless = True

    def reduce(self, bucket: BucketView, member: Member) -> Leg:
        """Sum as `ExchangeCodec.reduce`."""
        return sum_over_ranks(bucket.flat, member)


def balanced_shares(rank_rates: Sequence[float], server_rates: Sequence[float] = ()) -> tuple[float, ...]:
    """Shares by rank, then by server, with which all links are busy equally long, as far as that can be.

    Every rank sends M bytes in any case, however little it owns, so a sum takes at least T = M / min B. A rank that
    owns the share s sends M (1 + s (N - 2)), a server M N s. The smallest T in which all of M is owned:

        sum_i max(0, (T B_i / M - 1) / (N - 2)) + sum_j T B_j / (N M) >= 1

    Args:
        rank_rates: B_i, of each rank's link, in any unit.
        server_rates: B_j, of each server's link, in the same unit.

    Raises:
        ValueError: for a rate that is not above 0, or fewer than 2 ranks.
    """
    num_ranks = len(rank_rates)
    if num_ranks < 2 or not all(rate > 0 for rate in (*rank_rates, *server_rates)):
        raise ValueError(f"rates {[*rank_rates, *server_rates]} of {num_ranks} ranks and the servers: each above 0")
    others = max(num_ranks - 2, 1e-9)  # with two ranks a rank sends no more for what it owns

    def owned(time: float) -> list[float]:
        ranks = [max(0.0, time * rate - 1) / others for rate in rank_rates]
        return [*ranks, *(time * rate / num_ranks for rate in server_rates)]

    low = 1 / min(rank_rates)
    high = 2 * num_ranks * low
    if sum(owned(low)) < 1:
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if sum(owned(middle)) >= 1 else (middle, high)
    else:
        high = low
    shares = owned(high)
    return tuple(share / sum(shares) for share in shares)
