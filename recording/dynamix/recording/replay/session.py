"""One replay: the service itself, over a capture instead of a bus."""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import structlog
from structlog.stdlib import BoundLogger

from dynamix.arbitrator import service as arbitrator
from dynamix.arbitrator.settings import ArbitratorSettings
from dynamix.collector import service as collector
from dynamix.collector.settings import CollectorSettings
from dynamix.recording.capture import differences, fingerprint, read_header
from dynamix.reward import service as reward
from dynamix.reward.settings import RewardSettings
from dynamix.runtime.bus.service_bus import ServiceBus
from dynamix.runtime.service import Context
from dynamix.schemas.messages import Action

from .action_store import Book, ComparedBook, FreeBook
from .bus import ReplayBus
from .counts import Tally
from .errors import RecordedRestartError, ReplayError
from .events import Events
from .pairing import Pairing
from .plan import Plan, plan
from .player import OnProgress, Speed, Tape
from .policies import PolicyFiles
from .position import Place
from .recorded import RecordedActions
from .stateless import Reports, Until, Windows
from .streams import StreamsBus
from .what_if import Beside, Comparison, OtherPolicy, changes

S = TypeVar("S", bound=msgspec.Struct)
B = TypeVar("B", bound=ServiceBus)

Into = Literal["collector", "reward", "arbitrator"]


class Replay(NamedTuple):
    """What is asked for."""

    path: Path
    into: Into
    speed: Speed = "max"
    until: Place | None = None
    """The last window."""
    other: OtherPolicy | None = None
    """Who shall decide instead of the recorded policy."""
    policy_files: tuple[Path, ...] = ()
    collector: CollectorSettings = CollectorSettings()
    reward: RewardSettings = RewardSettings()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    file: str
    job: str
    into: Into
    fingerprint_differences: list[str]
    """What differs between the program that captured and this one; empty where equal bytes are to be expected."""
    tally: Tally
    recorded_s: float
    """From the first record to the last that was replayed, by the broker's clock."""
    wall_s: float
    num_records: int
    cut_off: str = ""
    """Why the file ends early."""
    interrupted: bool = False
    what_if: Comparison | None = None

    @property
    def bytes_equal(self) -> bool:
        """Whether every output is byte for byte the recorded one."""
        return not self.tally.num_different and not self.tally.num_agreeing

    @property
    def decisions_equal(self) -> bool:
        """Whether every output says the same as the recorded one: decisions equal, numbers equal to six digits."""
        return not self.tally.num_different

    @property
    def is_as_promised(self) -> bool:
        """Equal bytes where build and processor are the same; elsewhere equal decisions."""
        return self.decisions_equal if self.fingerprint_differences else self.bytes_equal


async def replay(asked: Replay, *, stop: asyncio.Event | None = None, on_progress: OnProgress | None = None) -> Outcome:
    """Replay a capture into a service.

    Args:
        asked: what into what.
        stop: ends the replay at the next message; what was compared so far is the outcome.
        on_progress: called with the tape as it plays.

    Raises:
        ReplayError: when the capture has not what this takes.
        CaptureError: when it is damaged; how far it is good, the text says.
        ValueError: when a policy file is none.
        OSError: when the capture cannot be read.
    """
    header = read_header(asked.path)
    stage = _Stage(asked, stop or asyncio.Event(), on_progress)
    begun_s = time.perf_counter()
    comparison = await stage.play()
    tape, tally = stage.tape, stage.tally
    outcome = Outcome(
        file=str(asked.path),
        job=header.job,
        into=asked.into,
        fingerprint_differences=differences(header.fingerprint, fingerprint()),
        tally=tally,
        recorded_s=tape.recorded_s,
        wall_s=time.perf_counter() - begun_s,
        num_records=tape.num_records,
        cut_off=tape.cut_off,
        interrupted=stage.stop.is_set(),
        what_if=comparison,
    )
    if not outcome.interrupted:
        _check_compared(asked, outcome)
    return outcome


def _check_compared(asked: Replay, outcome: Outcome) -> None:
    tally = outcome.tally
    if asked.other is not None and outcome.what_if is None:
        raise ReplayError(" ".join(["no window was decided by both policies", *tally.notes]))
    if asked.other is None and not tally.num_compared and not tally.num_different:
        reasons = "; ".join(tally.notes) or f"it has no output of the {asked.into} whose input it has, too"
        raise ReplayError(f"nothing in the capture can be compared: {reasons}")


