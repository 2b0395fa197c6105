"""Geometric means with their errors."""

import math
import statistics
from collections.abc import Sequence

import msgspec


class GeometricMean(msgspec.Struct, frozen=True, kw_only=True):
    """The mean of ratios, and the standard error of the mean of their logarithms."""

    value: float
    error: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.3f} (x/ {math.exp(self.error):.3f}, {self.count})"


def mean_of(ratios: Sequence[float]) -> GeometricMean:
    """Geometric mean."""
    logs = [math.log(ratio) for ratio in ratios]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return GeometricMean(value=math.exp(statistics.fmean(logs)), error=error, count=len(logs))
