"""Replay: give a capture's messages to the functions that the services call, and compare each output byte for byte.

    outcome = replay(path, "arbitrator")
    outcome.is_equal()

collector: reports in; metric windows, states and traces out. The kernel's counters come from the recorded windows.
reward: metric windows in, rewards out.
arbitrator: specifications and states in, actions out by the arbitrator's `Fold`.

No broker and no service process takes part. `agree` defines what counts as the same decision or the same number.
"""

import contextlib
import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import msgspec

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.deciding.job_log import reason_of
from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.arbitrator.learned.policy_file import PolicyFile, shipped_policy
from dynamix.arbitrator.policies.policy import MISTAKES, NamedPolicy, Policy, digest_of
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.collector.agent import trace_of
from dynamix.collector.observation import CollectorSettings
from dynamix.collector.window import Observation, Traffic, metric_window, simulated_window
from dynamix.reward.formula import reward_of
from dynamix.reward.service import RewardSettings
from dynamix.runtime.input_files import read_regular
from dynamix.schemas import codec, subjects
from dynamix.schemas.chain import is_intact
from dynamix.schemas.codec import MalformedMessageError, decode, decode_or_none, encode
from dynamix.schemas.features import GLOBAL_FEATURES, RANK_FEATURES, state_of, unpack_global, unpack_ranks
from dynamix.schemas.messages import Action, Job, Message, MetricWindow, Report, State
from dynamix.schemas.messages.allocation import MAX_GENERATION
from dynamix.schemas.policies import check_options
from dynamix.schemas.streams import ACTIONS, FEED, JOBS

from .capture import CutOffError, Record, WindowKey, kind_of, read_header, records, window_key_of
from .fingerprint import differences, fingerprint

# --- comparison: recorded and replayed outputs in, counts and the first difference by field out. Pure ---------------

Reason = Literal["other bytes", "only recorded", "only replayed"]

