"""The fast loop on a schedule: whether it rules the split, and from which step a better one does. Pure.

The slow loop decides sizes (`fixed`), or a global batch (`tracking`) that is then divided anew whenever measurements
say so, until the slow loop decides again. All ranks write the same; real training and virtual cluster share it.
"""

from collections.abc import Sequence

from dynamix.schemas.policies import Split
from dynamix.trainer.data.schedule import Schedule

from .tracking import Tracker


class FastLoop:
    """Writes splits into a schedule."""

    def __init__(self, schedule: Schedule, tracker: Tracker) -> None:
        self.tracker = tracker
        self._schedule = schedule

    def adopt(self, effective_step: int, sizes: Sequence[int], split: Split) -> None:
        """Let a decision of the slow loop rule from a step on.

        Under tracking its sum is divided by the speeds known so far; its sizes stand while there are none, and the
        split in use stays when the global batch does.
        """
        schedule = self._schedule
        if split == "tracking":
            if schedule.newest_split == "tracking" and sum(sizes) == schedule.newest.total:
                return
            sizes = self.tracker.split(sizes)
        if (tuple(sizes), split) != (schedule.newest.values, schedule.newest_split):
            schedule.revise(effective_step, sizes, split)

    def observe(self, seconds_per_sample: Sequence[float], effective_step: int) -> None:
        """Take in the compute times of a step; under tracking a better split rules from `effective_step` on.

        That is the first step that no rank has drawn a batch for. Times that come when the slow loop has fixed the
        sizes again are remembered, no more.
        """
        schedule = self._schedule
        if schedule.newest_split != "tracking":
            self.tracker.filter.add(seconds_per_sample)
            return
        better = self.tracker.observe(seconds_per_sample, schedule.newest.values)
        if better is not None:
            schedule.revise(effective_step, better, "tracking")
