"""Mean dwell times of a two-state disturbance, from windows in which it was on or off. Pure."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .lines import Flags
from .observations import Array64

MIN_WINDOWS = 3
"""A disturbance is fitted from at least so many disturbed windows."""

LEAST_SHARE = 0.1
"""A smaller share of a window's steps cannot be told from scatter."""


class DwellTimes(NamedTuple):
    """A two-state Markov process in continuous time: its factor while on, and the mean time in each state."""

    factor: float
    mean_off_s: float
    mean_on_s: float


def fit_dwell_times(on: Flags, factors: Array64, duration_s: Array64) -> DwellTimes | None:
    """Fit a disturbance to some series; `None` when too few windows show it.

    The mean dwell time is the time spent in a state divided by the number of times it was left. This is the
    maximum-likelihood estimate when the recording cuts off the last dwell time. A window in which the state changes
    counts by its mean factor. Dwell times shorter than a window are invisible.

    Args:
        on: windows x series: whether the disturbance was on.
        factors: windows x series: what it multiplied times by.
        duration_s: duration of each window, in seconds.
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
    """Select windows between two that are also on: a window of a change also has undisturbed steps."""
    inner = np.zeros_like(on)
    inner[1:-1] = on[:-2] & on[1:-1] & on[2:]
    return inner
