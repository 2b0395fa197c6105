"""Knowledge of a family's earlier runs, and whether a job's first windows agree with it. Pure.

A profile is on trial until two windows agreed with it, or two did not; that takes three windows at most. A window
agrees when its steps took as long as the profile says for its sizes, and so did the median rank's computing. Where one
rank of many has another speed than before, the fit believes its new times by itself, and what is fixed stays known.
In a window that does not agree, and from the second one on, everything is decided as if there were no profile.
"""

import enum
import math
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from dynamix.schemas.messages import Job

from .step_time import StepTime, StepTimeFit, Window

ENOUGH = 2
"""Windows that settle it, one way or the other."""
TOLERANCE = 1.3
"""Factor between a measured and an expected time within which a window agrees. Where processors are shared the times
of one window are a tenth to a fifth off."""


class Standing(enum.IntEnum):
    """Whether a profile is on trial, accepted or dropped."""

    ABSENT = 0
    ON_TRIAL = 1
    ACCEPTED = 2
    DROPPED = 3


class EarlierRuns(msgspec.Struct, frozen=True, array_like=True):
    """The trial of what earlier runs learned."""

    standing: Standing = Standing.ABSENT
    """Of the times of earlier runs."""
    num_agreeing: int = 0
    num_off: int = 0
    cold: StepTimeFit | None = None
    """The fit to this run's windows only, while the times of earlier runs are on trial."""

    def observe_times(self, job: Job, fit: StepTimeFit, window: Window) -> "SeenTimes":
        """After one more window: a fit that began with that of an earlier run, or one of this run alone."""
        if self.standing is not Standing.ON_TRIAL:
            fit = fit.observe(job, window)
            return SeenTimes(self, fit, fit)
        cold, model = StepTimeFit.of(self.cold, job).observe(job, window), fit.model(job)
        if cold.model(job) is None or model is None:  # nothing was measured: nothing is known of this cluster
            return SeenTimes(replace(self, cold=cold), fit, cold)
        off = disagreement(model, window)
        num_agreeing, num_off = self.num_agreeing + (off is None), self.num_off + (off is not None)
        standing = Standing.ACCEPTED if num_agreeing >= ENOUGH else Standing.ON_TRIAL
        standing = Standing.DROPPED if num_off >= ENOUGH else standing
        runs = replace(self, standing=standing, num_agreeing=num_agreeing, num_off=num_off)
        warm = fit.observe(job, window) if off is None else fit
        deciding = warm if off is None else cold
        is_first = off is None and runs.num_agreeing == 1
        if runs.standing is Standing.ON_TRIAL:
            return SeenTimes(replace(runs, cold=cold), warm, deciding, off or "", is_first)
        return SeenTimes(replace(runs, cold=None), deciding, deciding, off or "", is_first)


class SeenTimes(NamedTuple):
    """The times measured in a window."""

    runs: EarlierRuns
    fit: StepTimeFit
    """To keep."""
    deciding: StepTimeFit
    """To decide by now."""
    disagreement: str = ""
    """Contradiction between the window and the profile, in words; empty if there is none."""
    is_first: bool = False
    """Whether this is the first window that agrees."""


def disagreement(model: StepTime, window: Window) -> str | None:
    """Contradiction between a window and a model, in words; `None` if there is none."""
    known = np.isfinite(window.compute_W) & np.isfinite(window.samples_W)
    if not known.any():
        return None
    expected_W = model.compute_s(np.where(known, window.samples_W, 0.0))[known]
    measured_W = window.compute_W[known]
    computing = float(np.exp(np.median(np.log(measured_W / expected_W))))
    if not 1.0 / TOLERANCE <= computing <= TOLERANCE:
        return f"computing takes {computing:.2g} of its time"
    if math.isnan(window.sync_s) or math.isnan(window.rest_s):
        return None
    barrier_s = measured_W.max(keepdims=True)  # a rank of another speed than before is no disagreement
    expected_s = float(model.step_time_s(barrier_s)[0])
    measured_s = float(barrier_s[0]) + window.sync_s + window.rest_s
    if not 1.0 / TOLERANCE <= measured_s / expected_s <= TOLERANCE:
        return f"a step takes {measured_s:.3g} s, not {expected_s:.3g} s"
    return None
