"""Show the contents of a capture: windows, decisions, rewards, gaps, and whether it was made by this build.

`--json` has every rank of every window, `dynamix dashboard FILE` shows them.

Exit code 1 means a damaged or cut off file, undecodable messages, or a broken chain of actions.
"""

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dynamix.cli.arguments import STANDARD_OUTPUT, add_json_argument
from dynamix.cli.documents import window_document
from dynamix.cli.errors import explained, reading
from dynamix.cli.output import document_of, write_json
from dynamix.cli.terminal import UNKNOWN, formatted, print_table, ranges, sizes_text
from dynamix.recording.capture import (
    CaptureEnd,
    CaptureError,
    CaptureHeader,
    CaptureReader,
    Record,
)
from dynamix.recording.fingerprint import Fingerprint, differences, fingerprint
from dynamix.recording.job_view import JobView, Window
from dynamix.schemas.chain import BrokenChainError, ChainCheck
from dynamix.schemas.messages import Action, Event, Job, Message
from dynamix.schemas.messages.allocation import EXACT

MOST_MISSING = 1000
"""Most absent windows in a row that are listed, since a malformed message may name any number."""
HEADINGS = (
    *("window", "at, s", "batch", "step, ms", "loss", "accuracy", "held out", "sizes", "probe"),
    *("decided", "after, ms", "adopted", "reward"),
)
LEFT = ("sizes", "probe", "decided")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("file", metavar="FILE", help="a capture, written by `dynamix capture JOB -o FILE`")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read and show; 1 when the file is cut off or damaged, or holds messages that cannot be used."""
    with explained(CaptureError), reading(arguments.file):
        inspection = inspect(Path(arguments.file), keep_ranks=arguments.json is not None)
    here = fingerprint()
    if arguments.json != STANDARD_OUTPUT:
        print(*lines(inspection, here), sep="\n")
        _print_windows(inspection)
        for one in inspection.events:
            print(f"{one.signature} at window {one.window}: {one.explanation}")
    if arguments.json is not None:
        fields = msgspec.structs.asdict(inspection)
        document = {name: document_of(value) for name, value in fields.items() if name not in ("view", "chain")}
        document |= {
            "fingerprint_differences": differences(inspection.header.fingerprint, here),
            "gaps": inspection.gaps(),
            "windows": [window_document(window) for window in inspection.view.history],
        }
        write_json(document, arguments.json)
    return 1 if inspection.fault or inspection.malformed or inspection.chain_fault else 0


class Inspection(msgspec.Struct):
    """A captured job, and the file that holds it."""

    header: CaptureHeader
    view: JobView
    end: CaptureEnd | None = None
    """`None` where the capture is damaged or cut off."""
    fault: str = ""
    """The damage, or where the file is cut off; empty for a whole file."""
    num_records: int = 0
    num_payload_bytes: int = 0
    kinds: Counter[str] = msgspec.field(default_factory=Counter)
    malformed: list[tuple[str, str]] = []
    """Subject and reason of messages that cannot be decoded."""
    jobs: list[Job] = []
    events: list[Event] = []
    chain: ChainCheck = msgspec.field(default_factory=ChainCheck)
    chain_fault: str = ""
    """Fault of the first action that breaks the chain, empty without one."""
    first_ns: int = 0
    """When the broker stored the first message, 0 without one."""
    last_ns: int = 0

    def record(self, record: Record, message: Message | None) -> None:
        """Take the next record into account."""
        self.num_records += 1
        self.num_payload_bytes += len(record.payload)
        self.first_ns = self.first_ns or record.timestamp_ns
        self.last_ns = max(self.last_ns, record.timestamp_ns)
        self.kinds[record.kind] += 1
        if message is None:
            return
        self.view.fold(message, record.timestamp_ns)
        match message:
            case Action() if not self.chain_fault:
                try:
                    self.chain.check_next(message, record.payload)
                except BrokenChainError as error:
                    self.chain_fault = str(error)
            case Job():
                self.jobs.append(message)
            case Event():
                self.events.append(message)

    def gaps(self) -> list[tuple[int, int, list[str]]]:
        """Generation, index and missing messages of each incomplete window, also of those without any message."""
        nodes: dict[int, set[str]] = {}
        for window in self.view.history:
            nodes.setdefault(window.generation, set()).update(window.nodes)
        nodes |= {job.generation: {node.node for node in job.nodes} for job in self.jobs}
        found: list[tuple[int, int, list[str]]] = []
        for generation in sorted(nodes):
            known = {window.window: window for window in self.view.history if window.generation == generation}
            for begin, following in itertools.pairwise([*known, max(known, default=-1) + 1]):
                for index in range(begin, min(following, begin + 1 + MOST_MISSING)):
                    window = known.get(index) or Window(generation, index)
                    if missing := list(window.missing(nodes[generation])):
                        found.append((generation, index, missing))
        return found


def inspect(path: Path, *, keep_ranks: bool = False) -> Inspection:
    """Read the undamaged part of a capture. Raises CaptureError if there is none, and OSError."""
    with CaptureReader(path) as reader:
        view = JobView(reader.header.job, most_windows=1 << 62, keep_ranks=keep_ranks)
        inspection = Inspection(reader.header, view, malformed=reader.malformed)
        for record, message in reader.messages():
            inspection.record(record, message)
        inspection.fault = "" if reader.fault is None else str(reader.fault)
        inspection.end = reader.end
    return inspection


# --- as text


def lines(inspection: Inspection, here: Fingerprint) -> Iterator[str]:
    """Describe the file and its damage, a sentence each."""
    header, end = inspection.header, inspection.end
    lasted_s = (inspection.last_ns - inspection.first_ns) / 1e9
    state = f"complete ({end.reason})" if end else "INCOMPLETE"
    yield (
        f"{header.job}, captured {header.created}: {state}; {inspection.num_records} messages of {lasted_s:.1f} s, "
        f"{inspection.num_payload_bytes / 1024:.0f} KiB"
    )
    if inspection.fault:
        yield f"damaged: {inspection.fault}"
    for job in inspection.jobs:
        windows = inspection.view.history
        steps = {one.num_steps for one in windows if one.generation == job.generation and one.num_steps}
        # windows of short steps grow longer
        counts = f"{min(steps)} to {max(steps)}" if len(steps) > 1 else next(iter(steps), job.window_steps)
        ended = f", {job.end_reason or 'no reason given'}" if job.phase == "ended" else ""
        nodes = "1 node" if len(job.nodes) == 1 else f"{len(job.nodes)} nodes"
        yield (
            f"job {job.phase}{ended}: generation {job.generation}, {job.world_size} ranks on {nodes}, "
            f"{counts} steps a window, {job.optimizer_family}, policy {job.policy}, "
            f"global batch {job.global_batch}, sizes {sizes_text(job.initial_local_batch_sizes)} at first"
        )
    yield "messages: " + ", ".join(f"{kind} {number}" for kind, number in sorted(inspection.kinds.items()))
    if others := differences(header.fingerprint, here):
        yield "build or processor: another than here, a replay may differ in its last digits"
        yield from (f"  {line}" for line in others)
    else:
        yield "build and processor: the same as here, a replay gives the same bytes"
    yield "chain of actions: " + (inspection.chain_fault or f"unbroken over {inspection.kinds['action']}")
    yield from _gaps(inspection)
    for subject, reason in inspection.malformed:
        yield f"malformed: {subject!r}: {reason}"
    if num_doubles := sum(window.num_doubles for window in inspection.view.windows.values()):
        yield f"repeated: {num_doubles} messages"


def _gaps(inspection: Inspection) -> Iterator[str]:
    lacking: dict[tuple[int, str], list[int]] = {}
    for generation, index, missing in inspection.gaps():
        for what in missing:
            lacking.setdefault((generation, what), []).append(index)
    for (generation, what), indices in lacking.items():
        yield f"missing in generation {generation}: {what} of windows {ranges(indices)}"
    if not inspection.view.windows:
        yield "gaps: unknown, there is no window"
    elif not lacking:
        yield "gaps: none, every window has all its messages"


def _print_windows(inspection: Inspection) -> None:
    windows = inspection.view.history
    several = len({window.generation for window in windows}) > 1
    rows = []
    for window, before in zip(windows, (None, *windows), strict=False):
        metrics, action, previous = window.metrics, window.action, before.action if before else None
        decided = _decided(action)
        probes = sorted({node.probe for node in window.nodes.values() if node.probe})
        at_s = (window.started_ns - inspection.first_ns) / 1e9 if window.started_ns else None
        row = (
            f"{window.generation}:{window.window}" if several else str(window.window),
            formatted(at_s, "{:.2f}"),
            str(metrics.global_batch_size) if metrics else UNKNOWN,
            formatted(metrics.step_time_s if metrics else None, "{:.1f}", 1000),
            formatted(metrics.loss if metrics else None, "{:.3f}"),
            formatted(metrics.accuracy if metrics else None, "{:.1%}"),
            formatted(metrics.held_out_accuracy if metrics else None, "{:.1%}"),
            sizes_text(window.sizes),
            "+".join(probes) or UNKNOWN,
            "the same" if action and previous and decided == _decided(previous) else decided,
            formatted(window.decision_s, "{:.1f}", 1000),
            ", ".join(str(adopted.window) for adopted in inspection.view.adopted(window)),
            formatted(window.mean_reward()),
        )
        rows.append(row)
    if rows:
        print_table(HEADINGS, rows, left=LEFT)


def _decided(action: Action | None) -> str:
    if action is None:
        return UNKNOWN
    exchange = action.allocation.exchange
    return sizes_text(action.local_batch_sizes) + ("" if exchange == EXACT else f", {exchange.label}")
