"""Divides samples among ranks in whole numbers, and describes the result."""

from collections.abc import Sequence
from itertools import accumulate


class Counts:
    """Samples per rank of one step, in rank order, with the sums that every step needs."""

    __slots__ = ("num_active", "starts", "total", "values")

    def __init__(self, values: Sequence[int]) -> None:
        self.values = tuple(values)
        self.starts = (0, *accumulate(self.values))
        """Where each rank's slice begins in the step's samples; one more than there are ranks."""
        self.total = self.starts[-1]
        """B: samples of the step over all ranks."""
        self.num_active = sum(value > 0 for value in self.values)
        """Ranks that have at least one sample."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counts) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)

    def __repr__(self) -> str:
        return f"Counts({list(self.values)})"


def largest_remainder(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Divide `total` in proportion to `weights`; equal remainders favour the lower rank.

    In integers throughout, so that all ranks come to the same result. A weight of zero gets nothing, and with
    `total` at most the sum of the weights no rank gets more than its weight.

    Raises:
        ValueError: when the total is negative, a weight is negative, or there is something to divide and no weight.
    """
    whole = sum(weights)
    if total < 0 or min(weights, default=0) < 0 or (whole == 0 and total > 0):
        raise ValueError(f"cannot divide {total} samples by the weights {list(weights)[:16]}")
    if total == 0:
        return (0,) * len(weights)
    shares = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (-(total * weights[rank] % whole), rank))
    for rank in by_remainder[: total - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)