class _Stage:
    """Sets a service up for one replay."""

    def __init__(self, asked: Replay, stop: asyncio.Event, on_progress: OnProgress | None) -> None:
        self.stop = stop
        self.tally = Tally()
        self.tape = Tape(asked.path, speed=asked.speed, stop=stop, on_progress=on_progress)
        self._asked = asked

    async def play(self) -> Comparison | None:
        """Run the service to the end of the capture."""
        match self._asked.into:
            case "collector":
                await self._collector()
            case "reward":
                await self._reward()
            case "arbitrator":
                return await self._arbitrator()
        return None

    async def _collector(self) -> None:
        reports = Reports(Until(self.tape, self._asked.until), self.tally)
        pairing = Pairing(self.tally)
        bus = ReplayBus(self.tape, reports, pairing)
        await collector.serve_observed(self._context(bus, self._asked.collector), reports)
        reports.finish()
        self._finish(pairing)

    async def _reward(self) -> None:
        pairing = Pairing(self.tally)
        bus = ReplayBus(self.tape, Windows(Until(self.tape, self._asked.until)), pairing)
        await reward.serve(self._context(bus, self._asked.reward))
        self._finish(pairing)

    def _finish(self, pairing: Pairing) -> None:
        if not self.stop.is_set():
            pairing.finish()

    async def _arbitrator(self) -> Comparison | None:
        begins = plan(self._asked.path)
        return await (self._recorded_policy(begins) if self._asked.other is None else self._other_policy(begins))

    async def _recorded_policy(self, begins: Plan) -> None:
        checkpoint = 0 if begins.checkpoint is None else begins.checkpoint.record.sequence
        recorded = RecordedActions(self._asked.path, behind=checkpoint)
        book = ComparedBook(recorded, self.tally, lambda action: self._stored(bus, action))
        bus = self._streams(begins, book, Events(self.tally))
        if checkpoint:
            self.tally.note(f"begins behind the action at {checkpoint}: what was before is not in the capture")
            await bus.skip_to(checkpoint)
        await self._decide(bus, book, lambda: bus.lose(book.lost_until))
        if self.stop.is_set():
            return
        book.finish(self._asked.until)
        if self._asked.until is None:
            bus.finish()

    async def _other_policy(self, begins: Plan) -> Comparison | None:
        assert self._asked.other is not None, "asked for another"
        beside = Beside(RecordedActions(self._asked.path))

        def stored(action: Action) -> None:
            beside.add(action)
            self._stored(bus, action)

        book = FreeBook(stored)
        bus = self._streams(begins, book, Events(Tally()), changes(self._asked.other, begins.checkpoint))
        await self._decide(bus, book, lambda: None)
        return beside.comparison()

    def _streams(self, begins: Plan, book: Book, events: Events, change: Any = None) -> StreamsBus:
        policies = PolicyFiles(self._asked.policy_files)
        return StreamsBus(self.tape, begins, book, policies=policies, events=events, change=change)

    def _stored(self, bus: StreamsBus, action: Action) -> None:
        bus.forget(action.watermark)
        until = self._asked.until
        if until is not None and (action.generation, action.window) >= until:
            bus.end()

    async def _decide(self, bus: StreamsBus, book: Book, on_restart: Callable[[], None]) -> None:
        """Run the arbitrator, and again wherever the recorded one was started again behind a gap."""

        def on_error(event: Mapping[str, Any]) -> None:
            book.halted.add(event["generation"])
            self.tally.note(f"generation {event['generation']} is not decided any more: {event['reason']}")

        context = self._context(bus, ArbitratorSettings(), on_error)
        while True:
            try:
                return await arbitrator.serve(context)
            except RecordedRestartError as restart:
                self.tally.note(f"the recorded arbitrator {restart}")
                on_restart()

    def _context(
        self, bus: B, settings: S, on_error: Callable[[Mapping[str, Any]], None] | None = None
    ) -> Context[S, B]:
        return Context(
            service=self._asked.into,
            instance="replay",
            node="replay",
            bus=bus,
            settings=settings,
            stop=self.stop,
            log=_quiet(on_error),
        )


def _quiet(on_error: Callable[[Mapping[str, Any]], None] | None) -> BoundLogger:
    """A log that only tells what ends the decisions for a job; a replay shows its findings otherwise."""

    def drop(_: Any, method: str, event: Any) -> Any:
        if method == "error" and on_error is not None and "generation" in event and "reason" in event:
            on_error(event)
        raise structlog.DropEvent

    logger: BoundLogger = structlog.wrap_logger(structlog.ReturnLogger(), processors=[drop], wrapper_class=BoundLogger)
    return logger
