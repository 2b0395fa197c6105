"""Disturbances: which worker is slow and which link congested at a moment of virtual time, and who changed its speed.

A pure function of seed, worker and time (jitter: of the step): whatever a policy does, and however long its steps are,
with one seed it meets what every other policy meets. That is what makes runs comparable in pairs.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .scenario import Scenario, SpeedChange

Array64 = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

SLOW, CONGESTED, JITTER, LABELS = range(4)
"""Kinds of random numbers: each has generators of its own."""

JITTER_BLOCK = 256
"""Steps drawn at once: a generator costs some 20 us to make."""


class Conditions(NamedTuple):
    """What each worker meets in one step; float64, one per worker."""

    slowdown: Array64
    """Factor on its compute time: straggling, jitter and a lasting change of its speed."""
    congestion: Array64
    """Factor that its link's bandwidth is divided by, and its latency multiplied."""
    congested: Flags
    exchange_s: float = 0.0
    """By how much longer an exchange of gradients takes, as a worker's processor has become slower."""


class Disturbances:
    """The disturbances of a scenario under one seed. Time must not run backwards between two calls."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        count = scenario.world_size
        stragglers, congestion = scenario.stragglers, scenario.congestion
        self._ones = np.ones(count)
        self._clear = np.zeros(count, dtype=bool)
        self._slow_factor = self._congestion_factor = 1.0
        self._slow = self._congested = self._jitter = None
        if stragglers is not None and stragglers.jitter > 0:
            self._jitter = Jitter(seed, count, stragglers.jitter)
        if stragglers is not None and stragglers.factor > 1:
            self._slow_factor = stragglers.factor
            self._slow = Switching(seed, SLOW, count, off_s=stragglers.mean_normal_s, on_s=stragglers.mean_slow_s)
        if congestion is not None:
            self._congestion_factor = congestion.factor
            links = 1 if congestion.shared else count
            off_s, on_s = congestion.mean_clear_s, congestion.mean_congested_s
            self._congested = Switching(seed, CONGESTED, links, off_s=off_s, on_s=on_s)
        self._speeds = SpeedChanges(count, scenario.speed_changes)

    def at(self, step: int, time_s: float) -> Conditions:
        """What rules a step that begins at `time_s`; it does not change until its end."""
        slowdown = self._ones if self._jitter is None else self._jitter.of_step(step)
        if self._slow is not None:
            slowdown = np.where(self._slow.at(time_s), self._slow_factor * slowdown, slowdown)
        if (factors := self._speeds.at(time_s)) is not None:
            slowdown = factors * slowdown
        exchange_s = self._speeds.exchange_s
        if self._congested is None:
            return Conditions(slowdown, self._ones, self._clear, exchange_s)
        congested = np.logical_or(self._clear, self._congested.at(time_s))
        return Conditions(slowdown, np.where(congested, self._congestion_factor, 1.0), congested, exchange_s)


class Switching:
    """Two-state Markov processes in continuous time, one for each index: exponential stays, off and on in turn.

    They begin in their stationary distribution. Each draws from its own generator, in the order of its switches, so
    that its path does not depend on when it is looked at.
    """

    def __init__(self, seed: int, kind: int, count: int, *, off_s: float, on_s: float) -> None:
        self._mean_s = (off_s, on_s)
        self._generators = [generator(seed, kind, index) for index in range(count)]
        share = on_s / (off_s + on_s)
        self._on = np.array([drawn.random() < share for drawn in self._generators], dtype=bool)
        self._next_s = np.array([self._stay_s(index) for index in range(count)])
        self._soonest_s = float(self._next_s.min())

    def at(self, time_s: float) -> Flags:
        """Which are on at a time, not earlier than the last call's. Costs a comparison while nothing switches."""
        while self._soonest_s <= time_s:
            for index in np.flatnonzero(self._next_s <= time_s).tolist():
                self._on[index] = not self._on[index]
                self._next_s[index] += self._stay_s(index)
            self._soonest_s = float(self._next_s.min())
        return self._on

    def _stay_s(self, index: int) -> float:
        return float(self._generators[index].exponential(self._mean_s[int(self._on[index])]))


class SpeedChanges:
    """Lasting changes of workers' speeds, as far as they have happened.

    Attributes:
        exchange_s: by how much longer an exchange takes.
    """

    def __init__(self, count: int, changes: Sequence[SpeedChange]) -> None:
        self.exchange_s = 0.0
        self._later = deque(sorted(changes, key=lambda change: change.at_s))
        self._factors: Array64 | None = None
        self._exchange_s = np.zeros(count)

    def at(self, time_s: float) -> Array64 | None:
        """Factors on compute times at a time, not earlier than the last call's; `None` before the first change."""
        while self._later and self._later[0].at_s <= time_s:
            change = self._later.popleft()
            factors = np.ones(len(self._exchange_s)) if self._factors is None else self._factors.copy()
            factors[change.rank] = change.factor
            self._factors = factors  # another array: those of earlier steps stay as they were
            self._exchange_s[change.rank] = change.exchange_s
            self.exchange_s = float(self._exchange_s.max())
        return self._factors


class Jitter:
    """Lognormal factors of median 1, one per worker and step."""

    def __init__(self, seed: int, count: int, sigma: float) -> None:
        self._seed, self._count, self._sigma = seed, count, sigma
        self._block = -1
        self._factors = np.empty((JITTER_BLOCK, count))

    def of_step(self, step: int) -> Array64:
        """The factors of a step."""
        block, row = divmod(step, JITTER_BLOCK)
        if block != self._block:
            draws = generator(self._seed, JITTER, block).standard_normal((JITTER_BLOCK, self._count))
            self._block, self._factors = block, np.exp(self._sigma * draws)
        factors: Array64 = self._factors[row]
        return factors


def generator(seed: int, kind: int, index: int) -> np.random.Generator:
    """A counter-based generator (Philox) for one purpose: equal keys, equal numbers, on every machine."""
    key = np.array([seed, (kind << 56) | index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
