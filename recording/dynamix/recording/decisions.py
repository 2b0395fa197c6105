"""Replay of the arbitrator: specifications and states in; actions out, compared with the recorded ones.

The decisions are made by the arbitrator's own `Fold`. A recorded action counts, whatever the fold decides: after a
difference the fold continues from the recorded action, so that each window is compared by itself.

A restart of the recorded arbitrator changes no decision, except after a gap: FEED had dropped states that the capture
has. The recorded action has `gap` there, and the fold is started again without those states.
"""

import contextlib
import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.deciding.job_log import reason_of
from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.arbitrator.learned.policy_file import PolicyFile, shipped_policy
from dynamix.arbitrator.policies.policy import MISTAKES, NamedPolicy, Policy, digest_of
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.recording.capture import CutOffError, Record, WindowKey, records
from dynamix.recording.comparison import EDGE_WINDOWS, OutputCounts
from dynamix.runtime.input_files import read_regular
from dynamix.schemas import subjects
from dynamix.schemas.chain import is_intact
from dynamix.schemas.codec import MalformedMessageError, decode, encode
from dynamix.schemas.messages import Action, Job, State
from dynamix.schemas.messages.allocation import MAX_GENERATION
from dynamix.schemas.policies import PolicyOptions, check_options
from dynamix.schemas.streams import ACTIONS, FEED, JOBS


class ReplayError(RuntimeError):
    """The capture cannot be replayed as requested; the message names what is missing and how to get it."""


class OtherPolicy(NamedTuple):
    """The policy that decides instead of the recorded one."""

    name: str | None
    """`None`: the recorded one, with other options."""
    options: PolicyOptions


class WindowComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of one window, recorded and by the other policy."""

    generation: int
    window: int
    recorded: tuple[int, ...]
    """Local batch sizes, in rank order."""
    other: tuple[int, ...]

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


class _Recorded(NamedTuple):
    """A record of ACTIONS."""

    record: Record
    action: Action | None
    """`None` when the record cannot be decoded."""

    @property
    def generation(self) -> int:
        return -1 if self.action is None else self.action.generation


class ArbitratorReplay:
    """Decides one job as the recorded arbitrator did, or as another policy would, generation by generation."""

    def __init__(
        self,
        path: Path,
        counts: OutputCounts,
        *,
        until: WindowKey | None,
        other: OtherPolicy | None,
        policy_files: Sequence[Path],
    ) -> None:
        """Search the capture for where to begin.

        Raises:
            ReplayError: when it has no states, no specification for any of them, or no action to compare with.
            ValueError: when a policy file is invalid.
        """
        self._counts = counts
        self._until = until
        self._other = other
        self._files: list[bytes] = []
        """The content of learned policies."""
        for file in policy_files:
            try:
                self._files.append(read_regular(file))
            except OSError as error:
                raise ReplayError(f"cannot read the policy file {file}: {error.strerror}") from error
            PolicyFile.from_bytes(self._files[-1], str(file))
        self._jobs, self._checkpoint = _find_start(path)
        self._actions = (_recorded(record) for record in _until_cut(path) if record.stream == ACTIONS.name)
        """Actions of the capture, read ahead of the states; memory holds one."""
        self._following = next(self._actions, None)
        """The recorded action after the newest one that was compared; `None` at the end."""
        self._asked: list[tuple[Action, Action]] = []
        """Recorded decisions with those of the other policy."""
        self._generation = -1
        """The newest one that was opened."""
        self._opened: set[int] = set()
        self._fold: Fold | None = None
        """`None` before the first state, and in a generation that is not decided any more."""
        self._states: deque[tuple[int, State]] = deque()
        """States of this generation that a restarted arbitrator would read."""
        self._newest: Action | None = None
        self._num_after_last = 0
        """Decisions of this generation after its last recorded one."""
        self._restarted_at = 0
        """Sequence of the recorded action before which the fold was started again."""
        self.is_over = False
        """Whether the last requested window is decided."""
        if other is None and self._checkpoint is not None:
            sequence = self._checkpoint.record.sequence
            counts.add_note(f"begins after the action at {sequence}: what was before is not in the capture")

    def add_record(self, record: Record) -> None:
        """Decide what a state makes possible; other messages count only as recorded actions and specifications."""
        if record.kind != "state":
            return
        try:
            state = decode(State, record.subject, record.payload)
        except MalformedMessageError:
            return  # a dead letter
        try:
            if state.generation > self._generation and state.generation in self._jobs:
                self._open(state.generation)
            if state.generation == self._generation and self._fold is not None:
                self._states.append((record.sequence, state))
                self._decide(record.sequence, state)
        except MISTAKES as error:
            self._fold = None
            self._counts.add_note(f"generation {self._generation} is not decided any more: {reason_of(error)[0]}")

    def finish(self) -> None:
        """Count the recorded actions that the fold did not reach, up to the last requested window."""
        while self._other is None and (found := self._following) is not None:
            if self._until is not None and found.action is not None and _window_of(found.action) > self._until:
                break
            self._pass_over(found)

    def comparison(self) -> PolicyComparison | None:
        """The decisions of another policy; `None` when no window was decided by both."""
        if not self._asked:
            return None
        windows = [
            WindowComparison(
                generation=other.generation,
                window=other.window,
                recorded=recorded.local_batch_sizes,
                other=other.local_batch_sizes,
            )
            for recorded, other in self._asked
        ]
        differences = np.concatenate([np.abs(np.subtract(row.other, row.recorded)) for row in windows])
        ratios = [sum(row.other) / max(1, sum(row.recorded)) for row in windows]
        return PolicyComparison(
            policy=self._asked[-1][1].policy,
            policy_version=self._asked[-1][1].policy_version,
            num_windows=len(windows),
            num_windows_different=sum(row.recorded != row.other for row in windows),
            mean_difference=float(differences.mean()),
            p95_difference=float(np.percentile(differences, 95)),
            mean_global_batch_size_ratio=float(np.exp(np.log(np.maximum(ratios, 1e-12)).mean())),
            windows=windows,
        )

    def _open(self, generation: int) -> None:
        """Start a generation as the arbitrator does: from the newest action, with the policy that decided next."""
        checkpoint, job = self._checkpoint, self._jobs[generation]
        if self._other is not None:
            other = self._other
            options = dict(other.options) if other.name is not None else {**job.policy_options, **other.options}
            job = msgspec.structs.replace(job, policy=other.name or job.policy, policy_options=options)
            if checkpoint is not None and checkpoint.action is not None and checkpoint.generation == generation:
                job = msgspec.structs.replace(job, initial_local_batch_sizes=checkpoint.action.local_batch_sizes)
        elif checkpoint is not None and generation < checkpoint.generation:
            return
        else:
            last_skipped = 0 if checkpoint is None else checkpoint.record.sequence
            while (found := self._following) is not None and (
                found.record.sequence <= last_skipped or (found.action is not None and found.generation < generation)
            ):
                self._pass_over(found)
        self._generation, self._fold = generation, None
        self._opened.add(generation)
        self._states.clear()
        self._num_after_last = 0
        following = None if self._other is not None else self._following
        decided = None if following is None or following.generation != generation else following.action
        if self._newest is not None and self._newest.generation == generation:
            decided = self._newest
        self._start_fold(job, self._policy(job, decided), b"" if decided is None else decided.profile)

    def _start_fold(self, job: Job, policy: Policy, profile: bytes = b"") -> None:
        self._fold = Fold(job, policy, self._newest, profile)
        self._has_begun = False

    def _decide(self, sequence: int, state: State) -> None:
        """Fold a state, and compare every decision that it makes possible."""
        fold = self._fold
        assert fold is not None, "the generation is decided"
        if state.window and not self._has_begun and not fold.next_window:
            fold.start_after_gap(sequence - 1)
        self._has_begun = True
        try:
            fold.add_state(sequence, state)
        except MalformedMessageError:
            return  # a dead letter
        while not self.is_over and (action := fold.close()) is not None:
            stored = self._stored(action)
            if stored is None:
                return
            self._adopt(stored)
            self.is_over = self._until is not None and _window_of(stored) >= self._until

    def _stored(self, action: Action) -> Action | None:
        """The action that ACTIONS has at this place; `None` when the fold was started again instead."""
        if self._other is not None:
            self._ask(action)
            return action
        found = self._following
        if found is None or found.generation > action.generation:  # the capture ends first, or the job was restarted
            self._num_after_last += 1
            if self._num_after_last > EDGE_WINDOWS:
                self._counts.count_missing("only replayed", subjects.subject_of(action), _window_of(action))
            else:
                self._counts.num_outside += 1
            return action
        record, recorded = found
        if recorded is not None and recorded.gap and not action.gap and self._restarted_at != record.sequence:
            self._restarted_at = record.sequence  # once: if that does not help, it is a difference
            self._restart_without(recorded)
            return None
        self._skip()
        if recorded is not None and _window_of(recorded) != _window_of(action):
            self._counts.count_missing("only replayed", record.subject, _window_of(action))
            self._counts.num_uncompared += 1
        elif self._counts.count_pair(record, _window_of(action), encode(action)):
            return action
        if recorded is None or not is_intact(record.payload):
            return action
        assert self._fold is not None, "it has decided"
        if recorded.generation == self._generation and recorded.policy_digest != digest_of(self._fold.policy):
            self._fold.policy = self._policy(self._fold.job, recorded)
        return recorded

    def _adopt(self, action: Action) -> None:
        assert self._fold is not None, "it has decided"
        self._fold.adopt(action)
        if not self._num_after_last:  # what was never stored is no predecessor of a later generation's first action
            self._newest = action
        while self._states and self._states[0][0] <= action.watermark:
            self._states.popleft()

    def _restart_without(self, recorded: Action) -> None:
        """Start the fold again without the states up to the watermark of the action that was recorded next."""
        self._counts.add_note(f"the recorded arbitrator restarted after a gap, before window {recorded.window}")
        assert self._fold is not None, "it has decided"
        self._start_fold(self._fold.job, self._fold.policy)
        if self._fold.next_window:
            self._fold.start_after_gap(recorded.watermark)
        for sequence, state in list(self._states):
            if sequence > recorded.watermark:
                self._decide(sequence, state)

    def _pass_over(self, found: _Recorded) -> None:
        """Adopt a recorded action uncompared; it is missing where the fold refused to decide its generation."""
        self._skip()
        record, action = found
        is_before = self._checkpoint is not None and record.sequence <= self._checkpoint.record.sequence
        if action is None or is_before or action.generation not in self._opened:
            self._counts.num_uncompared += 1
        else:
            self._counts.count_missing("only recorded", record.subject, _window_of(action), record.sequence)
        if action is not None:
            self._newest = action

    def _skip(self) -> None:
        self._following = next(self._actions, None)

    # Another policy: open loop. It sees what was recorded, but not what its sizes would have led to.

    def _ask(self, action: Action) -> None:
        """Note the other policy's decision if there is a recorded one for the same window."""
        while (found := self._following) is not None:
            if found.action is not None and _window_of(found.action) >= _window_of(action):
                break
            self._skip()
        recorded = None if found is None else found.action
        if recorded is None or _window_of(recorded) != _window_of(action):
            return
        if len(recorded.local_batch_sizes) == len(action.local_batch_sizes):
            self._asked.append((recorded, action))

    def _policy(self, job: Job, decided: Action | None) -> Policy:
        """The policy that a specification names; in the version of the file that decided an action.

        Raises:
            ReplayError: when that file is not given.
            ValueError: when there is no such policy, or it lacks an option of the job.
        """
        digest = decided.policy_digest if decided is not None and decided.policy == job.policy else b""
        shipped = shipped_policy(job.policy)
        files = [*self._files, *(() if shipped is None else (shipped,))]
        policy: NamedPolicy
        if digest and decided is not None:
            data = next((each for each in files if hashlib.sha256(each).digest() == digest), None)
            if data is None:
                raise ReplayError(
                    f"version {decided.policy_version} of policy {job.policy!r} decided here, but its file (SHA-256 "
                    f"{digest.hex()[:16]}...) is not given: get it from the bus with `dynamix policy export` and give "
                    "it with --policy-file"
                )
            policy = LearnedPolicy(PolicyFile.from_bytes(data), name=job.policy, version=decided.policy_version)
        else:
            read = [PolicyFile.from_bytes(data) for data in files]
            file = next((each for each in read if each.metadata.policy == job.policy), None)
            policy = policy_named(job.policy) if file is None else LearnedPolicy(file, name=job.policy)
        check_options(policy.name, policy.options, job.policy_options)
        return policy


