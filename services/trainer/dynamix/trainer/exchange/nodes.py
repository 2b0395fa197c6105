"""The node level: ranks of a node sum among themselves first, and one exchange per node goes over the link.

In a node of L ranks each one sums 1/L of a bucket over its node, exchanges that with its peers, the ranks that have the
same place in the other nodes, and sends the sum to the ranks of its node. Codecs, routes and shares are those of the
exchange between peers. In local rounds the ranks of a node sum every step, and drift apart from other nodes only.

Nodes are those of the launcher (torchrun's GROUP_RANK) and of the host's name, as all ranks gathered them; all must
have equally many ranks. Sums are made in rank order by one rank, so that all ranks have the same bits.
"""

import logging
import time
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Size, Tensor

from dynamix.schemas.messages.allocation import Exchange

from .codec import BucketPart, BucketView, Collective, Leg, Sum, Trade, just, sum_in_rank_order

_log = logging.getLogger("dynamix.trainer")

Scope = Literal["all", "node", "peers"]


class Within(NamedTuple):
    """A collective among all ranks, or those of this rank's node, or its peers."""

    scope: Scope
    collective: Collective


NodeLeg = Generator[Collective | Within, None, None]
"""A leg of which some collectives, or all, are among some ranks."""


class Nodes(NamedTuple):
    """The nodes of a job, seen from one rank."""

    rank: int
    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each node, ascending."""
    inside: tuple[int, ...]
    """Those of this rank's node."""
    peers: tuple[int, ...]
    """Those with this rank's place in every node, ascending."""

    @classmethod
    def among(cls, ranks: Sequence[tuple[int, ...]], rank: int) -> Self | None:
        """The nodes with these ranks; `None` where the node level has no use: one node, or one rank in each."""
        lengths = sorted({len(each) for each in ranks})
        if len(ranks) < 2 or lengths == [1]:
            return None
        if len(lengths) > 1:
            if rank == 0:
                _log.warning(
                    "the ranks of a node do not sum gradients among themselves first, since nodes have %d to %d "
                    "ranks: start equally many on each",
                    *(lengths[0], lengths[-1]),
                )
            return None
        inside = next(each for each in ranks if rank in each)
        return cls(rank, tuple(ranks), inside, tuple(sorted(each[inside.index(rank)] for each in ranks)))

    def groups(self, timeout: timedelta | None) -> dict[Scope, dist.ProcessGroup]:
        """New groups of the node and of the peers; a collective call of all ranks."""
        scopes: dict[Scope, Sequence[tuple[int, ...]]] = {"node": self.ranks, "peers": [*zip(*self.ranks, strict=True)]}
        make: Any = dist.new_subgroups_by_enumeration
        return {scope: make([list(each) for each in lists], timeout, "gloo")[0] for scope, lists in scopes.items()}

    def between(self, exchange: Exchange) -> Exchange:
        """An exchange of all ranks as it is among peers: a node has the shares of its ranks."""
        if not exchange.shares:
            return exchange
        of_node = {rank: sum(exchange.shares[each] for each in ranks) for ranks in self.ranks for rank in ranks}
        return replace(exchange, shares=tuple(of_node[peer] for peer in self.peers))


LEAST_ROWS = 16
"""Rows of a parameter per rank of the node from which on it is cut between rows, as the codec `rows` needs it."""