MAX_LISTED = 100
"""Differing windows that are listed; further ones are only counted."""
EDGE_WINDOWS = 2
"""Windows at the end of a capture whose outputs may not have been recorded yet."""
REL_TOLERANCE = 1e-6
"""Numbers that differ by less are the same number from another processor: float32 has 1.2e-7 between neighbours."""
MAX_SHOWN_BYTES = 16
_DECISION_FIELDS = ("generation", "window", "allocation", "gap")
_PACKED_FIELDS = ("features", "global_features")
_ABSENT = "-"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One output that differs from the recorded one."""

    kind: str
    subject: str
    generation: int
    window: int
    reason: Reason
    agrees: bool
    """Only the bytes differ: decisions are the same, or numbers are the same to six digits."""
    sequence: int | None = None
    """Sequence of the recorded message in its stream."""
    fields: dict[str, tuple[str, str]] = {}
    """What differs, recorded and replayed, by path."""

    @property
    def key(self) -> WindowKey:
        """The window of the output."""
        return WindowKey(self.generation, self.window)


class OutputCounts(msgspec.Struct, kw_only=True):
    """Counts over the outputs of one replay."""

    num_compared: int = 0
    num_equal: int = 0
    """Equal byte for byte."""
    num_agreeing: int = 0
    """Other bytes, but the same decision."""
    num_different: int = 0
    """Another decision, or missing on one side."""
    num_repeated: int = 0
    """Recorded twice: published again after the broker had forgotten the first message id."""
    num_uncompared: int = 0
    """Recorded outputs that were not compared: what they follow from is not in the capture, or cannot be decoded."""
    num_outside: int = 0
    """Replayed outputs at the edges of the capture, whose counterparts it may have been ended before."""
    differences: list[Difference] = []
    """The first `MAX_LISTED`, and in any case the first that is more than a difference of bytes."""
    notes: list[str] = []

    def count_pair(self, record: Record, key: WindowKey, replayed: bytes) -> bool:
        """Count a recorded output and the payload of the replayed one; returns whether their bytes are equal."""
        self.num_compared += 1
        if record.payload == replayed:
            self.num_equal += 1
            return True
        sides: list[Message | str] = []
        for payload in (record.payload, replayed):
            try:
                sides.append(codec.decode_any(record.subject, payload))
            except MalformedMessageError as error:
                sides.append(str(error))
        fields = {path: (_shown(left), _shown(right)) for path, (left, right) in _differing(*sides).items()}
        where = {"kind": record.kind, "subject": record.subject, "sequence": record.sequence, **key._asdict()}
        self._add_difference(Difference(**where, reason="other bytes", agrees=agree(*sides), fields=fields))
        return False

    def count_missing(self, reason: Reason, subject: str, key: WindowKey, sequence: int | None = None) -> None:
        """Count an output that is on one side only; `sequence` is that of a recorded one."""
        where = {"kind": kind_of(subject), "subject": subject, **key._asdict()}
        self._add_difference(Difference(**where, reason=reason, agrees=False, sequence=sequence))

    def add_note(self, text: str) -> None:
        """Add a remark about the capture, unless it is there already."""
        if text not in self.notes:
            self.notes.append(text)

    def _add_difference(self, difference: Difference) -> None:
        self.num_agreeing += difference.agrees
        self.num_different += not difference.agrees
        is_first = self.num_different == 1 and not difference.agrees
        if is_first or len(self.differences) < MAX_LISTED:
            self.differences.append(difference)


def agree(recorded: Message | str, replayed: Message | str) -> bool:
    """Whether two messages of different bytes agree: equal decisions, or numbers within `REL_TOLERANCE`."""
    if isinstance(recorded, str) or isinstance(replayed, str) or type(recorded) is not type(replayed):
        return False
    if isinstance(recorded, Action):
        return all(getattr(recorded, name) == getattr(replayed, name) for name in _DECISION_FIELDS)
    return all(
        isinstance(left, float)
        and isinstance(right, float)
        and math.isclose(left, right, rel_tol=REL_TOLERANCE, abs_tol=1e-12)
        for left, right in _differing(recorded, replayed).values()
    )


def _differing(recorded: Message | str, replayed: Message | str) -> dict[str, tuple[Any, Any]]:
    """The fields that differ; a text stands for a message that cannot be decoded, and gives the reason."""
    left, right = _values_of(recorded), _values_of(replayed)
    pairs = {path: (left.get(path, _ABSENT), right.get(path, _ABSENT)) for path in [*left, *right]}
    # a number is unknown on both sides where neither equals itself
    return {path: (one, two) for path, (one, two) in pairs.items() if one != two and (one == one or two == two)}  # noqa: PLR0124


def _values_of(message: Message | str) -> dict[str, Any]:
    """Values of a message by path; those of a state by the names of its features, NaN where unknown."""
    if isinstance(message, str):
        return {"cannot be decoded": message}
    found = dict(_values("", message))
    if isinstance(message, State):
        found = {path: value for path, value in found.items() if path not in _PACKED_FIELDS}
        try:
            for rank, row in zip(message.ranks, unpack_ranks(message).tolist(), strict=True):
                found |= {f"rank {rank}: {name}": value for name, value in zip(RANK_FEATURES, row, strict=True)}
            row = unpack_global(message).tolist()
            found |= {f"job: {name}": value for name, value in zip(GLOBAL_FEATURES, row, strict=True)}
        except MalformedMessageError as error:
            found["features"] = str(error)
    return found


def _values(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        value = {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _values(f"{path}.{name}" if path else name, item)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _values(f"{path}[{index}]", item)
    else:
        yield path, value


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        more = "..." if len(value) > MAX_SHOWN_BYTES else ""
        return f"{value[:MAX_SHOWN_BYTES].hex()}{more} ({len(value)} bytes)"
    if isinstance(value, float):
        return "unknown" if math.isnan(value) else repr(value)
    return "none" if value is None else str(value)


# --- a replay ---------------------------------------------------------------------------------------------------------

ReplayTarget = Literal["collector", "reward", "arbitrator"]
PROGRESS_EVERY = 512
"""Records between two reports of progress."""


class ReplayError(RuntimeError):
    """The capture cannot be replayed as requested; the message names what is missing and how to get it."""


class ReplayOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay."""

    file: str
    job: str
    into: ReplayTarget
    fingerprint_differences: list[str]
    """Differences between the program that captured and this one; empty where equal bytes are to be expected."""
    counts: OutputCounts
    recorded_s: float
    """Time between the first and the last replayed record, by the broker's clock."""
    wall_s: float
    num_records: int
    cut_off: str = ""
    """Reason why the file ends early."""

    @property
    def bytes_equal(self) -> bool:
        """Whether every output equals the recorded one byte for byte."""
        return not self.counts.num_different and not self.counts.num_agreeing

    def is_equal(self, *, strict: bool = False) -> bool:
        """Whether every recorded output was compared and is as promised.

        Promised are equal bytes where build and processor are the same; elsewhere equal decisions, and numbers that are
        equal to six digits. `strict` requires equal bytes everywhere, and a whole capture.
        """
        if self.counts.num_uncompared or (strict and self.cut_off):
            return False
        if self.fingerprint_differences and not strict:
            return not self.counts.num_different
        return self.bytes_equal


