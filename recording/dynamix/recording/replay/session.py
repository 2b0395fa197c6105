"""One replay: the service itself, run over a capture instead of a broker."""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import structlog
from structlog.stdlib import BoundLogger

from dynamix.arbitrator import service as arbitrator
from dynamix.collector import service as collector
from dynamix.collector.observation import CollectorSettings
from dynamix.recording.capture import WindowKey, differences, fingerprint, read_header
from dynamix.recording.comparison import OutputCounts, OutputPairing
from dynamix.recording.playback import OnProgress, RecordPlayer, ReplayError, Speed
from dynamix.reward import service as reward
from dynamix.reward.service import RewardSettings
from dynamix.runtime.bus import ServiceBus
from dynamix.runtime.service import Context
from dynamix.schemas.messages import Action

from .arbitrator.action_store import (
    ComparedActions,
    RecordedActions,
    RecordedRestartError,
    ReplayedActions,
    window_of,
)
from .arbitrator.bus import ArbitratorReplayBus
from .arbitrator.events import EventComparer
from .arbitrator.policy_files import ReplayPolicyFiles
from .arbitrator.start import StartPoint, find_start
from .arbitrator.what_if import OtherPolicy, PolicyComparer, PolicyComparison
from .stateless import CollectorTraffic, RewardTraffic, StatelessReplayBus, WindowLimit

S = TypeVar("S", bound=msgspec.Struct)
B = TypeVar("B", bound=ServiceBus)

ReplayTarget = Literal["collector", "reward", "arbitrator"]


