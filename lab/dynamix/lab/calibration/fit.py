"""All that is fitted to a job: compute-time lines and changes, communication, jitter, stragglers, congestion. Pure."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .changes import Shifts, find_shifts, fit_lines, refit_shifts, usual_busy_s
from .exposure import Exposure, exposed, fit_exposure
from .lines import ComputeTimeLine, Flags
from .observations import Array64, Observations

MIN_WINDOWS = 3
"""A disturbance is fitted from at least so many disturbed windows."""
LEAST_SHARE = 0.1
"""A smaller share of a window's steps cannot be told from scatter."""
MAX_JITTER = 1.0
RETRANSMIT_RATIO = 2.0
"""Congested windows must have more than so many times the retransmissions of other windows, where these are counted."""
MIN_CALM_WINDOWS = 6
"""Communication is fitted to the windows before any change of speed when there are so many."""
CLEARLY_LONGER = 0.25
"""Exchanges take longer after a change when the time that they add, over C, is above this."""


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
    shifts: Shifts
    """By rank, the lasting change of its speed; the lines are those before it."""

    def slow(self, seen: Observations) -> Flags:
        """Return, as windows x ranks, which rank straggled; never with next to nothing to do, or while it changed."""
        busy_s = usual_busy_s(seen, self.shifts)
        columns = [line.slow(seen.samples[:, rank], busy_s[:, rank]) for rank, line in enumerate(self.lines)]
        return np.stack(columns, axis=1) & self._is_heavy(seen)

    def slowdown(self, seen: Observations) -> Array64:
        """Return, as windows x ranks, times over the lines, without changes; 1 where a rank cannot straggle."""
        busy_s = usual_busy_s(seen, self.shifts)
        columns = [line.slowdown(seen.samples[:, rank], busy_s[:, rank]) for rank, line in enumerate(self.lines)]
        return np.where(self._is_heavy(seen), np.nan_to_num(np.stack(columns, axis=1), nan=1.0), 1.0)

    def _is_heavy(self, seen: Observations) -> Flags:
        return np.stack([line.is_heavy(seen.samples[:, rank]) for rank, line in enumerate(self.lines)], axis=1)

    def factors(self, seen: Observations) -> Array64:
        """Return, as windows x ranks, what lasting changes multiply compute times by."""
        ones = np.ones(len(seen.step_s))
        return np.stack([ones if shift is None else shift.factors(seen) for shift in self.shifts], axis=1)

    def added_exchange_s(self, seen: Observations) -> Array64:
        """Return by how much longer the exchanges of each window took, as ranks had changed."""
        added_s = np.zeros(len(seen.step_s))
        for shift in self.shifts:
            if shift is not None:
                added_s = np.maximum(added_s, shift.exchange_s * shift.share(seen))
        return added_s

    def congested(self, seen: Observations) -> Flags:
        """Return for each window whether the network was congested."""
        if self.exposure is None:
            return np.zeros(len(seen.step_s), dtype=bool)
        return self.exposure.congested(self.exposed(seen), seen.busy_s.max(axis=1))

    def exposed(self, seen: Observations) -> Array64:
        """Return the communication time that each window's steps waited for, in seconds per step, without changes."""
        exposed_s = exposed(seen.busy_s, seen.sync_s, self.jitter)
        return np.maximum(0.0, exposed_s - self.added_exchange_s(seen)) if any(self.shifts) else exposed_s


def fit_observations(seen: Observations, shifts: Shifts | None = None) -> CalibrationFit:
    """Fit lines, jitter, communication and disturbances, in this order; each uses the results before it.

    `shifts` are changes of speed that other windows of the same job have shown: their times are taken as they are.
    """
    shifts = find_shifts(seen) if shifts is None else refit_shifts(seen, shifts)
    lines = fit_lines(seen, shifts)
    fit = CalibrationFit(lines, _jitter(lines, seen), None, None, None, 0.0, shifts)
    slow = fit.slow(seen)
    if seen.world_size > 1:  # by windows without stragglers, or by all when too few are left
        quiet = slow.sum(axis=1) == 0
        chosen = seen.select(np.flatnonzero(quiet)) if quiet.sum() >= len(quiet) // 3 else seen
        fit = _with_exposure(fit, chosen)
    fit = fit._replace(stragglers=fit_dwell_times(slow, fit.slowdown(seen), seen.duration_s))
    return _with_congestion(fit, seen)


def _with_exposure(fit: CalibrationFit, chosen: Observations) -> CalibrationFit:
    """Add communication, by the windows before any change where these are enough, and what each change added to it."""
    slowest_s, exposed_s = chosen.busy_s.max(axis=1), fit.exposed(chosen)
    fit = fit._replace(exposure=fit_exposure(exposed_s, slowest_s))
    before = (fit.factors(chosen) == 1).all(axis=1)
    for _ in range(2):  # with all windows; and, if changes have made exchanges longer, with those before
        assert fit.exposure is not None
        more_s = exposed_s - fit.exposure.expected_s(slowest_s)
        shifts = _with_exchange_s(fit, chosen, more_s - np.median(more_s[before]) if before.any() else more_s)
        if before.sum() < MIN_CALM_WINDOWS or not any(shift.exchange_s for shift in shifts if shift is not None):
            break
        fit = fit._replace(exposure=fit_exposure(exposed_s[before], slowest_s[before]), shifts=shifts)
    return fit


def _with_exchange_s(fit: CalibrationFit, chosen: Observations, more_s: Array64) -> Shifts:
    """Return the changes with what each has added to exchanges, by the windows up to the next one."""
    assert fit.exposure is not None
    shifts = list(fit.shifts)
    times_s = sorted(shift.at_s for shift in fit.shifts if shift is not None)
    for rank, shift in enumerate(fit.shifts):
        if shift is not None:
            until_s = next((time_s for time_s in times_s if time_s > shift.at_s), np.inf)
            during = (chosen.begin_s >= shift.at_s) & (chosen.begin_s + chosen.duration_s <= until_s)
            added_s = float(np.median(more_s[during])) if during.sum() >= MIN_WINDOWS else 0.0
            is_clear = added_s > CLEARLY_LONGER * fit.exposure.communication_s
            shifts[rank] = shift._replace(exchange_s=added_s if is_clear else 0.0)
    return tuple(shifts)


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
    counts by its mean factor: it is beside one that is on. Elsewhere a factor is scatter, which in many windows would
    add up to much. Dwell times shorter than a window are invisible.

    `on` (whether the disturbance was on) and `factors` (what it multiplied times by) are windows x series.
    """
    if on.sum() < MIN_WINDOWS:
        return None
    left, entered = on[:-1] & ~on[1:], ~on[:-1] & on[1:]
    inner = np.zeros_like(on)  # windows between two that are also on: a window of a change has undisturbed steps, too
    inner[1:-1] = on[:-2] & on[1:-1] & on[2:]
    factor = float(np.median(factors[inner if inner.any() else on]))
    share = np.clip((factors - 1) / (factor - 1), 0, 1)
    beside = on.copy()
    beside[:-1] |= on[1:]
    beside[1:] |= on[:-1]
    share[(share < LEAST_SHARE) | ~beside] = 0.0
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
