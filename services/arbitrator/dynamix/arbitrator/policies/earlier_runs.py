"""Knowledge of a family's earlier runs, and whether a job's first windows agree with it. Pure.

A profile is on trial until two windows agreed with it, or two did not; that takes three windows at most. A window
agrees when its steps took as long as the profile says for its sizes, and so did the median rank's computing. Where one
rank of many has another speed than before, the fit believes its new times by itself, and what is fixed stays known.
In a window that does not agree, and from the second one on, everything is decided as if there were no profile.

The curve of the noise scale says nothing of the cluster and is judged apart: by the measured noise of these windows.
"""

import enum
import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from dynamix.schemas.messages import Job, JobProfile, NoisePoint

from .policy import Array32, Array64, column
from .step_time import StepTime, StepTimeFit, Window

ENOUGH = 2
"""Windows that settle it, one way or the other."""
TOLERANCE = 1.3
"""Factor between a measured and an expected time within which a window agrees. Where processors are shared the times
of one window are a tenth to a fifth off."""
NOISE_TOLERANCE = 4.0
"""The same of the noise scale, of which the first windows know little."""
AHEAD_WINDOWS = 2
"""A decision is in effect so many windows later: the curve is read there."""

NUM_KNOTS = 40
FIRST_SAMPLES = 1024.0
"""The curve's first point; what is before it counts for it."""
GROWTH = 2.0**0.5
"""Factor between two points; the last one is at 7.6e8 samples."""
MOST_COUNTED = 12.0
"""Most windows of a point that count, so that a later run has the same weight as all earlier ones."""


class NoiseCurve(msgspec.Struct, frozen=True, array_like=True):
    """B_noise by samples seen: its mean logarithm at each point, and how many windows it is the mean of."""

    logs: Array64 = msgspec.field(default_factory=lambda: np.zeros(NUM_KNOTS))
    counts: Array64 = msgspec.field(default_factory=lambda: np.zeros(NUM_KNOTS))

    @classmethod
    def of_points(cls, points: Iterable[NoisePoint]) -> "NoiseCurve":
        """The curve through these points, each as if measured in one window."""
        curve = cls()
        for point in points:
            curve = curve.with_value(point.num_samples, point.noise_scale)
        return curve

    @property
    def points(self) -> tuple[NoisePoint, ...]:
        """The known points, ascending."""
        known = np.flatnonzero(self.counts > 0)
        return tuple(NoisePoint(FIRST_SAMPLES * GROWTH**index, math.exp(self.logs[index])) for index in known.tolist())

    def with_value(self, num_samples: float, noise_scale: float) -> "NoiseCurve":
        """The curve after a window that ended with so many samples seen; as it is where nothing was measured."""
        if not 0.0 < noise_scale < math.inf:
            return self
        index, logs, counts = min(round(_position(num_samples)), NUM_KNOTS - 1), self.logs.copy(), self.counts.copy()
        counts[index] = min(counts[index] + 1.0, MOST_COUNTED)
        logs[index] += (math.log(noise_scale) - logs[index]) / counts[index]
        return NoiseCurve(logs, counts)

    def with_earlier(self, earlier: "NoiseCurve") -> "NoiseCurve":
        """The mean with the curve of earlier runs, which counts as much where both have a point."""
        both = (self.counts > 0) & (earlier.counts > 0)
        logs = np.where(both, (self.logs + earlier.logs) / 2.0, np.where(self.counts > 0, self.logs, earlier.logs))
        return NoiseCurve(logs, np.maximum(self.counts, earlier.counts))

    def at(self, num_samples: float) -> float:
        """B_noise when so many samples are seen, between two points on a straight line of logarithms; NaN if unknown.

        Before the first point and behind the last one it is as there.
        """
        known = np.flatnonzero(self.counts > 0)
        if not known.size:
            return math.nan
        return float(math.exp(np.interp(_position(num_samples), known, self.logs[known])))


def _position(num_samples: float) -> float:
    return math.log(max(num_samples, FIRST_SAMPLES) / FIRST_SAMPLES) / math.log(GROWTH)


class Standing(enum.IntEnum):
    """Whether a part of a profile is on trial, accepted or dropped."""

    ABSENT = 0
    ON_TRIAL = 1
    ACCEPTED = 2
    DROPPED = 3

    @property
    def is_used(self) -> bool:
        """Whether decisions may rest on it."""
        return self in (Standing.ON_TRIAL, Standing.ACCEPTED)


