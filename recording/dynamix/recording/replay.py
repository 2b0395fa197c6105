"""Replay: give a capture's messages to the functions that the services call, and compare each output byte for byte.

    outcome = await replay(ReplayRequest(path, "arbitrator"))
    outcome.is_equal()

collector: reports in; metric windows, states and traces out. The kernel's counters come from the recorded windows.
reward: metric windows in, rewards out.
arbitrator: specifications and states in, actions out by the arbitrator's `Fold`, and `size-stuck` events.

No broker and no service process takes part. `decisions` has the arbitrator's part.
"""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from dynamix.collector.agent import Chooser, trace_of
from dynamix.collector.agent_network import AgentNetwork
from dynamix.collector.observation import CollectorSettings
from dynamix.collector.window import Observation, Traffic, metric_window, simulated_window
from dynamix.recording.capture import Record, WindowKey, differences, fingerprint, read_header
from dynamix.recording.capture.record import identity_of, kind_of, window_key_of
from dynamix.recording.comparison import OutputCounts, OutputPairing
from dynamix.recording.decisions import ArbitratorReplay, OtherPolicy, PolicyComparison
from dynamix.recording.playback import OnProgress, Player, ReplayError, Speed
from dynamix.reward.formula import reward_of
from dynamix.reward.service import RewardSettings
from dynamix.schemas import codec, subjects
from dynamix.schemas.codec import MalformedMessageError, decode, encode
from dynamix.schemas.features import state_of
from dynamix.schemas.messages import Message, MetricWindow, Report

ReplayTarget = Literal["collector", "reward", "arbitrator"]
READ_ON_WINDOWS = 3
"""Windows read after the last requested one: no rank is further ahead, since each window ends at a barrier."""


class ReplayRequest(NamedTuple):
    """A request: which capture to replay into which service."""

    path: Path
    into: ReplayTarget
    speed: Speed = "max"
    until: WindowKey | None = None
    """The last window."""
    other: OtherPolicy | None = None
    policy_files: tuple[Path, ...] = ()
    """Learned policies that are not in the package."""
    collector: CollectorSettings = CollectorSettings()
    reward: RewardSettings = RewardSettings()


class ReplayOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay."""

    file: str
    job: str
    into: ReplayTarget
    fingerprint_differences: list[str]
    """Differences between the program that captured and this one; empty where equal bytes are to be expected."""
    counts: OutputCounts
    recorded_s: float
    """From the first record to the last that was replayed, by the broker's clock."""
    wall_s: float
    num_records: int
    cut_off: str = ""
    """Why the file ends early."""
    interrupted: bool = False
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


async def replay(
    request: ReplayRequest, *, stop: asyncio.Event | None = None, on_progress: OnProgress | None = None
) -> ReplayOutcome:
    """Replay a capture into a service and compare its outputs with the recorded ones.

    Args:
        request: what to replay.
        stop: ends the replay at the next message; the outcome holds what was compared by then.
        on_progress: called with the player now and then.

    Raises:
        ReplayError: when the capture lacks what this replay needs.
        CaptureError: when the capture is damaged; the text names how far it is good.
        ValueError: when a policy file or the file of an agents' network is invalid.
        OSError: when the capture cannot be read.
    """
    header, counts = read_header(request.path), OutputCounts()
    player = Player(request.path, speed=request.speed, stop=stop or asyncio.Event(), on_progress=on_progress)
    begun_s, what_if = time.perf_counter(), None
    if request.into == "arbitrator":
        fold = ArbitratorReplay(
            request.path, counts, until=request.until, other=request.other, policy_files=request.policy_files
        )
        what_if = await fold.run(player)
    else:
        await _run_stateless(request, counts, player)
    outcome = ReplayOutcome(
        file=str(request.path),
        job=header.job,
        into=request.into,
        fingerprint_differences=differences(header.fingerprint, fingerprint()),
        counts=counts,
        recorded_s=player.recorded_s,
        wall_s=time.perf_counter() - begun_s,
        num_records=player.num_records,
        cut_off=player.cut_off,
        interrupted=player.stop.is_set(),
        what_if=what_if,
    )
    if outcome.interrupted:
        return outcome
    if request.other is not None and what_if is None:
        raise ReplayError(": ".join(["no window was decided by both policies", "; ".join(counts.notes)]))
    if request.other is None and not counts.num_compared and not counts.num_different:
        reasons = "; ".join(counts.notes) or f"it has no output of the {request.into} together with its input"
        raise ReplayError(f"nothing in the capture can be compared: {reasons}")
    return outcome


