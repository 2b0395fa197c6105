"""Statistics over pairs of timings: the same round in two arms."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

NUM_RESAMPLES = 10_000


def ratios(ours: Iterable[float], theirs: Iterable[float]) -> dict[str, Any]:
    """Median and range of the pairs' ratios of two rates."""
    found = [our / their for our, their in zip(ours, theirs, strict=True)]
    return {
        "num_pairs": len(found),
        "ratio": statistics.median(found),
        "ratio_min": min(found),
        "ratio_max": max(found),
    }


def difference(on: Values, off: Values) -> dict[str, Any]:
    """What `on` takes more than `off`, in percent of the mean of `off`; both in seconds, one value per pair."""
    percent = 100 * (on - off) / off.mean()
    return {
        "on_ms": 1000 * float(on.mean()),
        "off_ms": 1000 * float(off.mean()),
        "ratio": float(on.mean() / off.mean()),
        "mean_percent": float(percent.mean()),
        "median_percent": float(np.median(percent)),
        "interval_percent": bootstrap_interval(percent),
    }


def bootstrap_interval(values: Values) -> list[float]:
    """95 % interval of the mean, by resampling pairs with a fixed seed."""
    from scipy.stats import bootstrap  # noqa: PLC0415 - a second, which each spawned process would pay, too

    found = bootstrap((values,), np.mean, n_resamples=NUM_RESAMPLES, method="percentile", random_state=0)
    return [float(found.confidence_interval.low), float(found.confidence_interval.high)]


def median_of(values: Sequence[float | None]) -> float | None:
    """Median of the known values; `None` when no value is known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
