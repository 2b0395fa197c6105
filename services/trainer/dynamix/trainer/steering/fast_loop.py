"""The fast loop: which allocation the schedule gets from a decision, and from which step a better split rules. Pure.

The slow loop decides sizes (`fixed`), or a global batch (`tracking`) that is divided again whenever measurements
say so, until the slow loop decides again. All ranks write the same; real training and virtual cluster share it.
"""

from collections.abc import Sequence

from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.data.schedule import Schedule

from .tracking import Tracker


class FastLoop:
    """Writes allocations into a schedule."""

    def __init__(self, schedule: Schedule, tracker: Tracker) -> None:
        self.tracker = tracker
        self._schedule = schedule

    def adopt(self, effective_step: int, decided: Allocation) -> None:
        """Let a decision of the slow loop rule from a step on.

        Under tracking its sum is divided by the speeds known so far; its sizes stand while there are none, and the
        sizes in use stay when the global batch does.
        """
        newest = self._schedule.newest
        if decided.split == "tracking":
            kept = newest.split == "tracking" and decided.global_batch_size == newest.global_batch_size
            sizes = newest.local_batch_sizes if kept else self.tracker.divide(decided.local_batch_sizes)
            decided = decided.with_sizes(sizes)
        if decided != newest:
            self._schedule.revise(effective_step, decided)

    def observe_times(self, seconds_per_sample: Sequence[float], effective_step: int) -> None:
        """Take in the compute times of a step; under tracking a better split rules from `effective_step` on.

        That is the first step that no rank has drawn a batch for. While the slow loop has fixed the sizes, times are
        only remembered.
        """
        newest = self._schedule.newest
        if newest.split != "tracking":
            self.tracker.filter.observe(seconds_per_sample)
            return
        better = self.tracker.better_split(seconds_per_sample, newest.local_batch_sizes)
        if better is not None:
            self._schedule.revise(effective_step, newest.with_sizes(better))
