"""Exploration over the runs of a family: a small bandit over factors on the learning rate, one arm per run. Pure.

Runs are compared by the times at which the held-out error first fell below levels of a fixed row: the mean logarithm of
their ratios over the last `NUM_COMPARED` levels that both reached; an arm that ended more than `MAX_SHORT` levels short
of the first one is no better, however fast it was. At most `MOST_EXPLORING` arms are tried besides that of the first
run. One that was better is gone further, the direction of one that was not is given up (the pruning of Zeus over batch
sizes, arXiv 2208.06102); afterwards the best arm is taken. A run that takes `TOO_SLOW` times as long to a level as the
best arm so far goes back to it: Zeus's early stop.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from dynamix.schemas.messages import ArmRecord

from .policy import Array32, Array64, job_value

NUM_LEVELS = 64
STEP = 2.0**-0.125
"""Factor between two levels of the held-out error: 8.3 %, down to 1/256."""
NUM_COMPARED = 8
MOST_EXPLORING = 2
WORTH = 0.93
"""An arm is better at this share of the first one's time or less: equal runs differ by a seventh between seeds."""
TOO_SLOW = 1.25
MAX_SHORT = 4
FEWEST_WINDOWS = 6
"""Windows before which no run is stopped: a decision takes effect two windows later, and shows after some more."""
SMOOTHING = 0.5
"""Weight of the newest held-out accuracy."""
RATE_STEP = 1.5
FIRST = 1.0
"""The arm of the first run: the script's own learning rate."""


class Exploration(msgspec.Struct, frozen=True, array_like=True):
    """The arm that this run tries out, and its progress."""

    tried: float = FIRST
    """The trial with which the run began."""
    best: float = FIRST
    """To go back to."""
    reference: Array64 = msgspec.field(default_factory=lambda: np.zeros(NUM_LEVELS))
    """Milestones of the best arm so far; 0 where unknown."""
    own: Array64 = msgspec.field(default_factory=lambda: np.zeros(NUM_LEVELS))
    time_s: float = 0.0
    """Of training so far."""
    accuracy: float = math.nan
    """On held-out data, smoothed."""
    num_windows: int = 0
    stopped: bool = False
    """Whether the arm that it began with was given up; its milestones end there."""

    @classmethod
    def of_records(cls, records: Sequence[ArmRecord], *, is_restart: bool) -> "Exploration":
        """State at the beginning of a run. A restarted run tries nothing: its time would count for no arm."""
        best = _best(records)
        known = _record_of(best, records)
        reference = np.zeros(NUM_LEVELS) if known is None else _levels(known)
        return cls(tried=best if is_restart else next_arm(records), best=best, reference=reference)

    def without_records(self) -> "Exploration":
        """On another cluster than that of the records: nothing is tried, and what the run takes is compared with none.

        Its first windows had the arm that it began with; the record is that of a first run all the same.
        """
        return replace(self, tried=FIRST, best=FIRST, reference=np.zeros(NUM_LEVELS), stopped=False)

    @property
    def rate_factor(self) -> float:
        """The factor on the learning rate that is in effect."""
        return self.best if self.stopped else self.tried

    @property
    def label(self) -> str:
        """Description of the factor for people."""
        return f"learning rate x {self.rate_factor:.3g}"

    @property
    def record(self) -> ArmRecord | None:
        """Result of the run; `None` if it is unknown."""
        if not self.own.any():
            return None
        milestones = tuple(round(time_s, 3) for time_s in self.own.tolist())
        return ArmRecord(self.tried, 1, int(self.stopped), milestones)

    def observe(self, global_F: Array32, num_steps: int) -> "Exploration":
        """After one more window."""
        step_s, accuracy = job_value(global_F, "step_time_s"), job_value(global_F, "held_out_accuracy")
        if self.stopped or not 0.0 < step_s < math.inf:
            return self
        time_s, smoothed, own = self.time_s + step_s * num_steps, self.accuracy, self.own
        if math.isfinite(accuracy):
            smoothed = accuracy if math.isnan(smoothed) else smoothed + SMOOTHING * (accuracy - smoothed)
            error = max(1.0 - smoothed, STEP**NUM_LEVELS)
            num_levels = math.floor(math.log(error) / math.log(STEP) + 1e-9) if error < 1.0 else 0
            reached = np.arange(NUM_LEVELS) < num_levels
            own = np.where(reached & (own == 0.0), time_s, own)
        missing = np.flatnonzero((own == 0.0) & (self.reference > 0.0))
        may_stop = self.tried != self.best and self.num_windows >= FEWEST_WINDOWS and missing.size > 0
        stopped = may_stop and time_s > TOO_SLOW * float(self.reference[missing[0]])
        known = replace(self, time_s=time_s, accuracy=smoothed, own=own, stopped=stopped)
        return replace(known, num_windows=self.num_windows + 1)


def next_arm(records: Sequence[ArmRecord]) -> float:
    """The arm of the next run, or the best arm when enough was tried."""
    first = _record_of(FIRST, records)
    if first is None or not any(first.milestones):
        return FIRST
    tried = [record for record in records if record.rate_factor != FIRST]
    if not tried:
        return RATE_STEP
    if len(tried) >= MOST_EXPLORING:
        return _best(records)
    newest = tried[-1]
    was_better = not newest.num_stopped and score(newest, first) <= WORTH
    return newest.rate_factor * RATE_STEP if was_better else 1.0 / RATE_STEP


def score(record: ArmRecord, first: ArmRecord) -> float:
    """The time of an arm over that of the first; NaN where they have nothing in common, or the arm ended early."""
    ours, theirs = _levels(record), _levels(first)
    if _last(theirs) - _last(ours) > MAX_SHORT:
        return math.nan
    both = np.flatnonzero((ours > 0.0) & (theirs > 0.0))[-NUM_COMPARED:]
    return float(np.exp(np.log(ours[both] / theirs[both]).mean())) if both.size else math.nan


def _record_of(arm: float, records: Sequence[ArmRecord]) -> ArmRecord | None:
    return next((record for record in records if record.rate_factor == arm), None)


def _last(levels: Array64) -> int:
    """The last level that was reached."""
    return int(np.flatnonzero(levels).max(initial=-1))


def _best(records: Sequence[ArmRecord]) -> float:
    """The arm that took least; the first one where none is clearly better. Those that were stopped do not count."""
    first = _record_of(FIRST, records)
    if first is None:
        return FIRST
    kept = [record for record in records if 2 * record.num_stopped < record.num_runs]
    good = [(value, record.rate_factor) for record in kept if (value := score(record, first)) <= WORTH]
    return min(good, default=(WORTH, FIRST))[1]


def _levels(record: ArmRecord) -> Array64:
    levels = np.zeros(NUM_LEVELS)
    known = record.milestones[:NUM_LEVELS]
    levels[: len(known)] = known
    return levels
