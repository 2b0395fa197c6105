"""What another policy would have decided: its sizes beside the recorded ones, window by window.

Open loop: it sees what was recorded, and its own earlier decisions where a state has them. What its sizes would have
led to, nobody knows.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from dynamix.schemas.messages import Action, Job

from .position import Place
from .recorded import RecordedAction, RecordedActions


class OtherPolicy(NamedTuple):
    """Who shall decide instead."""

    name: str | None
    """`None`: the recorded one, with other options."""
    options: Mapping[str, float]

    def changed(self, job: Job, sizes: tuple[int, ...] | None) -> Job:
        """A specification that names it; `sizes` are those in force where the capture begins in the middle."""
        options = dict(self.options) if self.name is not None else {**job.policy_options, **self.options}
        return msgspec.structs.replace(
            job,
            policy=self.name or job.policy,
            policy_options=options,
            initial_local_batch_sizes=sizes or job.initial_local_batch_sizes,
        )


class DecidedBeside(msgspec.Struct, frozen=True, kw_only=True):
    """One window's decision, recorded and by the other policy."""

    generation: int
    window: int
    recorded: tuple[int, ...]
    """Local batch sizes, in rank order."""
    other: tuple[int, ...]

    @property
    def global_batch_sizes(self) -> tuple[int, int]:
        """Recorded, and by the other policy."""
        return sum(self.recorded), sum(self.other)

    @property
    def mean_difference(self) -> float:
        """Samples per rank between the two, without sign."""
        return float(np.abs(np.subtract(self.other, self.recorded)).mean())


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What the other policy would have decided, over a whole capture."""

    policy: str
    policy_version: int
    num_windows: int
    num_windows_different: int
    mean_difference: float
    """Samples per rank, without sign, over all ranks and windows."""
    p95_difference: float
    mean_global_batch_size_ratio: float
    """The other policy's global batch over the recorded one: geometric mean over windows."""
    windows: list[DecidedBeside]


class Beside:
    """Puts each decision beside the recorded one."""

    def __init__(self, recorded: RecordedActions) -> None:
        self._recorded = recorded
        self._rows: list[DecidedBeside] = []
        self._policy = ("", 0)

    def add(self, action: Action) -> None:
        """Take the other policy's decision; windows that nobody decided then are left out."""
        self._policy = (action.policy, action.policy_version)
        place = Place(action.generation, action.window)
        while (found := self._recorded.peek()) is not None and _place(found) < place:
            self._recorded.take()
        if found is not None and found.action is not None and _place(found) == place:
            sizes = found.action.local_batch_sizes
            if len(sizes) == len(action.local_batch_sizes):
                self._rows.append(
                    DecidedBeside(
                        generation=place.generation,
                        window=place.window,
                        recorded=sizes,
                        other=action.local_batch_sizes,
                    )
                )

    def comparison(self) -> Comparison | None:
        """The whole; `None` when no window was decided by both."""
        if not self._rows:
            return None
        differences = np.concatenate([np.abs(np.subtract(row.other, row.recorded)) for row in self._rows])
        totals = np.array([row.global_batch_sizes for row in self._rows], dtype=np.float64)
        return Comparison(
            policy=self._policy[0],
            policy_version=self._policy[1],
            num_windows=len(self._rows),
            num_windows_different=sum(row.recorded != row.other for row in self._rows),
            mean_difference=float(differences.mean()),
            p95_difference=float(np.percentile(differences, 95)),
            mean_global_batch_size_ratio=float(
                np.exp(np.log(np.maximum(totals[:, 1], 1) / np.maximum(totals[:, 0], 1)).mean())
            ),
            windows=self._rows,
        )


def changes(other: OtherPolicy, begins_with: RecordedAction | None) -> Callable[[Job], Job]:
    """What becomes of each specification."""
    action = None if begins_with is None else begins_with.action

    def change(job: Job) -> Job:
        in_force = action is not None and action.generation == job.generation
        return other.changed(job, action.local_batch_sizes if action is not None and in_force else None)

    return change


def _place(found: RecordedAction) -> Place:
    action = found.action
    return Place(-1, -1) if action is None else Place(action.generation, action.window)
