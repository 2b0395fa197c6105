"""What a capture holds, folded from its records. Pure but for the reading of the file."""

from collections import Counter
from pathlib import Path

from dynamix.recording.capture import CaptureEnd, CaptureHeader, CaptureReader, CutOffError, Record
from dynamix.schemas import subjects
from dynamix.schemas.chain import BrokenChainError, ChainCheck
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Action, Applied, Event, Job, MetricWindow, Report, Reward, State

from .window import CapturedWindow

MOST_MISSING = 1000
"""At most so many absent windows in a row are listed, since a malformed message may name any number."""


class Inspection:
    """A captured job: everything that tables, JSON and figure show.

    Attributes:
        header: of the capture.
        end: of the capture, `None` where it is cut off.
        cut_off: why there is no end, empty where there is one.
        num_records: messages read.
        num_payload_bytes: of all of them.
        kinds: messages by kind.
        malformed: subject and reason of messages that cannot be decoded.
        jobs: the specifications, in order.
        windows: by generation and window.
        events: failure signatures, in order.
        chain_fault: what is wrong with the first action that breaks the chain, empty without one.
        first_ns: when the broker stored the first message, 0 without one.
        last_ns: when it stored the last message.
    """

    def __init__(self, header: CaptureHeader, *, keep_details: bool = False) -> None:
        self.header = header
        self.end: CaptureEnd | None = None
        self.cut_off = ""
        self.num_records = 0
        self.num_payload_bytes = 0
        self.kinds: Counter[str] = Counter()
        self.malformed: list[tuple[str, str]] = []
        self.jobs: list[Job] = []
        self.windows: dict[tuple[int, int], CapturedWindow] = {}
        self.events: list[Event] = []
        self.chain_fault = ""
        self.first_ns = 0
        self.last_ns = 0
        self._keep_details = keep_details
        self._chain = ChainCheck()

    @property
    def nodes(self) -> dict[int, set[str]]:
        """By generation, the nodes that were specified, or else heard of."""
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
            self.windows[key] = CapturedWindow(generation, window, keep_details=self._keep_details)
        return self.windows[key]

    def _follow(self, action: Action, payload: bytes) -> None:
        if self.chain_fault:
            return
        try:
            self._chain.check_next(action, payload)
        except BrokenChainError as error:
            self.chain_fault = str(error)


def inspect(path: Path, *, keep_details: bool = False) -> Inspection:
    """Read a capture; one that is cut off is read as far as it goes.

    Raises:
        CaptureError: when it is no capture or damaged.
        OSError: when it cannot be read.
    """
    with CaptureReader(path) as reader:
        inspection = Inspection(reader.header, keep_details=keep_details)
        try:
            for record in reader:
                inspection.record(record)
        except CutOffError as error:
            inspection.cut_off = str(error)
        inspection.end = reader.end
    return inspection
