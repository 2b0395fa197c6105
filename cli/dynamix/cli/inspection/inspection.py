"""What a capture holds, folded from its records, and the same as a JSON document. Pure but for reading the file."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from dynamix.cli.output import Document, document_of
from dynamix.recording.capture import (
    CaptureEnd,
    CaptureHeader,
    CaptureReader,
    Fingerprint,
    Record,
    differences,
)
from dynamix.schemas import subjects
from dynamix.schemas.chain import BrokenChainError, ChainCheck
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Action, Applied, Event, Job, MetricWindow, Report, Reward, State

from .window import CapturedWindow

MOST_MISSING = 1000
"""At most so many absent windows in a row are listed, since a malformed message may name any number."""


class Inspection(msgspec.Struct):
    """A captured job: everything that tables, JSON and figure show."""

    header: CaptureHeader
    keep_details: bool = False
    """Keep metrics and rewards of every rank."""
    end: CaptureEnd | None = None
    """`None` where the capture is cut off."""
    faults: list[str] = []
    """What is wrong with the file: damaged blocks, and where it is cut off."""
    num_records: int = 0
    num_payload_bytes: int = 0
    kinds: Counter[str] = msgspec.field(default_factory=Counter)
    """Messages by kind."""
    malformed: list[tuple[str, str]] = []
    """Subject and reason of messages that cannot be decoded."""
    jobs: list[Job] = []
    windows: dict[tuple[int, int], CapturedWindow] = {}
    """By generation and window."""
    events: list[Event] = []
    chain: ChainCheck = msgspec.field(default_factory=ChainCheck)
    chain_fault: str = ""
    """What is wrong with the first action that breaks the chain, empty without one."""
    first_ns: int = 0
    """When the broker stored the first message, 0 without one."""
    last_ns: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether the file is whole, and every message in it can be used."""
        return not (self.faults or self.malformed or self.chain_fault)

    @property
    def nodes(self) -> dict[int, set[str]]:
        """The nodes of each generation: those that were specified, or else heard of."""
        found: dict[int, set[str]] = {}
        for window in self.windows.values():
            found.setdefault(window.generation, set()).update(*window.nodes.values())
        for job in self.jobs:
            found[job.generation] = {node.node for node in job.nodes}
        return found

    def sorted_windows(self) -> list[CapturedWindow]:
        """All windows that the job has run, in order; not those for which there is only what would rule them."""
        return [window for _, window in sorted(self.windows.items()) if window.was_run]

    def gaps(self) -> list[CapturedWindow]:
        """Windows that lack something, and those between two others that lack all, of a long stretch the first ones."""
        found = []
        nodes = self.nodes
        for generation in sorted(nodes):
            known = [window.window for window in self.sorted_windows() if window.generation == generation]
            for index, following in zip(known, [*known[1:], 0], strict=True):
                missing = range(index + 1, min(following, index + 1 + MOST_MISSING))
                window = self.windows[generation, index]
                found += [window] if any(window.missing(nodes[generation])) else []
                found += [CapturedWindow(generation, absent) for absent in missing]
        return found

    def record(self, record: Record) -> None:
        """Take the next record into account."""
        self.num_records += 1
        self.num_payload_bytes += len(record.payload)
        self.first_ns = self.first_ns or record.timestamp_ns
        self.last_ns = max(self.last_ns, record.timestamp_ns)
        try:
            self.kinds[subjects.parse(record.subject).kind] += 1
            message = decode_any(record.subject, record.payload)
        except (MalformedMessageError, ValueError) as error:
            self.malformed.append((record.subject, str(error)))
            return
        match message:
            case Report() | MetricWindow() | State() | Reward():
                self._window(message.generation, message.window).record(message, record.timestamp_ns)
            case Action():
                self._window(message.generation, message.window).record_action(message, record.timestamp_ns)
                self._follow(message, record.payload)
            case Applied():
                self._window(message.generation, message.effective_window).applied.append(message)
            case Job():
                self.jobs.append(message)
            case Event():
                self.events.append(message)

    def _window(self, generation: int, window: int) -> CapturedWindow:
        key = (generation, window)
        if key not in self.windows:
            self.windows[key] = CapturedWindow(generation, window, keep_details=self.keep_details)
        return self.windows[key]

    def _follow(self, action: Action, payload: bytes) -> None:
        if self.chain_fault:
            return
        try:
            self.chain.check_next(action, payload)
        except BrokenChainError as error:
            self.chain_fault = str(error)


def inspect(path: Path, *, keep_details: bool = False) -> Inspection:
    """Read what is good of a capture. Raises CaptureError when it is none, and OSError."""
    with CaptureReader(path) as reader:
        inspection = Inspection(reader.header, keep_details=keep_details)
        for record in reader.good_records():
            inspection.record(record)
        inspection.faults = [str(fault) for fault in reader.faults]
        inspection.end = reader.end
    return inspection


def document(inspection: Inspection, here: Fingerprint, windows: Iterable[CapturedWindow]) -> Document:
    """The capture and some of its windows, with the units in the names."""
    nodes = inspection.nodes
    return {
        "capture": msgspec.to_builtins(inspection.header),
        "end": msgspec.to_builtins(inspection.end),
        "faults": inspection.faults,
        "fingerprint_differences": differences(inspection.header.fingerprint, here),
        "num_records": inspection.num_records,
        "num_payload_bytes": inspection.num_payload_bytes,
        "first_ns": inspection.first_ns or None,
        "last_ns": inspection.last_ns or None,
        "kinds": dict(sorted(inspection.kinds.items())),
        "malformed": [{"subject": subject, "reason": reason} for subject, reason in inspection.malformed],
        "chain_fault": inspection.chain_fault or None,
        "jobs": document_of(inspection.jobs),
        "events": document_of(inspection.events),
        "gaps": [
            {"generation": gap.generation, "window": gap.window, "missing": list(gap.missing(nodes[gap.generation]))}
            for gap in inspection.gaps()
        ],
        "windows": [_window(window) for window in windows],
    }


def _window(window: CapturedWindow) -> Document:
    return {
        "generation": window.generation,
        "window": window.window,
        "started_ns": window.started_ns or None,
        "metrics": document_of(window.metrics),
        "energy_j": window.energy_j,
        "local_batch_sizes": list(window.sizes),
        "probes": sorted(window.probes),
        "mean_reward": window.mean_reward,
        "action": document_of(window.action, leave_out=("carry",)),  # opaque: the policy's own memory
        "decided_ns": window.decided_ns or None,
        "decision_s": window.decision_s,
        "applied": document_of(window.applied),
        "num_doubles": window.num_doubles,
        "ranks": [
            {"rank": rank, "metrics": document_of(metrics), "reward": document_of(reward)}
            for rank, (metrics, reward) in sorted(window.detailed.items())
        ],
    }
