"""What another policy would have decided: its sizes beside the recorded ones, window by window.

Open loop: the policy sees what was recorded, and its own earlier decisions where a state holds them, but not what its
sizes would have led to.
"""

from typing import NamedTuple

import msgspec
import numpy as np

from dynamix.schemas.messages import Action, Job
from dynamix.schemas.messages.policies import PolicyOptions

from .action_store import RecordedActions, window_of


class OtherPolicy(NamedTuple):
    """The policy to ask."""

    name: str | None
    """`None`: the recorded one, with other options."""
    options: PolicyOptions

    def specification(self, job: Job, checkpoint: Action | None) -> Job:
        """Name this policy in a specification, with the sizes of `checkpoint` if that is of the same generation."""
        sizes = checkpoint.local_batch_sizes if checkpoint and checkpoint.generation == job.generation else None
        return msgspec.structs.replace(
            job,
            policy=self.name or job.policy,
            policy_options=dict(self.options) if self.name is not None else {**job.policy_options, **self.options},
            initial_local_batch_sizes=sizes or job.initial_local_batch_sizes,
        )


class WindowComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of one window, recorded and by the other policy."""

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
        """Mean absolute difference between the two, in samples per rank."""
        return float(np.abs(np.subtract(self.other, self.recorded)).mean())


class PolicyComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of another policy over a whole capture."""

    policy: str
    policy_version: int
    num_windows: int
    num_windows_different: int
    mean_difference: float
    """Mean absolute difference in samples per rank, over all ranks and windows."""
    p95_difference: float
    mean_global_batch_size_ratio: float
    """The other policy's global batch over the recorded one: geometric mean over windows."""
    windows: list[WindowComparison]


class PolicyComparer:
    """Collects each decision beside the recorded one."""

    def __init__(self, recorded: RecordedActions) -> None:
        self._recorded = recorded
        self._windows: list[WindowComparison] = []
        self._policy = ("", 0)

    def add_decision(self, action: Action) -> None:
        """Add a decision of the other policy; a window without a recorded decision is left out."""
        self._policy = (action.policy, action.policy_version)
        recorded = self._recorded_for(action)
        if recorded is not None and len(recorded.local_batch_sizes) == len(action.local_batch_sizes):
            self._windows.append(
                WindowComparison(
                    generation=action.generation,
                    window=action.window,
                    recorded=recorded.local_batch_sizes,
                    other=action.local_batch_sizes,
                )
            )

    def comparison(self) -> PolicyComparison | None:
        """Summarise all windows; `None` when no window was decided by both."""
        if not self._windows:
            return None
        differences = np.concatenate([np.abs(np.subtract(row.other, row.recorded)) for row in self._windows])
        totals = np.maximum([row.global_batch_sizes for row in self._windows], 1)
        return PolicyComparison(
            policy=self._policy[0],
            policy_version=self._policy[1],
            num_windows=len(self._windows),
            num_windows_different=sum(row.recorded != row.other for row in self._windows),
            mean_difference=float(differences.mean()),
            p95_difference=float(np.percentile(differences, 95)),
            mean_global_batch_size_ratio=float(np.exp(np.log(totals[:, 1] / totals[:, 0]).mean())),
            windows=self._windows,
        )

    def _recorded_for(self, action: Action) -> Action | None:
        """Read on to the recorded action for the same window."""
        key = window_of(action)
        while (found := self._recorded.peek()) is not None:
            if found.action is not None and window_of(found.action) >= key:
                return found.action if window_of(found.action) == key else None
            self._recorded.skip()
        return None