def replay(
    path: Path,
    into: ReplayTarget,
    *,
    policy_files: Sequence[Path] = (),
    collector: CollectorSettings | None = None,
    reward: RewardSettings | None = None,
    on_progress: Callable[[int, float], None] = lambda *_: None,
) -> ReplayOutcome:
    """Replay a capture into a service and compare its outputs with the recorded ones.

    Args:
        path: the capture.
        into: the service.
        policy_files: learned policies that are not in the package.
        collector: settings of the replayed collector.
        reward: settings of the replayed reward service.
        on_progress: called now and then with the records so far, and their seconds by the broker's clock.

    Raises:
        ReplayError: when the capture lacks what this replay needs.
        CaptureError: when the capture is damaged; the message names how far it is good.
        ValueError: when a policy file is invalid.
        OSError: when the capture cannot be read.
    """
    header, counts, begun_s = read_header(path), OutputCounts(), time.perf_counter()
    service: _Arbitrator | _Reward | _Collector
    if into == "arbitrator":
        service = _Arbitrator(path, counts, policy_files)
    elif into == "reward":
        service = _Reward(counts, reward or RewardSettings())
    else:
        service = _Collector(counts, collector or CollectorSettings())
    num_records, begun_ns, recorded_s, cut_off = 0, 0, 0.0, ""
    try:
        for record in records(path):
            begun_ns = begun_ns or record.timestamp_ns
            recorded_s = max(recorded_s, (record.timestamp_ns - begun_ns) / 1e9)
            if num_records % PROGRESS_EVERY == 0:
                on_progress(num_records, recorded_s)
            num_records += 1
            service.add_record(record)
    except CutOffError as error:
        cut_off = str(error)
    service.finish()
    if not counts.num_compared and not counts.num_different:
        reasons = "; ".join(counts.notes) or f"it has no output of the {into} together with its input"
        raise ReplayError(f"nothing in the capture can be compared: {reasons}")
    return ReplayOutcome(
        file=str(path),
        job=header.job,
        into=into,
        fingerprint_differences=differences(header.fingerprint, fingerprint()),
        counts=counts,
        recorded_s=recorded_s,
        wall_s=time.perf_counter() - begun_s,
        num_records=num_records,
        cut_off=cut_off,
    )


# --- collector and reward service: each output follows from one message ---------------------------------------------


class _Pairs:
    """Takes each output once from both sides, the replayed one first; by identity, since the order may differ."""

    def __init__(self, counts: OutputCounts) -> None:
        self._counts = counts
        self._unpaired: dict[str, tuple[str, bytes]] = {}
        """Subject and payload of replayed outputs, by identity."""
        self._paired: set[str] = set()
        self._first: WindowKey | None = None
        self._newest: WindowKey | None = None

    def finish(self) -> None:
        """Count the replayed outputs without a recorded one: missing, or at an edge of the capture."""
        for identity, (subject, _) in self._unpaired.items():
            key = window_key_of(identity)
            assert key is not None, "outputs of services are about a window"
            if (
                self._first is None
                or self._newest is None
                or not (self._first < key <= self._newest._replace(window=self._newest.window - EDGE_WINDOWS))
            ):
                self._counts.num_outside += 1
            else:
                self._counts.count_missing("only replayed", subject, key)

    def _add_replayed(self, *outputs: Message) -> None:
        """Add the outputs of one input: all, or none where a reader would not take one of them."""
        packed = [(codec.message_id(output), subjects.subject_of(output), encode(output)) for output in outputs]
        for output, (_, subject, payload) in zip(outputs, packed, strict=True):
            decode(type(output), subject, payload)
        self._unpaired |= {identity: (subject, payload) for identity, subject, payload in packed}

    def _add_recorded(self, record: Record) -> None:
        """Add a recorded output, after the replay of what it follows from."""
        identity, key = record.message_id, record.key
        if key is None:
            self._counts.add_note(f"{record.subject} at {record.sequence} is no output that a service can publish")
            return
        self._first = min(self._first or key, key)
        self._newest = max(self._newest or key, key)
        if (replayed := self._unpaired.pop(identity, None)) is not None:
            self._paired.add(identity)
            self._counts.count_pair(record, key, replayed[1])
        elif identity in self._paired:
            self._counts.num_repeated += 1
        elif key.window > 0 and key == self._first:  # the capture begins in the middle of this window
            self._counts.num_uncompared += 1
        else:
            self._counts.count_missing("only recorded", record.subject, key, record.sequence)


