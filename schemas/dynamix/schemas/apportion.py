"""Divides a global batch among ranks in proportion to weights, within bounds, in whole samples.

Arbitrator, training processes and virtual cluster share it. Every rank of a job calls it for itself and all must come
to the same sizes, so comparisons of whole numbers alone define the result, never the order of a sum of floats.

Definition: every rank begins at its lower bound; each further sample goes to the rank whose `size / weight` it leaves
smallest, equal ones to the lowest rank. That makes the largest `size / weight`, the compute time of the slowest rank,
as small as whole samples allow (the divisor method of D'Hondt and Jefferson; shares rounded to the nearest would not).
It is computed from the other end: all samples up to a level near the final one, then the few that are missing or over.

`divide_by_time` does the same for ranks that take `(fixed + max(size, saturation)) / rate`. `balanced_shares` divides
the summing of a gradient by the rates of links.
"""

import math
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

WEIGHT_BITS = 30
"""Precision of a weight, relative to the largest. With it the float64 nearest to `size / weight` orders all of them as
the fractions themselves are ordered, for sizes below 2^21: two that differ do so by more than 1 part in 2^52."""

PARTS = 16
"""Fixed costs count in sixteenths of a sample; with them the order is that of the fractions below 2^17 samples."""

MOST_FIXED = 1 << 20
"""Samples that a fixed cost counts as at most: from there on sizes change nothing that could be measured."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Number = TypeVar("Number", int, float)


def apportion(
    total: int,
    weights: Sequence[float] | Floats,
    lower: Sequence[int] | Integers,
    upper: Sequence[int] | Integers,
) -> tuple[int, ...]:
    """Sizes with `lower <= size <= upper` and the sum `total`, in proportion to `weights` where the bounds allow it.

    Where the bounds cannot hold `total`, the nearest sum they can hold is divided. 15 to 25 us for 8 ranks, 14 ms for
    10,000.

    Args:
        total: samples per step over all ranks.
        weights: one number per rank, for example its throughput; not negative. Only ratios count: each is rounded down
            to a whole number of units, of which the largest has 2^29 to 2^30, and is at least 1. So equal weights share
            alike, and a weight of 0 gets its lower bound until all the others are full.
        lower: smallest size per rank.
        upper: largest size per rank, not below `lower`.

    Raises:
        ValueError: when a weight is negative or not finite, a lower bound is above its upper one, or lengths differ.
    """
    if not len(weights) == len(lower) == len(upper):
        raise ValueError(f"{len(weights)} weights for {len(lower)} lower and {len(upper)} upper bounds")
    return _divided(int(total), weights, lower, upper, unit=1, heads=[0] * len(weights))


def divide_by_time(
    total: int,
    rates: Sequence[float] | Floats,
    lower: Sequence[int] | Integers,
    upper: Sequence[int] | Integers,
    *,
    fixed: Sequence[float] | Floats,
    saturations: Sequence[int] | Integers,
) -> tuple[int, ...]:
    """Sizes with the sum `total` and the least possible maximum of `(fixed + max(size, saturation)) / rate`.

    Below its saturation a rank takes as long with fewer samples, so it gets so many before any rank gets more; where
    there are too few for that, they are divided as if there were no saturation. Bounds are kept as in `apportion`.

    Args:
        total: samples per step over all ranks.
        rates: samples per second of each rank, or numbers in proportion to them.
        lower: smallest size per rank.
        upper: largest size per rank, not below `lower`.
        fixed: what each rank does once per step, in samples that take as long; not negative, rounded to `PARTS`.
        saturations: samples up to which a step of each rank costs the same; 0: none.

    Raises:
        ValueError: as `apportion`, and when a fixed cost is negative or not finite.
    """
    if not len(rates) == len(fixed) == len(saturations) == len(lower) == len(upper):
        raise ValueError(f"{len(rates)} rates for {len(fixed)} fixed costs and {len(saturations)} saturations")
    low, high, least = lower, upper, _listed(saturations)
    if any(least):
        low, high = _listed(lower), _listed(upper)
        free = [max(few, min(each, most)) for each, few, most in zip(least, low, high, strict=True)]
        if total > sum(free):
            low = free
        else:
            high = [min(most, each) for most, each in zip(high, free, strict=True)]
    heads = _listed(fixed)
    if not any(heads):
        return apportion(total, rates, low, high)
    if not all(0.0 <= head < math.inf for head in heads):
        raise ValueError(f"fixed costs must be finite and not negative: {heads[:16]}")
    parts = [int(PARTS * min(head, MOST_FIXED) + 0.5) for head in heads]
    return _divided(int(total), rates, low, high, unit=PARTS, heads=parts)


def _divided(
    total: int,
    weights: Sequence[float] | Floats,
    lower: Sequence[int] | Integers,
    upper: Sequence[int] | Integers,
    *,
    unit: int,
    heads: list[int],
) -> tuple[int, ...]:
    """Apportion if every rank starts with `heads`; a sample is `unit` of these."""
    numbers, lowest, highest = _listed(weights), _listed(lower), _listed(upper)
    for rank, (low, high) in enumerate(zip(lowest, highest, strict=True)):
        if low > high:
            raise ValueError(f"the bounds [{low}, {high}] of rank {rank} hold no size")
    smallest, largest = min(numbers, default=0.0), max(numbers, default=0.0)
    if smallest < 0 or not all(map(math.isfinite, numbers)):
        raise ValueError(f"weights must be finite and not negative: they range from {smallest:g} to {largest:g}")
    total = min(max(total, sum(lowest)), sum(highest))
    shift = WEIGHT_BITS - math.frexp(largest)[1]  # scaling by a power of two is exact
    whole = [int(math.ldexp(weight, shift)) or 1 for weight in numbers]
    ranks = list(zip(whole, lowest, highest, heads, strict=True))
    free = [(weight, unit * low + head, unit * high + head) for weight, low, high, head in ranks]
    # A fraction near the largest `size / weight` of the result; only speed depends on how near. Shares that need not be
    # whole have one: while some are out of bounds, those on the side that is further out stay at their bounds and the
    # others share what is left. Each round settles at least one rank; two or three rounds do.
    left = unit * total + sum(heads)
    while True:
        share = sum([weight for weight, _, _ in free])
        under = [rank for rank in free if left * rank[0] < rank[1] * share]
        over = [rank for rank in free if left * rank[0] > rank[2] * share]
        if not (under or over):
            break
        lack = sum([low * share - left * weight for weight, low, _ in under])
        spare = sum([left * weight - high * share for weight, _, high in over])
        if lack >= spare:
            free = [rank for rank in free if left * rank[0] >= rank[1] * share]
            left -= sum([low for _, low, _ in under])
        else:
            free = [rank for rank in free if left * rank[0] <= rank[2] * share]
            left -= sum([high for _, _, high in over])
    # half a sample per free rank for what rounding down takes off
    above, below = 2 * left + unit * len(free), 2 * max(share, 1)
    sizes = [min(max((above * weight // below - head) // unit, low), high) for weight, low, high, head in ranks]
    if missing := total - sum(sizes):
        _move(missing, sizes, whole, lowest if missing < 0 else highest, unit=unit, heads=heads)
    return tuple(sizes)


def _move(
    count: int,
    sizes: list[int],
    whole: list[int],
    bounds: list[int],
    *,
    unit: int,
    heads: list[int],
) -> None:
    """Add samples, each to the rank that it leaves lowest; or, with a negative count, take the last ones away."""
    step = 1 if count > 0 else -1

    def place_of(rank: int) -> tuple[float, int]:
        full = step * sizes[rank] >= step * bounds[rank]
        place = step * (unit * (sizes[rank] + (step > 0)) + heads[rank]) / whole[rank]
        return math.inf if full else place, step * rank

    heap = [at for rank in range(len(sizes)) if (at := place_of(rank))[0] < math.inf]
    heapify(heap)
    for _ in range(abs(count)):
        rank = step * heap[0][1]
        sizes[rank] += step
        heapreplace(heap, place_of(rank))


def _listed(values: Sequence[Number] | npt.NDArray[Any]) -> list[Number]:
    """Convert to plain numbers: those of an array are slow one by one."""
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


# --- shares of a gradient that each rank or server sums up
#
# Every rank sends M bytes in any case, however little it owns, so a sum takes at least T = M / min B. A rank that owns
# the share s sends, and receives, M (1 + s (N - 2)), a server M N s, both directions at once. A ring has every rank
# send 2 (N - 1) / N M over its link, at the pace of the slowest.

_HALVINGS = 60


def balanced_shares(rank_rates: Sequence[float], server_rates: Sequence[float] = ()) -> tuple[float, ...]:
    """Shares by rank, then by server, with which all links are busy equally long, as far as that can be.

    They are those of the smallest T in which all of M is owned:

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
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if sum(owned(middle)) >= 1 else (middle, high)
    else:
        high = low
    shares = owned(high)
    return tuple(share / sum(shares) for share in shares)


def shared_time(rates: Sequence[float], shares: Sequence[float]) -> float:
    """Time to sum M bytes at owners, in units of M over that of the rates; without servers."""
    total, others = sum(shares), len(rates) - 2
    return max((1 + share / total * others) / rate for rate, share in zip(rates, shares, strict=True))


def ring_time(rates: Sequence[float]) -> float:
    """The same of an all-reduce around a ring."""
    return 2 * (len(rates) - 1) / len(rates) / min(rates)
