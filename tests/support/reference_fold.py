"""The reference fold: what recorded decisions are compared with.

Written from docs/architecture.md ("Where a window closes"), not from the arbitrator's fold: one thread, no bus, no
checkpoint, nothing dropped (age is computed). Chain and watermarks concern storing, not deciding.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dynamix.arbitrator.policies.policy import Array32, Decision, Policy
from dynamix.schemas.codec import MalformedMessageError
from dynamix.schemas.features import GLOBAL_FEATURES, RANK_FEATURES, RANK_INDEX, unpack_global, unpack_ranks
from dynamix.schemas.messages import Job, State

FORGOTTEN_AFTER = 16  # windows: an older row is not used
BELIEVED_AHEAD = 64  # windows: the node's next state has to confirm a larger jump


class Decided(NamedTuple):
    """One window, decided when the state with this FEED sequence closed it; `decision` is as the policy made it."""

    sequence: int
    window: int
    local_batch_sizes: tuple[int, ...]
    gap: bool
    decision: Decision


class _GenerationFold:
    """All states of one generation, and the decisions so far."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rows: dict[str, dict[int, tuple[Array32, Array32]]] = {node.node: {} for node in job.nodes}
        self.unconfirmed: dict[str, int] = {}
        self.window, self.newest, self.gap = 0, -1, False
        self.sizes, self.carry = job.initial_local_batch_sizes, b""

    def add_state(self, state: State) -> None:
        """Keep a state, the first for each node and window; skip one that cannot belong to the job."""
        try:
            row = unpack_ranks(state), unpack_global(state)
        except MalformedMessageError:
            return
        if (state.node, state.ranks) not in [(node.node, node.ranks) for node in self.job.nodes]:
            return
        announced = self.unconfirmed.pop(state.node, None)
        if state.window > max(self.window, self.newest) + BELIEVED_AHEAD:
            if state.window - 1 != announced:
                self.unconfirmed[state.node] = state.window
                return
            self.window, self.gap = state.window, True
        self.rows[state.node].setdefault(state.window, row)
        self.newest = max(self.newest, state.window)

    def closed_window(self) -> int | None:
        """The window to decide now: all nodes have sent it, or some node is two windows ahead."""
        reported = [{at for at in rows if at >= self.window} for rows in self.rows.values()]
        complete = set.intersection(*reported)
        window = min(complete or set.union(*reported), default=self.window) if self.gap else self.window
        return window if window in complete or self.newest >= window + 2 else None

    def decide(self, sequence: int, window: int, policy: Policy) -> Decided:
        """Let the policy decide a closed window, and keep its sizes and carry for the next one."""
        decision = policy.decide(self.job, window, *self._seen_at(window), self.carry)
        bounds = zip(decision.allocation.local_batch_sizes, self.job.max_local_batch_sizes, strict=True)
        sizes = tuple(min(max(size, self.job.min_local_batch_size), top) for size, top in bounds)
        decided = Decided(sequence, window, sizes, self.gap, decision)
        self.window, self.gap, self.sizes, self.carry = window + 1, False, sizes, decision.carry
        return decided

    def _seen_at(self, window: int) -> tuple[Array32, Array32]:
        """Each node's newest row not after the window, and the job's features as the newest of those rows has them."""
        obs_WF = np.full((self.job.world_size, len(RANK_FEATURES)), np.nan, dtype=np.float32)
        globals_by_age = {FORGOTTEN_AFTER + 1: np.full(len(GLOBAL_FEATURES), np.nan, dtype=np.float32)}
        obs_WF[:, RANK_INDEX["age_windows"]] = FORGOTTEN_AFTER
        for node in self.job.nodes:
            rows, ranks = self.rows[node.node], list(node.ranks)
            age = min((window - at for at in rows if at <= window), default=FORGOTTEN_AFTER + 1)
            if age <= FORGOTTEN_AFTER:
                obs_WF[ranks], global_F = rows[window - age]
                obs_WF[ranks, RANK_INDEX["age_windows"]] = age
                globals_by_age.setdefault(age, global_F)
        obs_WF[:, RANK_INDEX["decided_local_batch_size"]] = self.sizes
        return obs_WF, globals_by_age[min(globals_by_age)]


def reference_decisions(job: Job, policy: Policy, feed: Iterable[tuple[int, State]]) -> list[Decided]:
    """Decide a generation as an arbitrator that never failed, from the states in their order in FEED."""
    known, decided = _GenerationFold(job), []
    for sequence, state in feed:
        if (state.job, state.generation) == (job.job, job.generation):
            known.add_state(state)
            while (window := known.closed_window()) is not None:
                decided.append(known.decide(sequence, window, policy))
    return decided
