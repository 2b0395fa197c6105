"""Spells: how often a two-state disturbance comes and goes, from windows in which it was there or not. Pure."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .lines import Flags
from .observations import Array64

MIN_WINDOWS = 3
"""Disturbed windows, below which there is nothing to be said about a disturbance."""


LEAST_SHARE = 0.1
"""Share of a window's steps, below which scatter looks the same."""


class DwellTimes(NamedTuple):
    """Mean stays of a two-state Markov process in continuous time."""

    factor: float
    mean_off_s: float
    mean_on_s: float


def fit_dwell_times(on: Flags, factors: Array64, duration_s: Array64) -> DwellTimes | None:
    """The disturbance in these series; `None` when it is not to be seen in them.

    A mean stay is the time spent in a state over the times it was left: the maximum-likelihood estimate, in which a
    stay that the recording cut off counts with what was seen of it. The window in which a spell begins or ends counts
    by its mean factor. Stays shorter than a window cannot be seen.

    Args:
        on: windows x series: whether it was there.
        factors: windows x series: what it multiplied by.
        duration_s: per window.
    """
    if on.sum() < MIN_WINDOWS:
        return None
    left, entered = on[:-1] & ~on[1:], ~on[:-1] & on[1:]
    inner = _inner(on)
    factor = float(np.median(factors[inner if inner.any() else on]))
    share = np.clip((factors - 1) / (factor - 1), 0, 1)
    share[share < LEAST_SHARE] = 0.0
    on_s = float((share * duration_s[:, None]).sum())
    off_s = float(((1 - share) * duration_s[:, None]).sum())
    return DwellTimes(
        factor=factor,
        mean_off_s=off_s / max(1, int(entered.sum())),
        mean_on_s=on_s / max(1, int(left.sum())),
    )


def _inner(on: Flags) -> npt.NDArray[np.bool_]:
    """Windows between two that are also on: the first and the last of a spell hold other steps too."""
    inner = np.zeros_like(on)
    inner[1:-1] = on[:-2] & on[1:-1] & on[2:]
    return inner