# --- collector and reward service: each output follows from one message ---------------------------------------------


async def _run_stateless(request: ReplayRequest, counts: OutputCounts, player: Player) -> None:
    pairing = OutputPairing(counts)
    service = _Reward(request, pairing) if request.into == "reward" else _Collector(request, pairing, counts)
    last = request.until
    async for record in player:
        if last is not None and (key := window_key_of(identity_of(record))) is not None and key > last:
            if key > last._replace(window=last.window + READ_ON_WINDOWS):
                break
            continue
        service.add_record(record)
    if not player.stop.is_set():
        pairing.finish()
        service.finish()


class _Reward:
    def __init__(self, request: ReplayRequest, pairing: OutputPairing) -> None:
        self._weights = request.reward
        self._pairing = pairing

    def add_record(self, record: Record) -> None:
        kind = kind_of(record)
        if kind == "reward":
            self._pairing.add_recorded(record)
        elif kind == "window":
            formula = self._weights.formula
            with contextlib.suppress(MalformedMessageError, OverflowError):  # a dead letter
                window = decode(MetricWindow, record.subject, record.payload)
                _add_outputs(self._pairing, reward_of(window, self._weights, None if formula == "auto" else formula))

    def finish(self) -> None:
        """Do nothing: no window waits."""


class _Collector:
    """Makes the outputs of a report once its recorded window was read, which has the kernel's counters.

    A collector drops windows, never states, while its stream is full; what else it made of a report whose window was
    dropped cannot be made again, and is not compared.
    """

    def __init__(self, request: ReplayRequest, pairing: OutputPairing, counts: OutputCounts) -> None:
        settings = request.collector
        self._probe = settings.probe
        self._choose: Chooser | None = AgentNetwork.read(Path(settings.agents)).factor if settings.agents else None
        self._pairing = pairing
        self._counts = counts
        self._waiting: dict[str, list[Record]] = {}
        """By node and window: the report, and its state and trace if they came before the window."""

    def add_record(self, record: Record) -> None:
        kind, node_window = kind_of(record), identity_of(record).partition(":")[2]
        if kind == "report":
            self._waiting.setdefault(node_window, [record])
        elif kind in ("state", "trace") and node_window in self._waiting:
            self._waiting[node_window].append(record)
        elif kind in ("state", "trace"):
            self._pairing.add_recorded(record)
        elif kind == "window":
            report, *outputs = self._waiting.pop(node_window, [None])
            if report is not None:
                self._collect(report, record)
            for output in (record, *(one for one in outputs if one is not None)):
                self._pairing.add_recorded(output)

    def finish(self) -> None:
        """Count the states and traces of windows that are not in the capture."""
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
            _add_outputs(self._pairing, made, state_of(made), *(() if trace is None else (trace,)))


def _add_outputs(pairing: OutputPairing, *outputs: Message) -> None:
    """Add the outputs of one input: all, or none where a reader would not take one of them."""
    packed = [(codec.message_id(output), subjects.subject_of(output), encode(output)) for output in outputs]
    for output, (_, subject, payload) in zip(outputs, packed, strict=True):
        decode(type(output), subject, payload)
    for parcel in packed:
        pairing.add_replayed(*parcel)


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
