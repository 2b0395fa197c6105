"""What the runs of a family try out, one arm per run: a small bandit over what cannot be known within a run. Pure.

Runs are compared by the times at which the held-out error first fell below levels of a fixed row: the mean logarithm of
their ratios over the last `NUM_COMPARED` levels that both reached. At most `MOST_EXPLORING` arms are tried besides that
of the first run. One that was better is gone further, the direction of one that was not is given up (the pruning of
Zeus over batch sizes, arXiv 2208.06102); afterwards the best arm is taken. A run that takes `TOO_SLOW` times as long to
a level as the best arm so far goes back to it: Zeus's early stop.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec.structs import replace as changed

from dynamix.schemas.messages import ArmRecord, ExploredArm, Job

from .observation import Array32, Array64, job_value

NUM_LEVELS = 64
STEP = 2.0**-0.125
"""From one level of the held-out error to the next: by 8.3 %, down to 1/256."""
NUM_COMPARED = 8
MOST_EXPLORING = 2
WORTH = 0.93
"""An arm must take at most so much of the first one's time: equal runs of other seeds are a seventh apart."""
TOO_SLOW = 1.25
FEWEST_WINDOWS = 6
"""Before as many windows no run is stopped: a decision rules two windows later, and shows after some more."""
SMOOTHING = 0.5
"""Weight of the newest held-out accuracy."""
RATE_STEP, NOISE_STEP = 1.5, 0.5

FIRST = ExploredArm()
_HEAD = struct.Struct("<ddI?")
_ARM = struct.Struct("<dd?")
EXPLORATION_BYTES = _HEAD.size + 2 * _ARM.size + 2 * 4 * NUM_LEVELS


@dataclass(frozen=True)
class Exploration:
    """What this run tries out, and how it goes."""

    tried: ExploredArm = FIRST
    """What the run began with."""
    best: ExploredArm = FIRST
    """To go back to."""
    reference_s: Array64 = field(default_factory=lambda: np.zeros(NUM_LEVELS))
    """Milestones of the best arm so far; 0 where unknown."""
    own_s: Array64 = field(default_factory=lambda: np.zeros(NUM_LEVELS))
    time_s: float = 0.0
    """Seconds of training so far."""
    accuracy: float = math.nan
    """On held-out data, smoothed."""
    num_windows: int = 0
    stopped: bool = False
    """Whether the arm that it began with was given up; its milestones end there."""

    @classmethod
    def of_records(cls, records: Sequence[ArmRecord], job: Job) -> "Exploration":
        """At the beginning of a run."""
        best = _best(records)
        known = next((record for record in records if record.arm == best), None)
        reference_s = np.zeros(NUM_LEVELS) if known is None else _levels(known)
        return cls(tried=next_arm(records, job), best=best, reference_s=reference_s)

    @property
    def arm(self) -> ExploredArm:
        """In force."""
        return self.best if self.stopped else self.tried

    @property
    def record(self) -> ArmRecord | None:
        """How the run went; `None` where nothing tells."""
        if not self.own_s.any():
            return None
        return ArmRecord(self.tried, 1, int(self.stopped), tuple(round(time_s, 3) for time_s in self.own_s.tolist()))

    def observe(self, global_F: Array32, window_steps: int) -> "Exploration":
        """After one more window."""
        step_s, accuracy = job_value(global_F, "step_time_s"), job_value(global_F, "held_out_accuracy")
        if self.stopped or not 0.0 < step_s < math.inf:
            return self
        time_s, smoothed, own_s = self.time_s + step_s * window_steps, self.accuracy, self.own_s
        if math.isfinite(accuracy):
            smoothed = accuracy if math.isnan(smoothed) else smoothed + SMOOTHING * (accuracy - smoothed)
            reached = np.arange(NUM_LEVELS) < _levels_reached(smoothed)
            own_s = np.where(reached & (own_s == 0.0), time_s, own_s)
        return replace(
            self,
            time_s=time_s,
            accuracy=smoothed,
            own_s=own_s,
            num_windows=self.num_windows + 1,
            stopped=self._is_too_slow(time_s, own_s),
        )

    def _is_too_slow(self, time_s: float, own_s: Array64) -> bool:
        if self.tried == self.best or self.num_windows < FEWEST_WINDOWS:
            return False
        missing = np.flatnonzero((own_s == 0.0) & (self.reference_s > 0.0))
        return bool(missing.size) and time_s > TOO_SLOW * float(self.reference_s[missing[0]])

    def pack(self) -> bytes:
        """`EXPLORATION_BYTES` bytes."""
        arms = (self.tried, self.best)
        head = _HEAD.pack(self.time_s, self.accuracy, self.num_windows, self.stopped)
        packed = b"".join(_ARM.pack(arm.rate_factor, arm.noise_multiplier, arm.exact) for arm in arms)
        return head + packed + np.concatenate([self.reference_s, self.own_s]).astype("<f4").tobytes()

    @classmethod
    def unpack(cls, packed: bytes) -> "Exploration":
        """What `pack` gave; the beginning of a first run from anything else."""
        if len(packed) != EXPLORATION_BYTES:
            return cls()
        time_s, accuracy, num_windows, stopped = _HEAD.unpack_from(packed)
        arms = packed[_HEAD.size : _HEAD.size + 2 * _ARM.size]
        tried, best = (ExploredArm(*values) for values in _ARM.iter_unpack(arms))
        numbers = np.frombuffer(packed, dtype="<f4", offset=_HEAD.size + 2 * _ARM.size).astype(np.float64)
        times = (numbers[:NUM_LEVELS], numbers[NUM_LEVELS:])
        return cls(tried, best, *times, time_s, accuracy, num_windows, stopped)