class Trial(msgspec.Struct, frozen=True, array_like=True):
    """One part of a profile on trial."""

    standing: Standing = Standing.ABSENT
    num_agreeing: int = 0
    num_off: int = 0

    def judge(self, *, agrees: bool) -> "Trial":
        """After a window that agreed, or did not; what is settled stays."""
        if self.standing is not Standing.ON_TRIAL:
            return self
        seen = Trial(self.standing, self.num_agreeing + agrees, self.num_off + (not agrees))
        if seen.num_off >= ENOUGH:
            return replace(seen, standing=Standing.DROPPED)
        return replace(seen, standing=Standing.ACCEPTED) if seen.num_agreeing >= ENOUGH else seen


class EarlierRuns(msgspec.Struct, frozen=True, array_like=True):
    """Knowledge of earlier runs, and this run's additions for the next."""

    times: Trial = Trial()
    noise: Trial = Trial()
    num_samples: float = 0.0
    """Seen in this generation."""
    window_samples: float = 0.0
    """Samples of its newest window."""
    earlier: NoiseCurve = msgspec.field(default_factory=NoiseCurve)
    own: NoiseCurve = msgspec.field(default_factory=NoiseCurve)
    cold: StepTimeFit | None = None
    """The fit to this run's windows only, while the times of earlier runs are on trial."""

    @classmethod
    def of_profile(cls, profile: JobProfile, *, has_times: bool, first_start: bool) -> "EarlierRuns":
        """State at the beginning of a run. After a restart the position on the curve is unknown."""
        curve = NoiseCurve.of_points(profile.noise) if first_start else NoiseCurve()
        return cls(
            times=Trial(Standing.ON_TRIAL if has_times else Standing.ABSENT),
            noise=Trial(Standing.ON_TRIAL if curve.points else Standing.ABSENT),
            earlier=curve,
        )

    def observe_times(self, job: Job, fit: StepTimeFit, window: Window) -> "SeenTimes":
        """After one more window: a fit that began with that of an earlier run, or one of this run alone."""
        if self.times.standing is not Standing.ON_TRIAL:
            fit = fit.observe(job, window)
            return SeenTimes(self, fit, fit)
        cold, model = StepTimeFit.of(self.cold, job).observe(job, window), fit.model(job)
        if cold.model(job) is None or model is None:  # nothing was measured: nothing is known of this cluster
            return SeenTimes(replace(self, cold=cold), fit, cold)
        off = disagreement(model, window)
        times = self.times.judge(agrees=off is None)
        warm = fit.observe(job, window) if off is None else fit
        deciding = warm if off is None else cold
        is_first = off is None and times.num_agreeing == 1
        if times.standing is Standing.ON_TRIAL:
            return SeenTimes(replace(self, times=times, cold=cold), warm, deciding, off or "", is_first)
        return SeenTimes(replace(self, times=times, cold=None), deciding, deciding, off or "", is_first)

    def with_unknown_sync(self) -> "EarlierRuns":
        """State if the next window does not pair with this one."""
        return self if self.cold is None else replace(self, cold=replace(self.cold, sync_s=math.nan))

    def observe_noise(self, obs_WF: Array32, noise_scale: float) -> "EarlierRuns":
        """After one more window with this measured noise scale, NaN where there was none."""
        counted = column(obs_WF, "num_samples")
        known = np.isfinite(counted) & (column(obs_WF, "age_windows") == 0)
        window_samples = float(counted[known].mean()) * len(counted) if known.any() else self.window_samples
        num_samples, noise = self.num_samples + window_samples, self.noise
        if 0.0 < noise_scale < math.inf:
            off = abs(math.log(noise_scale / self.earlier.at(num_samples))) if noise.standing.is_used else 0.0
            noise = noise.judge(agrees=off <= math.log(NOISE_TOLERANCE))
        own = self.own.with_value(num_samples, noise_scale)
        return replace(self, noise=noise, num_samples=num_samples, window_samples=window_samples, own=own)

    def noise_scale(self, measured: float) -> float:
        """The noise scale to decide by: measured, or before that from the curve of earlier runs.

        Deciding by a mean of both took 4 % longer on train scenarios.
        """
        if not (math.isnan(measured) and self.noise.standing.is_used):
            return measured
        return self.earlier.at(self.num_samples + AHEAD_WINDOWS * self.window_samples)


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
