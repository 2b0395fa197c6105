"""Replay: give a capture's messages to the functions that the services call, and compare each output byte for byte.

    outcome = replay(path, "arbitrator")
    outcome.is_equal()

collector: reports in; metric windows, states and traces out. The kernel's counters come from the recorded windows.
reward: metric windows in, rewards out.
arbitrator: specifications and states in, actions out by the arbitrator's `Fold`.

No broker and no service process takes part. `agree` defines what counts as the same decision or the same number.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.deciding.job_log import reason_of
from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.arbitrator.learned.policy_file import PolicyFile, shipped_policy
from dynamix.arbitrator.learned.policy_store import read_policy_file
from dynamix.arbitrator.policies.policy import MISTAKES, NamedPolicy, Policy, digest_of
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.collector.agent import trace_of
from dynamix.collector.observation import CollectorSettings
from dynamix.collector.window import Observation, Traffic, WantedProbe, metric_window, simulated_window
from dynamix.reward.formula import reward_of
from dynamix.reward.service import RewardSettings
from dynamix.schemas import subjects
from dynamix.schemas.chain import is_intact
from dynamix.schemas.codec import MalformedMessageError, Parcel, decode, decode_any, decode_or_none, encode, parcel_of
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
    """Fields that differ, recorded and replayed, by path."""

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
                sides.append(decode_any(record.subject, payload))
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

    def is_equal(self) -> bool:
        """Whether every recorded output was compared and is as promised.

        Promised are equal bytes where build and processor are the same; elsewhere equal decisions, and numbers that are
        equal to six digits.
        """
        is_promised = not self.counts.num_different if self.fingerprint_differences else self.bytes_equal
        return is_promised and not self.counts.num_uncompared


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
    num_records, recorded_s, cut_off = 0, 0.0, ""

    def played() -> Iterator[Record]:
        """The records up to the end, or to where the file is cut off."""
        nonlocal num_records, recorded_s, cut_off
        begun_ns = 0
        try:
            for record in records(path):
                begun_ns = begun_ns or record.timestamp_ns
                recorded_s = max(recorded_s, (record.timestamp_ns - begun_ns) / 1e9)
                if num_records % PROGRESS_EVERY == 0:
                    on_progress(num_records, recorded_s)
                num_records += 1
                yield record
        except CutOffError as error:
            cut_off = str(error)

    if into == "arbitrator":
        _Arbitrator(path, counts, policy_files).decide(played())
    elif into == "reward":
        _compare(_rewarded(played(), reward or RewardSettings()), counts)
    else:
        _compare(_collected(played(), (collector or CollectorSettings()).probe, counts), counts)
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

Step = tuple[list[Parcel], list[Record]]
"""Outputs that follow from one input, and recorded ones that follow from it or from earlier ones."""


def _rewarded(played: Iterable[Record], settings: RewardSettings) -> Iterator[Step]:
    for record in played:
        if record.kind == "reward":
            yield [], [record]
        elif record.kind == "window":
            formula = None if settings.formula == "auto" else settings.formula
            with contextlib.suppress(MalformedMessageError, OverflowError):  # a dead letter
                window = decode(MetricWindow, record.subject, record.payload)
                yield [parcel_of(reward_of(window, settings, formula))], []


def _collected(played: Iterable[Record], probe: WantedProbe, counts: OutputCounts) -> Iterator[Step]:
    """The outputs of a report are made once its recorded window was read, which has the kernel's counters.

    A collector drops windows, never states, while its stream is full; what else it made of a report whose window was
    dropped cannot be made again, and is not compared.
    """
    waiting: dict[str, list[Record]] = {}
    """Reports by node and window, with states and traces that came before the metric window."""
    for record in played:
        kind, place = record.kind, record.message_id.partition(":")[2]
        if kind == "report":
            waiting.setdefault(place, [record])
        elif kind == "window":
            before = waiting.pop(place, [])
            made = _observed(before[0], record, probe, counts) if before else []
            yield made, [record, *before[1:]]
        elif kind in ("state", "trace"):
            if place in waiting:
                waiting[place].append(record)
            else:
                yield [], [record]
    counts.num_uncompared += sum(len(before) - 1 for before in waiting.values())


def _observed(message: Record, recorded: Record, probe: WantedProbe, counts: OutputCounts) -> list[Parcel]:
    """The outputs of a report, with what the kernel showed then."""
    try:
        window = decode(MetricWindow, recorded.subject, recorded.payload)
    except MalformedMessageError as error:
        counts.add_note(f"the window at {recorded.sequence} cannot be decoded and is left out: {error}")
        return []
    with contextlib.suppress(MalformedMessageError, OverflowError):  # a dead letter
        report = decode(Report, message.subject, message.payload)
        if report.simulated:
            made = simulated_window(report, probe)
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
        return [parcel_of(each) for each in (made, state_of(made), trace) if each is not None]
    return []


def _compare(steps: Iterable[Step], counts: OutputCounts) -> None:
    """Take each output once from both sides, by identity, since the order may differ."""
    unpaired: dict[str, Parcel] = {}
    paired: set[str] = set()
    first = newest = None
    for made, recorded in steps:
        unpaired |= {output.message_id: output for output in made}
        for record in recorded:
            identity, key = record.message_id, record.key
            if key is None:
                counts.add_note(f"{record.subject} at {record.sequence} is no output that a service can publish")
                continue
            first, newest = min(first or key, key), max(newest or key, key)
            if (output := unpaired.pop(identity, None)) is not None:
                paired.add(identity)
                counts.count_pair(record, key, output.payload)
            elif identity in paired:
                counts.num_repeated += 1
            elif key.window > 0 and key == first:  # the capture begins in the middle of this window
                counts.num_uncompared += 1
            else:
                counts.count_missing("only recorded", record.subject, key, record.sequence)
    for identity, output in unpaired.items():  # missing, or at an edge of the capture
        key = window_key_of(identity)
        assert key is not None, "outputs of services are about a window"
        if first and newest and first < key <= newest._replace(window=newest.window - EDGE_WINDOWS):
            counts.count_missing("only replayed", output.subject, key)
        else:
            counts.num_outside += 1


# --- arbitrator ------------------------------------------------------------------------------------------------------


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
        self._files = [read_policy_file(file) for file in policy_files]
        self._jobs, self._actions, start = _read_ahead(path)
        """The specifications of the generations to decide, and the recorded actions that were not compared yet."""
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
        if start:
            counts.add_note(f"begins after the action at {start}: what was before is not in the capture")
        while self._actions and self._actions[0][0].sequence <= start:
            self._pass_over()

    def decide(self, played: Iterable[Record]) -> None:
        """Decide what the states make possible; other messages count only as recorded actions and specifications."""
        for record in played:
            state = decode_or_none(State, record.subject, record.payload) if record.kind == "state" else None
            if state is None:  # or a dead letter
                continue
            try:
                if state.generation > self._generation and state.generation in self._jobs:
                    self._open(state.generation)
                if state.generation == self._generation and self._fold is not None:
                    self._states.append((record.sequence, state))
                    self._decide(record.sequence, state)
            except MISTAKES as error:
                self._fold = None
                self._counts.add_note(f"generation {self._generation} is not decided any more: {reason_of(error)[0]}")
        while self._actions:  # what the fold did not reach
            self._pass_over()

    def _open(self, generation: int) -> None:
        """Start a generation as the arbitrator does: from the newest action, with the policy that decided next."""
        while self._actions and (before := self._actions[0][1]) is not None and before.generation < generation:
            self._pass_over()
        self._generation, self._fold = generation, None
        self._opened.add(generation)
        self._states.clear()
        self._num_after_last = 0
        known = (self._newest, self._actions[0][1] if self._actions else None)
        decided = next((each for each in known if each is not None and each.generation == generation), None)
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
        fold = self._fold
        assert fold is not None, "it has decided"
        record, recorded = self._actions[0] if self._actions else (None, None)
        # the capture ends first, or the job was restarted
        if record is None or (recorded is not None and recorded.generation > action.generation):
            self._num_after_last += 1
            if self._num_after_last > EDGE_WINDOWS:
                self._counts.count_missing("only replayed", subjects.subject_of(action), _window_of(action))
            else:
                self._counts.num_outside += 1
            return action
        if recorded is not None and recorded.gap and not action.gap and self._restarted_at != record.sequence:
            self._restarted_at = record.sequence  # once: if that does not help, it is a difference
            self._restart_without(fold, recorded)
            return None
        self._actions.popleft()
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

    def _pass_over(self) -> None:
        """Adopt a recorded action uncompared; it is missing where the fold refused to decide its generation."""
        record, action = self._actions.popleft()
        if action is None or action.generation not in self._opened:
            self._counts.num_uncompared += 1
        else:
            self._counts.count_missing("only recorded", record.subject, _window_of(action), record.sequence)
        self._newest = action or self._newest

    def _policy(self, job: Job, decided: Action | None) -> Policy:
        """The policy that a specification names; in the version of the file that decided an action.

        Raises:
            ReplayError: when that file is not given.
            ValueError: when there is no such policy, or it lacks an option of the job.
        """
        digest = decided.policy_digest.hex() if decided is not None and decided.policy == job.policy else ""
        shipped = shipped_policy(job.policy)
        files = [*self._files, *(() if shipped is None else (PolicyFile.from_bytes(shipped),))]
        fitting = (each for each in files if (each.digest == digest if digest else each.metadata.policy == job.policy))
        file = next(fitting, None)
        if file is not None:
            version = decided.policy_version if decided is not None and digest else 1
            policy: NamedPolicy = LearnedPolicy(file, name=job.policy, version=version)
        elif decided is not None and digest:
            raise ReplayError(
                f"version {decided.policy_version} of policy {job.policy!r} decided here, but its file (SHA-256 "
                f"{digest[:16]}...) is not given: get it from the bus with `dynamix policy export` and give it with "
                "--policy-file"
            )
        else:
            policy = policy_named(job.policy)
        check_options(policy.name, policy.options, job.policy_options)
        return policy


def _read_ahead(path: Path) -> tuple[dict[int, Job], deque[tuple[Record, Action | None]], int]:
    """The first specification of each generation to decide, all actions, and the sequence of the one to begin after.

    An action is a checkpoint: the states after its watermark are all that later decisions need. `None` stands for one
    that cannot be decoded; 0: the job's first action is there with its inputs.
    """
    jobs: dict[int, Job] = {}
    actions: deque[tuple[Record, Action | None]] = deque()
    generations: set[int] = set()
    feed_first, start, first = 0, 0, None
    with contextlib.suppress(CutOffError):  # the player reports it
        for record in records(path):
            if record.stream == FEED.name:
                feed_first = feed_first or record.sequence
                if record.kind == "state" and (key := record.key) is not None:
                    generations.add(key.generation)
            elif record.stream == JOBS.name:
                job = decode_or_none(Job, record.subject, record.payload)
                if job is not None and job.generation <= MAX_GENERATION:
                    jobs.setdefault(job.generation, job)  # a capture of the past has it after the states
            elif record.stream == ACTIONS.name:
                action = decode_or_none(Action, record.subject, record.payload)
                actions.append((record, action))
                if first is None and action is not None and feed_first and feed_first <= action.watermark + 1:
                    first, start = action, record.sequence if action.previous_hash else 0
    if not generations & jobs.keys():
        what = "the capture has no specification of the job together with its states"
        raise ReplayError(f"{what}: begin the next one while the job runs")
    if first is None:
        raise ReplayError("the capture has no action of the job together with its inputs: nothing can be compared")
    begun = first.generation if start else 0
    return {generation: job for generation, job in jobs.items() if generation >= begun}, actions, start


def _window_of(action: Action) -> WindowKey:
    return WindowKey(action.generation, action.window)
