"""What a job of a family carries of earlier runs, and whether its first windows agree with them. Pure.

A profile is on trial until two windows agreed with it, or two did not; that takes three windows at most. A window
agrees when its steps took as long as the profile says for its sizes, and so did the median rank's computing. Where one
rank of many has another speed than before, the fit believes its new times by itself, and what is fixed stays known.
In a window that does not agree, and from the second one on, everything is decided as if there were no profile.

The curve of the noise scale says nothing of the cluster and is judged apart: by the measured noise of these windows.
"""

import enum
import math
import struct
from dataclasses import dataclass, field, replace

import numpy as np

from dynamix.schemas.messages import JobProfile

from .noise_curve import CURVE_BYTES, NoiseCurve
from .observation import Array32, column
from .step_time import StepTime
from .step_time_fit import Window

ENOUGH = 2
"""Windows that settle it, one way or the other."""
TOLERANCE = 1.3
"""Factor between a measured and an expected time within which a window agrees. Where processors are shared the times
of one window are a tenth to a fifth off."""
NOISE_TOLERANCE = 4.0
"""The same of the noise scale, of which the first windows know little."""
AHEAD_WINDOWS = 2
"""A decision rules so many windows later: the curve is read there."""

_HEAD = struct.Struct("<dd6B")
RECURRENCE_BYTES = _HEAD.size + 2 * CURVE_BYTES


class Standing(enum.IntEnum):
    """How far a profile is believed."""

    ABSENT = 0
    ON_TRIAL = 1
    ACCEPTED = 2
    DROPPED = 3

    @property
    def is_used(self) -> bool:
        """Whether decisions may rest on it."""
        return self in (Standing.ON_TRIAL, Standing.ACCEPTED)


@dataclass(frozen=True)
class ProfileTrial:
    """One part of a profile on trial."""

    standing: Standing = Standing.ABSENT
    num_agreeing: int = 0
    num_off: int = 0

    def judge(self, *, agrees: bool) -> "ProfileTrial":
        """After a window that agreed, or did not; what is settled stays."""
        if self.standing is not Standing.ON_TRIAL:
            return self
        seen = ProfileTrial(self.standing, self.num_agreeing + agrees, self.num_off + (not agrees))
        if seen.num_off >= ENOUGH:
            return replace(seen, standing=Standing.DROPPED)
        return replace(seen, standing=Standing.ACCEPTED) if seen.num_agreeing >= ENOUGH else seen


@dataclass(frozen=True)
class Recurrence:
    """The memory of earlier runs and of this one."""

    times: ProfileTrial = ProfileTrial()
    noise: ProfileTrial = ProfileTrial()
    num_samples: float = 0.0
    """Seen in this generation."""
    window_samples: float = 0.0
    """In its newest window."""
    earlier: NoiseCurve = field(default_factory=NoiseCurve.empty)
    own: NoiseCurve = field(default_factory=NoiseCurve.empty)

    @classmethod
    def of_profile(cls, profile: JobProfile, *, has_times: bool, first_start: bool) -> "Recurrence":
        """At the beginning of a run. A restart goes on amid a training: the curve's place in it is not known."""
        curve = NoiseCurve.of_points(profile.noise) if first_start else NoiseCurve.empty()
        return cls(
            times=ProfileTrial(Standing.ON_TRIAL if has_times else Standing.ABSENT),
            noise=ProfileTrial(Standing.ON_TRIAL if curve.is_known else Standing.ABSENT),
            earlier=curve,
        )

    def observe(self, obs_WF: Array32, noise_scale: float) -> "Recurrence":
        """After one more window with this measured noise scale, NaN where there was none."""
        counted = column(obs_WF, "num_samples")
        known = np.isfinite(counted) & (column(obs_WF, "age_windows") == 0)
        window_samples = float(counted[known].mean()) * len(counted) if known.any() else self.window_samples
        num_samples = self.num_samples + window_samples
        noise = self.noise
        if 0.0 < noise_scale < math.inf:
            off = abs(math.log(noise_scale / self.earlier.at(num_samples))) if noise.standing.is_used else 0.0
            noise = noise.judge(agrees=off <= math.log(NOISE_TOLERANCE))
        return replace(
            self,
            noise=noise,
            num_samples=num_samples,
            window_samples=window_samples,
            own=self.own.with_value(num_samples, noise_scale),
        )

    def noise_scale(self, measured: float) -> float:
        """What to decide by: what is measured, and before anything was, the curve of earlier runs.

        Deciding by a mean of both took 4 % longer on train scenarios.
        """
        if not (math.isnan(measured) and self.noise.standing.is_used):
            return measured
        return self.earlier.at(self.num_samples + AHEAD_WINDOWS * self.window_samples)

    def pack(self) -> bytes:
        """`RECURRENCE_BYTES` bytes."""
        trials = [number for each in (self.times, self.noise) for number in (*_numbers(each),)]
        return _HEAD.pack(self.num_samples, self.window_samples, *trials) + self.earlier.pack() + self.own.pack()

    @classmethod
    def unpack(cls, packed: bytes) -> "Recurrence":
        """What `pack` gave; as without a profile from anything else."""
        if len(packed) != RECURRENCE_BYTES:
            return cls()
        num_samples, window_samples, *trials = _HEAD.unpack_from(packed)
        times, noise = (ProfileTrial(Standing(one), *counts) for one, *counts in (trials[:3], trials[3:]))
        curves = (packed[_HEAD.size :][:CURVE_BYTES], packed[-CURVE_BYTES:])
        return cls(times, noise, num_samples, window_samples, *map(NoiseCurve.unpack, curves))


def disagreement(model: StepTime, window: Window) -> str | None:
    """How a window contradicts a model, in words; `None` when it agrees, or shows nothing."""
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


def _numbers(trial: ProfileTrial) -> tuple[int, int, int]:
    return int(trial.standing), trial.num_agreeing, trial.num_off
