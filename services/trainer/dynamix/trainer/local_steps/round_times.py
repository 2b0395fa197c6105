"""What a sample cost in a round of local steps. Pure; real and virtual ranks share it.

The ranks exchange times only where a round ends. The time of its last step alone says little where processors are
shared out in slices longer than a step, and noise that is taken for granted would make the fast loop divide equally.
"""

from collections.abc import Iterable


class RoundTimes:
    """Compute times of one rank since the round began."""

    def __init__(self) -> None:
        self._computed_s = 0.0
        self._num_samples = 0

    def add(self, seconds_per_sample: float, num_samples: int) -> None:
        """Count a step; one without samples, or without a known time, tells nothing."""
        if seconds_per_sample > 0.0 and num_samples:
            self._computed_s += seconds_per_sample * num_samples
            self._num_samples += num_samples

    @property
    def seconds_per_sample(self) -> float:
        """Over all samples of the round; 0 where nothing is known."""
        return self._computed_s / self._num_samples if self._num_samples else 0.0


def mean_counts(num_samples: Iterable[int], num_steps: int) -> tuple[int, ...]:
    """Samples per step of each rank, to the nearest whole one."""
    return tuple((2 * number + num_steps) // (2 * num_steps) for number in num_samples)