def next_arm(records: Sequence[ArmRecord], job: Job) -> ExploredArm:
    """What the next run tries out, or the best arm when enough was tried."""
    first = next((record for record in records if record.arm == FIRST), None)
    if first is None or not any(first.milestones_s):
        return FIRST
    tried = [record for record in records if record.arm != FIRST]
    if len(tried) < MOST_EXPLORING:
        known = {record.arm for record in records}
        for arm in _candidates(tried, first, job):
            if arm not in known:
                return arm
    return _best(records)


def score(record: ArmRecord, first: ArmRecord) -> float:
    """Time with an arm over that with the first one; NaN where they reached nothing in common."""
    ours_s, theirs_s = _levels(record), _levels(first)
    both = np.flatnonzero((ours_s > 0.0) & (theirs_s > 0.0))[-NUM_COMPARED:]
    return float(np.exp(np.log(ours_s[both] / theirs_s[both]).mean())) if both.size else math.nan


def _best(records: Sequence[ArmRecord]) -> ExploredArm:
    """The arm of the least time; the first one where none is clearly better. Those that were stopped do not count."""
    first = next((record for record in records if record.arm == FIRST), None)
    if first is None:
        return FIRST
    found = [(score(record, first), record.arm) for record in records if 2 * record.num_stopped < record.num_runs]
    good = [(value, arm) for value, arm in found if value <= WORTH]
    return min(good, key=lambda pair: pair[0])[1] if good else FIRST


def _candidates(tried: Sequence[ArmRecord], first: ArmRecord, job: Job) -> Iterator[ExploredArm]:
    """Arms in the order in which they are worth a run."""
    further = [record.arm for record in tried if not record.num_stopped and score(record, first) <= WORTH]
    for arm in further:
        if arm.rate_factor > 1.0:
            yield changed(arm, rate_factor=arm.rate_factor * RATE_STEP)
        elif arm.noise_multiplier < 1.0:
            yield changed(arm, noise_multiplier=arm.noise_multiplier * NOISE_STEP)
    base = further[-1] if further else FIRST
    if "learning_rate" in job.explores and base.rate_factor == 1.0:
        yield changed(base, rate_factor=RATE_STEP)
    if "exchange" in job.explores and job.exchange != "exact":
        yield changed(base, exact=True)
    if "noise_multiplier" in job.explores and base.noise_multiplier == 1.0:
        yield changed(base, noise_multiplier=NOISE_STEP)
    if "learning_rate" in job.explores:
        yield changed(base, rate_factor=1.0 / RATE_STEP)
    if "noise_multiplier" in job.explores:
        yield changed(base, noise_multiplier=1.0 / NOISE_STEP)


def _levels(record: ArmRecord) -> Array64:
    levels = np.zeros(NUM_LEVELS)
    known = record.milestones_s[:NUM_LEVELS]
    levels[: len(known)] = known
    return levels


def _levels_reached(accuracy: float) -> int:
    """How many levels an error is below."""
    error = max(1.0 - accuracy, STEP**NUM_LEVELS)
    return min(max(math.floor(math.log(error) / math.log(STEP) + 1e-9), 0), NUM_LEVELS) if error < 1.0 else 0
