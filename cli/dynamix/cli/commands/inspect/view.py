"""An inspection for reading: what the file is, what is wrong with it, and a line for each window."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from dynamix.cli.formatting import UNKNOWN, formatted, ranges, sizes_text
from dynamix.cli.inspection.inspection import Inspection
from dynamix.cli.inspection.window import Window
from dynamix.cli.tables import console_for, new_table, print_line
from dynamix.recording.capture import Fingerprint, differences
from dynamix.schemas.messages import Job

MOST_LINES = 60
"""Of more windows the first and the last are shown, unless all are asked for."""
ENDS = {
    "ended": "whole, to the end of the job",
    "stored": "whole, what was stored when it was made",
    "windows": "whole, the windows that were asked for",
    "interrupted": "whole, made until it was interrupted",
}
HEADINGS = (
    *("window", "at, s", "batch", "step, ms", "loss", "accuracy", "held out", "sizes", "probe"),
    *("decided", "after, ms", "ruled by", "reward"),
)
LEFT = ("sizes", "probe", "decided")


def show(inspection: Inspection, here: Fingerprint, *, every: bool, stderr: bool) -> None:
    """Print it."""
    console = console_for(stderr=stderr)
    for line in lines(inspection, here):
        print_line(console, line)
    windows = inspection.sorted_windows()
    if windows:
        console.print(_table(inspection, windows, every=every))
    for event in inspection.events:
        print_line(console, f"{event.signature} at window {event.window}: {event.explanation}")


def lines(inspection: Inspection, here: Fingerprint) -> Iterator[str]:
    """What the file is and what is wrong with it, a sentence each."""
    header, end = inspection.header, inspection.end
    lasted_s = (inspection.last_ns - inspection.first_ns) / 1e9
    yield (
        f"{header.job}, captured {header.created}: {ENDS[end.reason] if end else 'CUT OFF'}; {inspection.num_records} "
        f"messages of {lasted_s:.1f} s, {inspection.num_payload_bytes / 1024:.0f} KiB"
    )
    if inspection.cut_off:
        yield f"cut off: {inspection.cut_off}"
    yield from (_job(job) for job in inspection.jobs)
    yield "messages: " + ", ".join(f"{kind} {count}" for kind, count in sorted(inspection.kinds.items()))
    if end:
        yield "sequences: " + ", ".join(
            f"{stream} {of.first_sequence}-{of.last_sequence} ({of.num_records})" for stream, of in end.ranges.items()
        )
        if end.num_left_out:
            yield f"left out: {end.num_left_out} messages over 1 MiB"
    yield from _build(inspection, here)
    yield "chain of actions: " + (inspection.chain_fault or f"unbroken over {inspection.kinds['action']}")
    yield from _gaps(inspection)
    for subject, reason in inspection.malformed:
        yield f"not readable: {subject!r}: {reason}"
    if num_doubles := sum(window.num_doubles for window in inspection.windows.values()):
        yield f"doubles: {num_doubles} messages had been there before"


def _job(job: Job) -> str:
    ended = f", {job.end_reason or 'no reason given'}" if job.phase == "ended" else ""
    nodes = "1 node" if len(job.nodes) == 1 else f"{len(job.nodes)} nodes"
    return (
        f"job {job.phase}{ended}: generation {job.generation}, {job.world_size} ranks on {nodes}, "
        f"{job.window_steps} steps a window, {job.optimizer_family}, policy {job.policy}, sizes "
        f"{sizes_text(job.initial_local_batch_sizes)} at first"
    )


def _build(inspection: Inspection, here: Fingerprint) -> Iterator[str]:
    others = differences(inspection.header.fingerprint, here)
    if not others:
        yield "build and processor: as here, a replay gives the same bytes"
        return
    yield "build or processor: not as here, a replay may differ in its last digits"
    yield from (f"  {line}" for line in others)


def _gaps(inspection: Inspection) -> Iterator[str]:
    nodes = inspection.nodes
    lacking: dict[tuple[int, str], list[int]] = {}
    for gap in inspection.gaps():
        for what in gap.missing(nodes[gap.generation]):
            lacking.setdefault((gap.generation, what), []).append(gap.window)
    for (generation, what), windows in lacking.items():
        yield f"missing in generation {generation}: {what} of windows {ranges(windows)}"
    if not inspection.windows:
        yield "gaps: not known, there is no window"
    elif not lacking:
        yield "gaps: none, every window has all its messages"


def _table(inspection: Inspection, windows: Sequence[Window], *, every: bool) -> Table:
    several = len({window.generation for window in windows}) > 1
    table = new_table(*(("generation",) if several else ()), *HEADINGS, left=LEFT)
    shown = list(enumerate(windows))
    half = MOST_LINES // 2
    for index, window in shown if every or len(shown) <= MOST_LINES else (*shown[:half], *shown[-half:]):
        if not every and len(shown) > MOST_LINES and index == len(shown) - half:
            table.add_row(*(["..."] * len(table.columns)))
            table.caption = f"{len(shown) - 2 * half} windows are not shown: --all"
        cells = _cells(window, windows[index - 1] if index else None, inspection.first_ns)
        table.add_row(*((str(window.generation),) if several else ()), *cells)
    return table


def _cells(window: Window, before: Window | None, first_ns: int) -> tuple[str, ...]:
    metrics, action = window.metrics, window.action
    same = action and before and before.action and action.local_batch_sizes == before.action.local_batch_sizes
    return (
        str(window.window),
        formatted((window.started_ns - first_ns) / 1e9 if window.started_ns else None, "{:.2f}"),
        str(metrics.global_batch_size) if metrics else UNKNOWN,
        formatted(metrics.step_time_s if metrics else None, "{:.1f}", 1000),
        formatted(metrics.loss if metrics else None, "{:.3f}"),
        formatted(metrics.accuracy if metrics else None, "{:.1%}"),
        formatted(metrics.held_out_accuracy if metrics else None, "{:.1%}"),
        sizes_text(window.sizes),
        "+".join(sorted(window.probes)) or UNKNOWN,
        "the same" if same else sizes_text(action.local_batch_sizes) if action else UNKNOWN,
        formatted(window.decision_s, "{:.1f}", 1000),
        ", ".join(f"{applied.decided_window}" for applied in window.applied) or "",
        formatted(window.mean_reward),
    )