class ReplayRequest(NamedTuple):
    """What to replay into which service."""

    path: Path
    into: ReplayTarget
    speed: Speed = "max"
    until: WindowKey | None = None
    """The last window."""
    other: OtherPolicy | None = None
    """The policy that decides instead of the recorded one."""
    policy_files: tuple[Path, ...] = ()
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
        """Whether every output says the same as the recorded one: decisions equal, numbers equal to six digits."""
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
        on_progress: called with the player after each batch of records.

    Raises:
        ReplayError: when the capture lacks what this replay needs.
        CaptureError: when the capture is damaged; the text names how far it is good.
        ValueError: when a policy file is invalid.
        OSError: when the capture cannot be read.
    """
    header = read_header(request.path)
    session = _ReplaySession(request, stop or asyncio.Event(), on_progress)
    begun_s = time.perf_counter()
    comparison = await session.run()
    player = session.player
    outcome = ReplayOutcome(
        file=str(request.path),
        job=header.job,
        into=request.into,
        fingerprint_differences=differences(header.fingerprint, fingerprint()),
        counts=session.counts,
        recorded_s=player.recorded_s,
        wall_s=time.perf_counter() - begun_s,
        num_records=player.num_records,
        cut_off=player.cut_off,
        interrupted=session.stop.is_set(),
        what_if=comparison,
    )
    if not outcome.interrupted:
        _check_compared(request, outcome)
    return outcome


def _check_compared(request: ReplayRequest, outcome: ReplayOutcome) -> None:
    counts = outcome.counts
    if request.other is not None and outcome.what_if is None:
        raise ReplayError(": ".join(["no window was decided by both policies", "; ".join(counts.notes)]))
    if request.other is None and not counts.num_compared and not counts.num_different:
        reasons = "; ".join(counts.notes) or f"it has no output of the {request.into} together with its input"
        raise ReplayError(f"nothing in the capture can be compared: {reasons}")


class _ReplaySession:
    """Sets a service up for one replay and runs it."""

    def __init__(self, request: ReplayRequest, stop: asyncio.Event, on_progress: OnProgress | None) -> None:
        self.stop = stop
        self.counts = OutputCounts()
        self.player = RecordPlayer(request.path, speed=request.speed, stop=stop, on_progress=on_progress)
        self._request = request

    async def run(self) -> PolicyComparison | None:
        """Run the service to the end of the capture."""
        if self._request.into != "arbitrator":
            await self._replay_stateless()
            return None
        start, other = find_start(self._request.path), self._request.other
        if other is not None:
            return await self._ask(other, start)
        await self._replay_arbitrator(start)
        return None

    async def _replay_stateless(self) -> None:
        pairing, limit = OutputPairing(self.counts), WindowLimit(self.player, self._request.until)
        if self._request.into == "collector":
            traffic = CollectorTraffic(limit, self.counts)
            bus = StatelessReplayBus(self.player, traffic, pairing)
            await collector.serve_observed(self._context(bus, self._request.collector), traffic, in_step=True)
            traffic.finish()
        else:
            bus = StatelessReplayBus(self.player, RewardTraffic(limit), pairing)
            await reward.serve(self._context(bus, self._request.reward))
        if not self.stop.is_set():
            pairing.finish()

    async def _replay_arbitrator(self, start: StartPoint) -> None:
        """Let the recorded policy decide, and compare."""
        checkpoint = 0 if start.checkpoint is None else start.checkpoint.record.sequence
        recorded = RecordedActions(self._request.path)
        actions = ComparedActions(recorded, self.counts, lambda action: self._on_stored(bus, action))
        events = EventComparer(self.counts)
        policies = ReplayPolicyFiles(self._request.policy_files, actions)
        bus = ArbitratorReplayBus(self.player, start, actions, policies=policies, events=events)
        if checkpoint:
            self.counts.add_note(f"begins after the action at {checkpoint}: what was before is not in the capture")
            await bus.play_to_action(checkpoint)
        await self._decide(bus, actions)
        if self.stop.is_set():
            return
        actions.finish(self._request.until)
        if self._request.until is None:
            events.finish()

    async def _ask(self, other: OtherPolicy, start: StartPoint) -> PolicyComparison | None:
        """Let another policy decide, and put its decisions beside the recorded ones."""
        comparer = PolicyComparer(RecordedActions(self._request.path))
        checkpoint = None if start.checkpoint is None else start.checkpoint.action

        def on_stored(action: Action) -> None:
            comparer.add_decision(action)
            self._on_stored(bus, action)

        actions = ReplayedActions(on_stored)
        policies, events = ReplayPolicyFiles(self._request.policy_files, actions), EventComparer(OutputCounts())
        bus = ArbitratorReplayBus(
            *(self.player, start, actions),
            policies=policies,
            events=events,
            change=lambda job: other.specification(job, checkpoint),
        )
        await self._decide(bus, actions)
        return comparer.comparison()

    def _on_stored(self, bus: ArbitratorReplayBus, action: Action) -> None:
        bus.forget_states(action.watermark)
        if self._request.until is not None and window_of(action) >= self._request.until:
            bus.end()

    async def _decide(self, bus: ArbitratorReplayBus, actions: ReplayedActions) -> None:
        """Run the arbitrator, and again wherever the recorded one was restarted after a gap."""

        def on_error(event: Mapping[str, Any]) -> None:
            actions.halted.add(event["generation"])
            self.counts.add_note(f"generation {event['generation']} is not decided any more: {event['reason']}")

        context = self._context(bus, arbitrator.ArbitratorSettings(), on_error)
        while True:
            try:
                return await arbitrator.serve(context, in_step=True)
            except RecordedRestartError as restart:
                self.counts.add_note(f"the recorded arbitrator {restart}")
                bus.lose_feed(actions.lost_until)

    def _context(
        self, bus: B, settings: S, on_error: Callable[[Mapping[str, Any]], None] | None = None
    ) -> Context[S, B]:
        return Context(
            service=self._request.into,
            instance="replay",
            node="replay",
            bus=bus,
            settings=settings,
            stop=self.stop,
            log=_silent_logger(on_error),
        )


def _silent_logger(on_error: Callable[[Mapping[str, Any]], None] | None) -> BoundLogger:
    """A logger that drops all events; `on_error` gets those that end the decisions for a generation."""

    def drop(_: Any, method: str, event: Any) -> Any:
        if method == "error" and on_error is not None and "generation" in event and "reason" in event:
            on_error(event)
        raise structlog.DropEvent

    logger: BoundLogger = structlog.wrap_logger(structlog.ReturnLogger(), processors=[drop], wrapper_class=BoundLogger)
    return logger