class _Reward(_Pairs):
    def __init__(self, counts: OutputCounts, settings: RewardSettings) -> None:
        super().__init__(counts)
        self._weights = settings

    def add_record(self, record: Record) -> None:
        if record.kind == "reward":
            self._add_recorded(record)
        elif record.kind == "window":
            formula = self._weights.formula
            with contextlib.suppress(MalformedMessageError, OverflowError):  # a dead letter
                window = decode(MetricWindow, record.subject, record.payload)
                self._add_replayed(reward_of(window, self._weights, None if formula == "auto" else formula))


class _Collector(_Pairs):
    """Makes the outputs of a report once its recorded window was read, which has the kernel's counters.

    A collector drops windows, never states, while its stream is full; what else it made of a report whose window was
    dropped cannot be made again, and is not compared.
    """

    def __init__(self, counts: OutputCounts, settings: CollectorSettings) -> None:
        super().__init__(counts)
        self._probe = settings.probe
        self._waiting: dict[str, list[Record]] = {}
        """Reports by node and window, with states and traces that came before the metric window."""

    def add_record(self, record: Record) -> None:
        """Keep a report and what the collector made of it until the metric window comes, then compare them all."""
        kind, node_window = record.kind, record.message_id.partition(":")[2]
        if kind == "report":
            self._waiting.setdefault(node_window, [record])
        elif kind in ("state", "trace") and node_window in self._waiting:
            self._waiting[node_window].append(record)
        elif kind in ("state", "trace"):
            self._add_recorded(record)
        elif kind == "window":
            report, *outputs = self._waiting.pop(node_window, [None])
            if report is not None:
                self._collect(report, record)
            for output in (record, *(one for one in outputs if one is not None)):
                self._add_recorded(output)

    def finish(self) -> None:
        """Count also the states and traces of windows that are not in the capture."""
        super().finish()
        self._counts.num_uncompared += sum(len(waiting) - 1 for waiting in self._waiting.values())

    def _collect(self, message: Record, recorded: Record) -> None:
        try:
            window = decode(MetricWindow, recorded.subject, recorded.payload)
        except MalformedMessageError as error:
            self._counts.add_note(f"the window at {recorded.sequence} cannot be decoded and is left out: {error}")
            return
        with contextlib.suppress(MalformedMessageError, OverflowError):  # a dead letter
            report = decode(Report, message.subject, message.payload)
            if report.simulated:
                made = simulated_window(report, self._probe)
            else:
                networks = {rank.rank: rank.network for rank in window.ranks if rank.network is not None}
                observed = Observation(  # the kernel's part; the node's metrics include the interval already
                    systems={rank.rank: rank.system for rank in window.ranks},
                    node=window.node_metrics,
                    network=Traffic(window.probe, networks, None, window.probe_note),
                    num_readings_lost=window.num_readings_lost,
                    refused_pids=window.refused_pids,
                )
                made = metric_window(report, observed)
            trace = trace_of(report)
            self._add_replayed(made, state_of(made), *(() if trace is None else (trace,)))


# --- arbitrator ------------------------------------------------------------------------------------------------------


class _Recorded(NamedTuple):
    """A record of ACTIONS."""

    record: Record
    action: Action | None
    """`None` when the record cannot be decoded."""

    @classmethod
    def of(cls, record: Record) -> Self:
        return cls(record, decode_or_none(Action, record.subject, record.payload))

    @property
    def generation(self) -> int:
        return -1 if self.action is None else self.action.generation


