"""The fast loop of a virtual cluster: the same filter and split as in real training, with a real loader's delay."""

from collections.abc import Sequence

from dynamix.schemas.messages import Action
from dynamix.trainer.split import Counts
from dynamix.trainer.tracking import Tracker

from .clock import StepTiming


class FastLoop:
    """Which sizes rule the next step: what step s showed changes those of step s + 2, as a loader's margin has it."""

    def __init__(self, min_local_batch_size: int, max_local_batch_sizes: Sequence[int]) -> None:
        self._tracker = Tracker(min_local_batch_size, max_local_batch_sizes)
        self._tracking = False
        self._seen: list[float] | None = None
        """Seconds per sample of the newest step, which nobody can act on yet."""

    def after_step(self, timing: StepTiming, counts: Counts, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes that follow `sizes` after a step; the same while nothing tracks."""
        if not self._tracking:
            return sizes
        seen, self._seen = self._seen, seconds_per_sample(timing, counts)
        return sizes if seen is None else self._tracker.observe(seen, sizes) or sizes

    def adopt(self, action: Action) -> tuple[int, ...]:
        """The first sizes under an action: its own, or its global batch divided by what is known of the workers."""
        self._tracking = action.split == "tracking"
        if self._tracking:
            return self._tracker.split(action.local_batch_sizes)
        self._seen = None
        return action.local_batch_sizes


def seconds_per_sample(timing: StepTiming, counts: Counts) -> list[float]:
    """Of each worker's compute time; 0 where it had no samples."""
    return [
        time_s / count if count else 0.0 for time_s, count in zip(timing.compute_s.tolist(), counts.values, strict=True)
    ]