def _find_start(path: Path) -> tuple[dict[int, Job], _Recorded | None]:
    """Search for the first specification of each generation, and for the action to continue from, if any.

    An action is a checkpoint: the states after its watermark are all that later decisions need.
    """
    jobs: dict[int, Job] = {}
    generations: set[int] = set()
    feed_first, start = 0, None
    for record in _until_cut(path):
        if record.stream == FEED.name:
            feed_first = feed_first or record.sequence
            if record.kind == "state" and (key := record.key) is not None:
                generations.add(key.generation)
        elif record.stream == JOBS.name:
            with contextlib.suppress(MalformedMessageError):
                job = decode(Job, record.subject, record.payload)
                if job.generation <= MAX_GENERATION:
                    jobs.setdefault(job.generation, job)  # a capture of the past has it after the states
        elif start is None and feed_first and record.stream == ACTIONS.name:
            found = _recorded(record)
            start = found if found.action is not None and feed_first <= found.action.watermark + 1 else None
    if not generations:
        raise ReplayError("the capture has no states: there is nothing to decide")
    if not generations & jobs.keys():
        raise ReplayError("the capture has no specification of the job: begin the next one while the job runs")
    if start is None or start.action is None:
        raise ReplayError("the capture has no action of the job together with its inputs: nothing can be compared")
    return jobs, start if start.action.previous_hash else None


def _until_cut(path: Path) -> Iterator[Record]:
    """The records of a capture, up to where it is cut off."""
    with contextlib.suppress(CutOffError):  # the player reports it
        yield from records(path)


def _recorded(record: Record) -> _Recorded:
    try:
        return _Recorded(record, decode(Action, record.subject, record.payload))
    except MalformedMessageError:
        return _Recorded(record, None)


def _window_of(action: Action) -> WindowKey:
    return WindowKey(action.generation, action.window)
