"""The gradient noise scale by samples seen: means over a grid, of one run or of several. Pure; packs into a carry."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dynamix.schemas.messages import NoisePoint

from .observation import Array64

NUM_KNOTS = 40
FIRST_SAMPLES = 1024.0
"""The first point; what is before it counts for it."""
GROWTH = 2.0**0.5
"""From one point to the next: the last one is at 7.6e8 samples."""
MOST_COUNTED = 12.0
"""Windows at a point that count: so a later run has as much to say as all before it."""

CURVE_BYTES = 2 * 4 * NUM_KNOTS


@dataclass(frozen=True)
class NoiseCurve:
    """Mean logarithm of B_noise at each point, and how many windows it is the mean of."""

    logs: Array64
    counts: Array64

    @classmethod
    def empty(cls) -> "NoiseCurve":
        """Before anything was measured."""
        return cls(np.zeros(NUM_KNOTS), np.zeros(NUM_KNOTS))

    @classmethod
    def of_points(cls, points: Iterable[NoisePoint]) -> "NoiseCurve":
        """The curve through these points, each as if measured in one window."""
        curve = cls.empty()
        for point in points:
            curve = curve.with_value(point.num_samples, point.noise_scale)
        return curve

    @property
    def is_known(self) -> bool:
        """Whether there is any point."""
        return bool((self.counts > 0).any())

    @property
    def points(self) -> tuple[NoisePoint, ...]:
        """The known points, ascending."""
        known = np.flatnonzero(self.counts > 0)
        return tuple(NoisePoint(FIRST_SAMPLES * GROWTH**index, math.exp(self.logs[index])) for index in known.tolist())

    def with_value(self, num_samples: float, noise_scale: float) -> "NoiseCurve":
        """The curve after a window that ended with so many samples seen; as it is where nothing was measured."""
        if not 0.0 < noise_scale < math.inf:
            return self
        index, logs, counts = _nearest(num_samples), self.logs.copy(), self.counts.copy()
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

    def pack(self) -> bytes:
        """`CURVE_BYTES` bytes."""
        return np.concatenate([self.logs, self.counts]).astype("<f4").tobytes()

    @classmethod
    def unpack(cls, packed: bytes) -> "NoiseCurve":
        """What `pack` gave; empty from anything else."""
        if len(packed) != CURVE_BYTES:
            return cls.empty()
        numbers = np.frombuffer(packed, dtype="<f4").astype(np.float64)
        return cls(numbers[:NUM_KNOTS], numbers[NUM_KNOTS:])


def _position(num_samples: float) -> float:
    return math.log(max(num_samples, FIRST_SAMPLES) / FIRST_SAMPLES) / math.log(GROWTH)


def _nearest(num_samples: float) -> int:
    return min(round(_position(num_samples)), NUM_KNOTS - 1)