class _Arbitrator:
    """Decides one job as the recorded arbitrator did, generation by generation.

    A recorded action counts, whatever the fold decides: after a difference the fold continues from the recorded action,
    so that each window is compared by itself.

    A restart of the recorded arbitrator changes no decision, except after a gap: FEED had dropped states that the
    capture has. The recorded action has `gap` there, and the fold is started again without those states.
    """

    def __init__(self, path: Path, counts: OutputCounts, policy_files: Sequence[Path]) -> None:
        """Search the capture for where to begin.

        Raises:
            ReplayError: when it has no states, no specification for any of them, or no action to compare with.
            ValueError: when a policy file is invalid.
        """
        self._counts = counts
        self._files: list[bytes] = []
        """The content of learned policies."""
        for file in policy_files:
            try:
                self._files.append(read_regular(file))
            except OSError as error:
                raise ReplayError(f"cannot read the policy file {file}: {error.strerror}") from error
            PolicyFile.from_bytes(self._files[-1], str(file))
        jobs, start = _find_start(path)
        first_generation = 0 if start is None else start.generation
        self._jobs = {generation: job for generation, job in jobs.items() if generation >= first_generation}
        """The specifications of the generations to decide."""
        self._start = 0 if start is None else start.record.sequence
        """Sequence of the action to continue from."""
        self._actions = (_Recorded.of(record) for record in _until_cut(path) if record.stream == ACTIONS.name)
        """Actions of the capture, read ahead of the states; memory holds one."""
        self._following = next(self._actions, None)
        """The recorded action after the newest one that was compared; `None` at the end."""
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
        if self._start:
            counts.add_note(f"begins after the action at {self._start}: what was before is not in the capture")

    def add_record(self, record: Record) -> None:
        """Decide what a state makes possible; other messages count only as recorded actions and specifications."""
        state = decode_or_none(State, record.subject, record.payload) if record.kind == "state" else None
        if state is None:  # or a dead letter
            return
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
        """Count the recorded actions that the fold did not reach."""
        while self._following is not None:
            self._pass_over(self._following)

    def _open(self, generation: int) -> None:
        """Start a generation as the arbitrator does: from the newest action, with the policy that decided next."""
        while (found := self._following) is not None and (
            found.record.sequence <= self._start or (found.action is not None and found.generation < generation)
        ):
            self._pass_over(found)
        self._generation, self._fold = generation, None
        self._opened.add(generation)
        self._states.clear()
        self._num_after_last = 0
        decided = None
        if self._newest is not None and self._newest.generation == generation:
            decided = self._newest
        elif found is not None and found.generation == generation:
            decided = found.action
        job = self._jobs[generation]
        self._start_fold(job, self._policy(job, decided), b"" if decided is None else decided.profile)

    def _start_fold(self, job: Job, policy: Policy, profile: bytes = b"") -> Fold:
        self._fold = Fold(job, policy, self._newest, profile)
        self._has_begun = False
        return self._fold

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
        while (action := fold.close()) is not None:
            stored = self._stored(action)
            if stored is None:
                return
            fold.adopt(stored)
            if not self._num_after_last:  # what was never stored is no predecessor of a later generation's first action
                self._newest = stored
            while self._states and self._states[0][0] <= stored.watermark:
                self._states.popleft()

    def _stored(self, action: Action) -> Action | None:
        """The action that ACTIONS has at this place; `None` when the fold was started again instead."""
        found, fold = self._following, self._fold
        assert fold is not None, "it has decided"
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
            self._restart_without(fold, recorded)
            return None
        self._following = next(self._actions, None)
        if recorded is not None and _window_of(recorded) != _window_of(action):
            self._counts.count_missing("only replayed", record.subject, _window_of(action))
            self._counts.num_uncompared += 1
        elif self._counts.count_pair(record, _window_of(action), encode(action)):
            return action
        if recorded is None or not is_intact(record.payload):
            return action
        if recorded.generation == self._generation and recorded.policy_digest != digest_of(fold.policy):
            fold.policy = self._policy(fold.job, recorded)
        return recorded

    def _restart_without(self, fold: Fold, recorded: Action) -> None:
        """Start the fold again without the states up to the watermark of the action that was recorded next."""
        self._counts.add_note(f"the recorded arbitrator restarted after a gap, before window {recorded.window}")
        restarted = self._start_fold(fold.job, fold.policy)
        if restarted.next_window:
            restarted.start_after_gap(recorded.watermark)
        for sequence, state in list(self._states):
            if sequence > recorded.watermark:
                self._decide(sequence, state)

    def _pass_over(self, found: _Recorded) -> None:
        """Adopt a recorded action uncompared; it is missing where the fold refused to decide its generation."""
        self._following = next(self._actions, None)
        record, action = found
        if action is None or record.sequence <= self._start or action.generation not in self._opened:
            self._counts.num_uncompared += 1
        else:
            self._counts.count_missing("only recorded", record.subject, _window_of(action), record.sequence)
        if action is not None:
            self._newest = action

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
    """The first specification of each generation, and the action to continue from, if any.

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
            job = decode_or_none(Job, record.subject, record.payload)
            if job is not None and job.generation <= MAX_GENERATION:
                jobs.setdefault(job.generation, job)  # a capture of the past has it after the states
        elif start is None and feed_first and record.stream == ACTIONS.name:
            found = _Recorded.of(record)
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


def _window_of(action: Action) -> WindowKey:
    return WindowKey(action.generation, action.window)
