"""The fold: recorded states of one job in, decisions out. Pure: no clock, no bus, only its arguments.

decision = f(recorded order of states, job specification, policy version, carry). When a window closes, which rows
count and what a restart must read again are decided here; `job_log.py` publishes.
"""

from collections.abc import Mapping
from operator import sub

import numpy as np

from dynamix.arbitrator.policies.policy import MAX_REASON, Policy, digest_of
from dynamix.arbitrator.policies.rule import Rule
from dynamix.schemas import subjects
from dynamix.schemas.apportion import apportion
from dynamix.schemas.chain import seal
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.features import (
    GLOBAL_FEATURES,
    RANK_FEATURES,
    RANK_INDEX,
    Array32,
    check_state,
    stack_ranks,
    unpack_global,
)
from dynamix.schemas.messages import Action, Job, JobProfile, State

MAX_AGE_WINDOWS = 16
"""Age beyond which a row is dropped; a restart would have to read back to it."""

MAX_SKIP_WINDOWS = 64
"""A longer jump ahead is accepted only when the node's next state confirms it."""


_Row = tuple[int, State]
"""One node's state of one window, checked but not yet unpacked, behind its sequence in FEED."""


class Fold:
    """Decides the windows of one generation of one job, in order, each once."""

    def __init__(self, job: Job, policy: Policy, last: Action | None, profile: bytes = b"") -> None:
        """Start at the beginning of the generation, or after its `last` action, which is also the checkpoint.

        An action of an earlier generation only gives the chain its predecessor. A generation without actions begins
        with a `profile` of its family, where its policy can: a stored message that it can begin with.
        """
        self.job = job
        self.policy = policy
        self._ranks = {node.node: node.ranks for node in job.nodes}
        self._indices = {node.node: np.array(node.ranks) for node in job.nodes}
        self._rows: dict[str, dict[int, _Row]] = {node.node: {} for node in job.nodes}
        self._num_nodes: dict[int, int] = {}
        """Number of nodes with a row, by window: a state then costs the same in a job of any size."""
        self._ahead: dict[str, _Row] = {}
        self._newest_window = -1
        self._gap = False
        self.next_window = 0
        self.watermark = 0
        self._profile, self._carry = b"", b""
        if profile and isinstance(policy, Rule):  # the one policy that keeps profiles
            known = decode(JobProfile, subjects.of("profile", job.family), profile)
            self._profile, self._carry = profile, policy.begin(job, known)
        self.note = ""
        """Log message for the decision that `close` made last."""
        self._decided = job.initial_local_batch_sizes
        self.previous_hash = b""
        if last is not None:
            self.adopt(last)

    def add_state(self, sequence: int, state: State) -> None:
        """Add one recorded state of this generation. Raises MalformedMessageError when it does not fit the job."""
        if sequence <= self.watermark:
            return
        if self._ranks.get(state.node) != state.ranks:
            raise MalformedMessageError(
                f"node {state.node!r} with ranks {state.ranks} is not in the job's specification"
            )
        check_state(state)
        confirmed = self._ahead.pop(state.node, None)
        if state.window > max(self.next_window, self._newest_window) + MAX_SKIP_WINDOWS:
            if confirmed is None or state.window != confirmed[1].window + 1:
                self._ahead[state.node] = (sequence, state)
                return
            self.next_window = state.window
            self._gap = True
        rows, window = self._rows[state.node], state.window
        if window not in rows:
            rows[window] = (sequence, state)
            self._num_nodes[window] = self._num_nodes.get(window, 0) + 1
            self._newest_window = max(self._newest_window, window)
            if window < self.next_window:
                self._drop_closed(rows)

    def start_after_gap(self, watermark: int) -> None:
        """Continue after `watermark`, with the next window that all nodes report, since inputs are lost."""
        self._gap = True
        self.watermark = watermark

    def close(self) -> Action | None:
        """The decision for the next window if it is closed, sealed into the chain; `None` while it is open.

        It is closed when all nodes have sent it, or some node is two windows ahead. After a gap the next window is the
        first one that all nodes report, or the first reported at all once the job is two windows past it, so that a
        dead collector never stops decisions. Nothing changes until `adopt` is called with the action that the broker
        stored.
        """
        window, num_nodes = self.next_window, len(self._rows)
        if self._gap:
            some = [at for at in self._num_nodes if at >= window]
            window = min([at for at in some if self._num_nodes[at] == num_nodes] or some, default=window)
        if self._num_nodes.get(window) != num_nodes and self._newest_window < window + 2:
            return None
        obs_WF, global_F = self._observe(window)
        decision = self.policy.decide(self.job, window, obs_WF, global_F, self._carry)
        self.note = decision.note
        job, sizes = self.job, decision.allocation.local_batch_sizes
        assert len(sizes) == job.world_size, f"policy {self.policy.name} must size each rank"
        # within the job's bounds, and with its sum where that is fixed: their ratios are what remains
        low, high = job.min_local_batch_size, job.max_local_batch_sizes
        sizes = tuple(
            low if size < low else top if size > top else int(size)  # a third of the time of min and max
            for size, top in zip(sizes, high, strict=True)
        )
        fixed = sum(job.initial_local_batch_sizes)
        if job.global_batch != "adaptive" and sum(sizes) != fixed:
            sizes = apportion(fixed, sizes, (low,) * len(high), high)
        needed = [sequence for sequence, _ in self._ahead.values()]  # for deciding the windows after this one
        for rows in self._rows.values():
            last = _newest(rows, window)
            for at, (sequence, _) in rows.items():
                if at > window or (at == last and window - at < MAX_AGE_WINDOWS):
                    needed.append(sequence)
        action = Action(
            job=job.job,
            generation=job.generation,
            window=window,
            allocation=decision.allocation.with_sizes(sizes),
            deltas=tuple(map(sub, sizes, self._decided)),
            policy=self.policy.name,
            policy_version=self.policy.version,
            policy_digest=digest_of(self.policy),
            watermark=max(self.watermark, min(needed, default=self.watermark + 1) - 1),
            gap=self._gap,
            logprobs=decision.logprobs,
            values=decision.values,
            carry=decision.carry,
            reason=decision.reason[:MAX_REASON],
            profile=self._profile,
        )
        return seal(action, self.previous_hash)

    def adopt(self, action: Action) -> None:
        """Continue after a stored action, this process's own or another arbitrator's."""
        self.previous_hash = action.hash
        if action.generation != self.job.generation:
            return
        self.next_window = action.window + 1
        self.watermark = max(self.watermark, action.watermark)
        self._profile, self._carry = b"", action.carry
        self._decided = action.local_batch_sizes
        self._gap = False
        for rows in self._rows.values():
            self._drop_closed(rows)

    def _drop_closed(self, rows: dict[int, _Row]) -> None:
        """Drop rows of closed windows, except a node's newest one until it is too old."""
        closed = sorted(window for window in rows if window < self.next_window)
        for window in closed:
            if window != closed[-1] or self.next_window - window > MAX_AGE_WINDOWS:
                del rows[window]
                self._num_nodes[window] -= 1
                if not self._num_nodes[window]:
                    del self._num_nodes[window]

    def _observe(self, window: int) -> tuple[Array32, Array32]:
        """Input of a decision: each node's newest row up to the window, unless it is too old."""
        obs_WF = np.full((self.job.world_size, len(RANK_FEATURES)), np.nan, dtype=np.float32)
        global_F = np.full(len(GLOBAL_FEATURES), np.nan, dtype=np.float32)
        obs_WF[:, RANK_INDEX["age_windows"]] = MAX_AGE_WINDOWS
        known = {node: at for node, rows in self._rows.items() if (at := _newest(rows, window)) is not None}
        if known:
            states = [self._rows[node][at][1] for node, at in known.items()]
            ranks, counts = np.concatenate([self._indices[node] for node in known]), [len(one.ranks) for one in states]
            obs_WF[ranks] = stack_ranks(states)
            obs_WF[ranks, RANK_INDEX["age_windows"]] = np.repeat([window - at for at in known.values()], counts)
            newest = max(known, key=known.__getitem__)
            global_F = unpack_global(self._rows[newest][known[newest]][1])
        obs_WF[:, RANK_INDEX["decided_local_batch_size"]] = self._decided
        return obs_WF, global_F


def _newest(rows: Mapping[int, _Row], window: int) -> int | None:
    """The newest window up to this one with a row that is not too old."""
    if window in rows:  # nearly always
        return window
    return max((at for at in rows if window - MAX_AGE_WINDOWS <= at <= window), default=None)