class Cut(NamedTuple):
    """How a bucket is cut for the ranks of a node: each has a piece of every parameter.

    So a piece, and with it what a codec keeps of it, does not depend on the buckets that DDP makes.
    """

    sizes: list[int]
    """Sizes of all pieces, as they lie in the bucket: those of a parameter behind each other."""
    num_ranks: int
    parts: tuple[BucketPart, ...]
    """This rank's pieces, as they lie behind each other."""

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, whole: tuple[BucketPart, ...], num_ranks: int, place: int) -> Self:
        """The cut of a bucket with these parts; `place` is this rank's in its node."""
        sizes: list[int] = []
        parts: list[BucketPart] = []
        start = 0
        for part in whole:
            length, rows = part.stop - part.start, part.shape[0] if part.shape else 1
            if len(part.shape) < 2 or rows < LEAST_ROWS * num_ranks:
                rows = length
            width = length // max(rows, 1)
            cuts = [round(number * rows / num_ranks) for number in range(num_ranks + 1)]
            sizes += [(stop - first) * width for first, stop in pairwise(cuts)]
            first, stop = cuts[place : place + 2]
            shape = Size([stop - first]) if rows == length else Size([stop - first, *part.shape[1:]])
            end = start + (stop - first) * width
            parts.append(BucketPart(f"{part.key}[{first * width}:{stop * width}]", start, end, shape))
            start = end
        return cls(sizes, num_ranks, tuple(parts))

    @property
    def lengths(self) -> list[int]:
        """Numbers of each rank of the node."""
        return [sum(self.sizes[place :: self.num_ranks]) for place in range(self.num_ranks)]

    def by_rank(self, flat: Tensor) -> Tensor:
        """A copy of a bucket in which the pieces of a rank lie behind each other."""
        pieces = torch.split(flat, self.sizes)
        return torch.cat([piece for place in range(self.num_ranks) for piece in pieces[place :: self.num_ranks]])

    def put_back(self, by_rank: Tensor, flat: Tensor) -> None:
        """Write such a copy into a bucket."""
        sizes = [size for place in range(self.num_ranks) for size in self.sizes[place :: self.num_ranks]]
        pieces, num_parts = torch.split(by_rank, sizes), len(self.parts)
        torch.cat([piece for part in range(num_parts) for piece in pieces[part::num_parts]], out=flat)


def sum_by_node(bucket: BucketView, nodes: Nodes, reduce: Callable[[BucketView], Leg], *, cuts: bool) -> NodeLeg:
    """Sum a bucket over all ranks; `reduce` is the exchange between peers, and `cuts` where it sees parameters."""
    num_ranks, place, sent = len(nodes.inside), nodes.inside.index(nodes.rank), bucket.flat
    lengths, parts = [len(each) for each in torch.tensor_split(sent, num_ranks)], tuple[BucketPart, ...]()
    if cuts:
        cut = Cut.of(bucket.parts, num_ranks, place)
        lengths, sent, parts = cut.lengths, cut.by_rank(sent), cut.parts
    mine = [lengths[place]] * num_ranks
    addends = sent.new_empty(sum(mine))
    yield Within("node", Trade(addends, sent, mine, lengths))
    flat = sum_in_rank_order(list(torch.split(addends, mine)))
    for collective in reduce(BucketView(bucket.number, flat, parts)):
        yield Within("peers", collective)
    yield Within("node", Trade(sent, flat.repeat(num_ranks), lengths, mine))
    if cuts:
        cut.put_back(sent, bucket.flat)


LEAST_NUMBERS = 4096
"""Fewer numbers are summed over all ranks at once, which takes fewer messages."""


def sum_plainly(numbers: Tensor, nodes: Nodes | None, *, inside: bool = False) -> NodeLeg:
    """Sum numbers over all ranks, or those of the node, without a codec."""
    if inside:
        yield Within("node", Sum(numbers))
    elif nodes is None or numbers.numel() < LEAST_NUMBERS or not numbers.is_contiguous():
        yield Sum(numbers)
    else:
        bucket = BucketView(0, numbers.view(-1), ())
        yield from sum_by_node(bucket, nodes, lambda part: just(Sum(part.flat)), cuts=False)


MEASURED = tuple(1 << exponent for exponent in (12, 14, 16, 18, 18))
"""Numbers of measured sums: one larger after the other, until one takes `ENOUGH_S`. The first one connects, too."""
ENOUGH_S = 0.05
WORTHWHILE = 0.95
"""Share of the time without nodes that the sum by nodes must not exceed."""


def measured_s(sums: Sequence[Callable[[int], None]], agree: Callable[[Tensor], None], num_numbers: int) -> list[float]:
    """Seconds of sums of so many numbers or fewer, the same on all ranks; a collective.

    `agree` makes every number the largest of all ranks.
    """
    times_s = torch.zeros(len(sums), dtype=torch.float64)
    for size in MEASURED:
        for place, once in enumerate(sums):
            agree(torch.zeros(1))  # all begin together
            began = time.perf_counter()
            once(min(size, num_numbers))
            times_s[place] = time.perf_counter() - began
        agree(times_s)
        if float(times_s.min()) > ENOUGH_S:
            break
    return times_s.tolist()
