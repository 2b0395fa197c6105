"""Replay: give a capture's messages to the functions that the services call, and compare each output byte for byte.

    outcome = replay(path, "arbitrator")
    outcome.is_equal()

collector: reports in; metric windows, states and traces out. The kernel's counters come from the recorded windows.
reward: metric windows in, rewards out.
arbitrator: specifications and states in, actions out by the arbitrator's `Fold`.

No broker and no service process takes part. `decisions` has the arbitrator's part.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from dynamix.collector.agent import AgentNetwork, Chooser, trace_of
from dynamix.collector.observation import CollectorSettings
from dynamix.collector.window import Observation, Traffic, metric_window, simulated_window
from dynamix.recording.capture import CutOffError, Record, WindowKey, read_header, records, window_key_of
from dynamix.recording.comparison import EDGE_WINDOWS, OutputCounts
from dynamix.recording.decisions import ArbitratorReplay, OtherPolicy, PolicyComparison, ReplayError
from dynamix.recording.fingerprint import differences, fingerprint
from dynamix.reward.formula import reward_of
from dynamix.reward.service import RewardSettings
from dynamix.schemas import codec, subjects
from dynamix.schemas.codec import MalformedMessageError, decode, encode
from dynamix.schemas.features import state_of
from dynamix.schemas.messages import Message, MetricWindow, Report

ReplayTarget = Literal["collector", "reward", "arbitrator"]
PROGRESS_EVERY = 512
"""Records between two reports of progress."""
READ_ON_WINDOWS = 3
"""Windows read after the last requested one: no rank is further ahead, since each window ends at a barrier."""


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
    what_if: PolicyComparison | None = None

    @property
    def bytes_equal(self) -> bool:
        """Whether every output equals the recorded one byte for byte."""
        return not self.counts.num_different and not self.counts.num_agreeing

    @property
    def decisions_equal(self) -> bool:
        """Whether decisions are equal, and numbers are equal to six digits."""
        return not self.counts.num_different

    def is_equal(self, *, strict: bool = False) -> bool:
        """Whether every recorded output was compared and is as promised.

        Promised are equal bytes where build and processor are the same; elsewhere equal decisions. `strict` requires
        equal bytes everywhere, and a whole capture.
        """
        if self.counts.num_uncompared or (strict and self.cut_off):
            return False
        return self.decisions_equal if self.fingerprint_differences and not strict else self.bytes_equal


def replay(
    path: Path,
    into: ReplayTarget,
    *,
    until: WindowKey | None = None,
    other: OtherPolicy | None = None,
    policy_files: Sequence[Path] = (),
    collector: CollectorSettings | None = None,
    reward: RewardSettings | None = None,
    on_progress: Callable[[int, float], None] = lambda *_: None,
) -> ReplayOutcome:
    """Replay a capture into a service and compare its outputs with the recorded ones.

    Args:
        path: the capture.
        into: the service.
        until: the last window.
        other: a policy that decides instead of the recorded one.
        policy_files: learned policies that are not in the package.
        collector: settings of the replayed collector.
        reward: settings of the replayed reward service.
        on_progress: called now and then with the records so far, and their seconds by the broker's clock.

    Raises:
        ReplayError: when the capture lacks what this replay needs.
        CaptureError: when the capture is damaged; the message names how far it is good.
        ValueError: when a policy file or the file of an agents' network is invalid.
        OSError: when the capture cannot be read.
    """
    header, counts, begun_s = read_header(path), OutputCounts(), time.perf_counter()
    service: ArbitratorReplay | _Reward | _Collector
    if into == "arbitrator":
        service = ArbitratorReplay(path, counts, until=until, other=other, policy_files=policy_files)
    elif into == "reward":
        service = _Reward(counts, until, reward or RewardSettings())
    else:
        service = _Collector(counts, until, collector or CollectorSettings())
    num_records, begun_ns, recorded_s, cut_off = 0, 0, 0.0, ""
    try:
        for record in records(path):
            begun_ns = begun_ns or record.timestamp_ns
            recorded_s = max(recorded_s, (record.timestamp_ns - begun_ns) / 1e9)
            if num_records % PROGRESS_EVERY == 0:
                on_progress(num_records, recorded_s)
            num_records += 1
            service.add_record(record)
            if service.is_over:
                break
    except CutOffError as error:
        cut_off = str(error)
    service.finish()
    what_if = service.comparison() if isinstance(service, ArbitratorReplay) else None
    if other is not None and what_if is None:
        raise ReplayError(": ".join(["no window was decided by both policies", "; ".join(counts.notes)]))
    if other is None and not counts.num_compared and not counts.num_different:
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
        what_if=what_if,
    )


# --- collector and reward service: each output follows from one message ---------------------------------------------


class _Service:
    """Takes each output once from both sides, the replayed one first; by identity, since the order may differ."""

    def __init__(self, counts: OutputCounts, until: WindowKey | None) -> None:
        self._until = until
        self._counts = counts
        self._unpaired: dict[str, tuple[str, bytes]] = {}
        """Subject and payload of replayed outputs, by identity."""
        self._paired: set[str] = set()
        self._first: WindowKey | None = None
        self._newest: WindowKey | None = None
        self.is_over = False

    def add_record(self, record: Record) -> None:
        """Make the outputs that follow from a record, and compare it if it is one."""
        if self._until is not None and (key := record.key) is not None and key > self._until:
            self.is_over = key > self._until._replace(window=self._until.window + READ_ON_WINDOWS)
        else:
            self._add(record)

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

    def _add(self, record: Record) -> None:
        raise NotImplementedError

    def _add_replayed(self, *outputs: Message) -> None:
        """Add the outputs of one input: all, or none where a reader would not take one of them."""
        packed = [(codec.message_id(output), subjects.subject_of(output), encode(output)) for output in outputs]
        for output, (_, subject, payload) in zip(outputs, packed, strict=True):
            decode(type(output), subject, payload)
        self._unpaired |= {identity: (subject, payload) for identity, subject, payload in packed}

    def _add_recorded(self, record: Record) -> None:
        """Add a recorded output, after the replay of what it follows from."""
        identity, key = record.identity, record.key
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


class _Reward(_Service):
    def __init__(self, counts: OutputCounts, until: WindowKey | None, settings: RewardSettings) -> None:
        super().__init__(counts, until)
        self._weights = settings

    def _add(self, record: Record) -> None:
        kind = record.kind
        if kind == "reward":
            self._add_recorded(record)
        elif kind == "window":
            formula = self._weights.formula
            with contextlib.suppress(MalformedMessageError, OverflowError):  # a dead letter
                window = decode(MetricWindow, record.subject, record.payload)
                self._add_replayed(reward_of(window, self._weights, None if formula == "auto" else formula))


class _Collector(_Service):
    """Makes the outputs of a report once its recorded window was read, which has the kernel's counters.

    A collector drops windows, never states, while its stream is full; what else it made of a report whose window was
    dropped cannot be made again, and is not compared.
    """

    def __init__(self, counts: OutputCounts, until: WindowKey | None, settings: CollectorSettings) -> None:
        super().__init__(counts, until)
        self._probe = settings.probe
        self._choose: Chooser | None = AgentNetwork.read(Path(settings.agents)).factor if settings.agents else None
        self._waiting: dict[str, list[Record]] = {}
        """Reports by node and window, with states and traces that came before the metric window."""

    def _add(self, record: Record) -> None:
        kind, node_window = record.kind, record.identity.partition(":")[2]
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
                made = metric_window(report, observation_in(window))
            trace = trace_of(report, self._choose)
            self._add_replayed(made, state_of(made), *(() if trace is None else (trace,)))


def observation_in(window: MetricWindow) -> Observation:
    """Extract the kernel's part of a metric window; the node's metrics include the interval already."""
    by_rank = {rank.rank: rank.network for rank in window.ranks if rank.network is not None}
    return Observation(
        systems={rank.rank: rank.system for rank in window.ranks},
        node=window.node_metrics,
        network=Traffic(window.probe, by_rank, None, window.probe_note),
        num_readings_lost=window.num_readings_lost,
        refused_pids=window.refused_pids,
    )
