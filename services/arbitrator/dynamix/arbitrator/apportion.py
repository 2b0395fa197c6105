"""Divides a global batch among ranks in proportion to weights, within bounds, in whole samples."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_BISECTIONS = 80
"""Halvings of the search interval: past the precision of a float64."""


def apportion(
    total: int, weights: npt.NDArray[np.float64], lower: Sequence[int], upper: Sequence[int]
) -> tuple[int, ...]:
    """Sizes near `total * weights / sum(weights)` with `lower <= size <= upper` and the sum `total`.

    Ranks at a bound stay there and the others share the rest in proportion; fractions go to the largest remainders,
    ties to the lowest rank. Where the bounds cannot hold `total`, the nearest sum they can hold is divided.

    Args:
        total: samples per step over all ranks.
        weights: one positive finite number per rank, for example its throughput.
        lower: smallest size per rank.
        upper: largest size per rank, not below `lower`.
    """
    low, high = np.asarray(lower, dtype=np.int64), np.asarray(upper, dtype=np.int64)
    total = int(np.clip(total, low.sum(), high.sum()))
    shares = _bounded_shares(total, weights / weights.sum(), low, high)
    sizes = np.clip(np.floor(shares + 1e-9).astype(np.int64), low, high)
    while missing := total - int(sizes.sum()):
        room = sizes < high if missing > 0 else sizes > low
        order = np.argsort(-(shares - sizes) * np.sign(missing), kind="stable")
        chosen = [rank for rank in order if room[rank]][: abs(missing)]
        sizes[chosen] += np.sign(missing)
    return tuple(int(size) for size in sizes)


def _bounded_shares(
    total: int, fractions: npt.NDArray[np.float64], low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """clip(x * fractions, low, high) for the x at which the sum is `total`; the sum grows with x, so bisect."""
    smallest, largest = 0.0, float(high.max(initial=1)) / float(fractions.min())
    for _ in range(_BISECTIONS):
        middle = (smallest + largest) / 2
        if np.clip(middle * fractions, low, high).sum() < total:
            smallest = middle
        else:
            largest = middle
    shares: npt.NDArray[np.float64] = np.clip(largest * fractions, low, high)
    return shares
