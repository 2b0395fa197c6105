"""Failure signatures of batch-size control (method section 3), found in decisions and learning curves. Pure.

They say that something looks like a known failure, not why: sizes at a bound may be right. Limits are constants here,
and each finding has the number and the limit that it crossed.
"""

import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

import numpy as np

from dynamix.schemas.messages import Event, Job, Signature

STUCK_WINDOWS = 20
"""A size is stuck when it was at the same bound in this many decisions running."""
STUCK_SHARE = 0.5
"""Share of the ranks that have a choice, from which stuck sizes are a signature."""
MIN_EPISODES = 12
"""Fewer are too few for a learning curve."""
PLATEAU_GAIN = 0.5
"""The last third of the returns must be this many standard deviations above the first third."""
COLLAPSE_EPISODES = 5
COLLAPSE_DROP = 3.0
"""The mean of the last episodes may be this many standard deviations below the best such mean before."""
MIN_RUNS = 3
SPREAD = 0.3
"""Coefficient of variation between runs of one policy."""
MIN_UPDATES = 10
MIN_EXPLAINED_VARIANCE = 0.1
"""Mean over the last `MIN_UPDATES` updates; 1 is a perfect value function, 0 one that knows nothing."""

_MOST = 1e6
"""Reported instead of an infinite number of standard deviations."""


class Finding(NamedTuple):
    """A signature, the number that crossed its limit, and a sentence."""

    signature: Signature
    value: float
    limit: float
    explanation: str

    def event(self, job: str, generation: int, window: int, service: str) -> Event:
        """The message about it. While a policy learns, its name is the job, and the window the episode."""
        return Event(job=job, generation=generation, window=window, service=service, **self._asdict())


class SizeWatch:
    """Watches the decisions of one generation of a job for sizes that stay at a bound."""

    def __init__(self, job: Job) -> None:
        self._low = job.min_local_batch_size
        self._high_W = np.asarray(job.max_local_batch_sizes, dtype=np.int64)
        self._movable_W = self._high_W > self._low
        self._at_low_W = self._at_high_W = np.zeros(job.world_size, dtype=np.int64)
        """Consecutive decisions at the lower bound, and at the upper one."""
        self._reported = False
        self.stuck_share = 0.0
        """Share of the ranks with a choice that are stuck now, at the bound where more are."""

    def observe_sizes(self, local_batch_sizes: Sequence[int]) -> Finding | None:
        """Observe a decision; the finding when enough sizes become stuck, once until they leave the bound."""
        sizes_W = np.asarray(local_batch_sizes)
        self._at_low_W = np.where(sizes_W <= self._low, self._at_low_W + 1, 0)
        self._at_high_W = np.where(sizes_W >= self._high_W, self._at_high_W + 1, 0)
        num_movable = max(int(self._movable_W.sum()), 1)
        stuck = (running_W[self._movable_W] >= STUCK_WINDOWS for running_W in (self._at_low_W, self._at_high_W))
        low, high = (int(each.sum()) / num_movable for each in stuck)
        share = self.stuck_share = max(low, high)
        was_reported, self._reported = self._reported, share > STUCK_SHARE
        if was_reported or not self._reported:
            return None
        bound = f"minimum of {self._low}" if low >= high else f"maximum of {int(self._high_W.max())}"
        text = f"{share:.0%} of the ranks were at their {bound} in each of the last {STUCK_WINDOWS} decisions"
        return Finding("size-stuck", share, STUCK_SHARE, text)


def reward_signatures(returns: Sequence[float]) -> list[Finding]:
    """Plateau and collapse in the returns of a policy's episodes, oldest first; none before `MIN_EPISODES`."""
    if len(returns) < MIN_EPISODES:
        return []
    found, third = [], len(returns) // 3
    first, last = returns[:third], returns[-third:]
    gain = _in_deviations(fmean(last) - fmean(first), math.sqrt((pstdev(first) ** 2 + pstdev(last) ** 2) / 2))
    if gain < PLATEAU_GAIN:
        text = f"over {len(returns)} episodes the return rose by {gain:.2f} standard deviations"
        found.append(Finding("reward-plateau", gain, PLATEAU_GAIN, text))
    spans = [returns[start : start + COLLAPSE_EPISODES] for start in range(len(returns) - COLLAPSE_EPISODES + 1)]
    best, now = max(spans[:-COLLAPSE_EPISODES] or spans[:1], key=fmean), spans[-1]
    deviation = math.sqrt(fmean(pstdev(span) ** 2 for span in (best, now)))
    drop = _in_deviations(fmean(best) - fmean(now), deviation)
    if drop > COLLAPSE_DROP:
        text = f"the last {COLLAPSE_EPISODES} returns are {drop:.1f} standard deviations below the best before them"
        found.append(Finding("reward-collapse", drop, COLLAPSE_DROP, text))
    return found


def spread_signature(times: Sequence[float]) -> Finding | None:
    """Spread of one number, times to target or returns, between runs of one policy on one scenario."""
    if len(times) < MIN_RUNS:
        return None
    variation = variation_between(times)
    text = f"the coefficient of variation between {len(times)} runs is {variation:.2f}"
    return Finding("spread-between-runs", variation, SPREAD, text) if variation > SPREAD else None


def variation_between(times: Sequence[float]) -> float:
    """Coefficient of variation; finite, and 0 where all are equal."""
    return _in_deviations(pstdev(times), abs(fmean(times)))


def value_signature(explained_variances: Sequence[float]) -> Finding | None:
    """A critic that explains hardly any of the returns' variance over many updates; oldest first."""
    if len(explained_variances) < MIN_UPDATES:
        return None
    explained = fmean(explained_variances[-MIN_UPDATES:])
    limit = MIN_EXPLAINED_VARIANCE
    text = f"the value function explained {explained:.0%} of the returns' variance over {MIN_UPDATES} updates"
    return Finding("value-unexplained", explained, limit, text) if explained < limit else None


def _in_deviations(difference: float, deviation: float) -> float:
    """The quotient, finite also where there is no deviation at all."""
    if deviation > 0:
        return min(max(difference / deviation, -_MOST), _MOST)
    return math.copysign(_MOST, difference) if difference else 0.0
