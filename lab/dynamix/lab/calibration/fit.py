"""All that is fitted to a job: compute-time lines, communication, jitter, stragglers and congestion. Pure."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .exposure import Exposure, exposed, fit_exposure
from .lines import ComputeTimeLine, Flags, fit_line
from .observations import Array64, Observations

MIN_WINDOWS = 3
"""A disturbance is fitted from at least so many disturbed windows."""
LEAST_SHARE = 0.1
"""A smaller share of a window's steps cannot be told from scatter."""
MAX_JITTER = 1.0
RETRANSMIT_RATIO = 2.0
"""Congested windows must have more than so many times the retransmissions of other windows, where these are counted."""


class DwellTimes(NamedTuple):
    """A two-state Markov process in continuous time: its factor while on, and the mean time in each state."""

    factor: float
    mean_off_s: float
    mean_on_s: float


class CalibrationFit(NamedTuple):
    """The fitted numbers of one job."""

    lines: tuple[ComputeTimeLine, ...]
    """By rank."""
    jitter: float
    """Sigma of a step's lognormal factor on the compute time, by the scatter of windows of k independent steps."""
    exposure: Exposure | None
    """`None` for a single worker, who reduces nothing."""
    stragglers: DwellTimes | None
    congestion: DwellTimes | None
    retransmits_per_s: float
    """Retransmissions per second and rank while the network is congested."""

    def slow(self, seen: Observations) -> Flags:
        """Return, as windows x ranks, which rank straggled."""
        columns = [line.slow(seen.samples[:, rank], seen.busy_s[:, rank]) for rank, line in enumerate(self.lines)]
        return np.stack(columns, axis=1)

    def congested(self, seen: Observations) -> Flags:
        """Return for each window whether the network was congested."""
        if self.exposure is None:
            return np.zeros(len(seen.step_s), dtype=bool)
        return self.exposure.congested(self.exposed(seen), seen.busy_s.max(axis=1))

    def exposed(self, seen: Observations) -> Array64:
        """Return the communication time that each window's steps waited for, in seconds per step."""
        return exposed(seen.busy_s, seen.sync_s, self.jitter)


def fit_observations(seen: Observations) -> CalibrationFit:
    """Fit lines, jitter, communication and disturbances, in this order; each uses the results before it."""
    lines = tuple(fit_line(seen.samples[:, rank], seen.busy_s[:, rank]) for rank in range(seen.world_size))
    fit = CalibrationFit(lines, _jitter(lines, seen), None, None, None, 0.0)
    slow = fit.slow(seen)
    if seen.world_size > 1:  # by windows without stragglers, or by all when too few are left
        quiet = slow.sum(axis=1) == 0
        chosen = seen.select(np.flatnonzero(quiet)) if quiet.sum() >= len(quiet) // 3 else seen
        fit = fit._replace(exposure=fit_exposure(fit.exposed(chosen), chosen.busy_s.max(axis=1)))
    slowdown = [line.slowdown(seen.samples[:, rank], seen.busy_s[:, rank]) for rank, line in enumerate(lines)]
    fit = fit._replace(stragglers=fit_dwell_times(slow, np.stack(slowdown, axis=1), seen.duration_s))
    return _with_congestion(fit, seen)


def _jitter(lines: Sequence[ComputeTimeLine], seen: Observations) -> float:
    """Return the jitter of a step; the mean of a window of k steps scatters sqrt(k) times less."""
    scatter = float(np.median([line.scatter for line in lines]))
    return min(MAX_JITTER, scatter * math.sqrt(float(np.median(seen.num_steps))))


def _with_congestion(fit: CalibrationFit, seen: Observations) -> CalibrationFit:
    """Add congestion by the exposed communication, unless the retransmissions contradict it."""
    if fit.exposure is None:
        return fit
    congested = fit.congested(seen)
    if congested.sum() < MIN_WINDOWS or congested.all():
        return fit
    rates = seen.retransmits / seen.duration_s[:, None]
    during, calm = _mean_known(rates[congested]), _mean_known(rates[~congested])
    if during is not None and calm is not None and during <= RETRANSMIT_RATIO * calm:
        return fit
    factors = fit.exposure.factor(fit.exposed(seen), seen.busy_s.max(axis=1))
    found = fit_dwell_times(congested[:, None], factors[:, None], seen.duration_s)
    return fit._replace(congestion=found, retransmits_per_s=max(0.0, (during or 0.0) - (calm or 0.0)))


def fit_dwell_times(on: Flags, factors: Array64, duration_s: Array64) -> DwellTimes | None:
    """Fit a disturbance to some series; `None` when too few windows show it.

    The mean dwell time is the time spent in a state divided by the number of times it was left. This is the
    maximum-likelihood estimate when the recording cuts off the last dwell time. A window in which the state changes
    counts by its mean factor. Dwell times shorter than a window are invisible.

    `on` (whether the disturbance was on) and `factors` (what it multiplied times by) are windows x series.
    """
    if on.sum() < MIN_WINDOWS:
        return None
    left, entered = on[:-1] & ~on[1:], ~on[:-1] & on[1:]
    inner = np.zeros_like(on)  # windows between two that are also on: a window of a change has undisturbed steps, too
    inner[1:-1] = on[:-2] & on[1:-1] & on[2:]
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


def _mean_known(values: Array64) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None
