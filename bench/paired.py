"""Paired measurements: what one arm adds to the other, with a bootstrap interval over the pairs."""

from typing import Any

import numpy as np
import numpy.typing as npt


def bootstrap_interval(values: npt.NDArray[np.float64], num: int = 10_000) -> list[float]:
    """95 % interval of the mean, by resampling pairs."""
    generator = np.random.default_rng(0)
    means = [float(values[generator.integers(0, len(values), len(values))].mean()) for _ in range(num)]
    return [float(bound) for bound in np.percentile(means, [2.5, 97.5])]


def compare(on: npt.NDArray[np.float64], off: npt.NDArray[np.float64]) -> dict[str, Any]:
    """What the session adds, in percent of what a step takes without it."""
    percent = 100 * (on - off) / off.mean()
    return {
        "on_ms": 1000 * float(on.mean()),
        "off_ms": 1000 * float(off.mean()),
        "ratio": float(on.mean() / off.mean()),
        "mean_percent": float(percent.mean()),
        "median_percent": float(np.median(percent)),
        "interval_percent": bootstrap_interval(percent),
    }
