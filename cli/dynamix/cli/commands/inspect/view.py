"""An inspection for reading: what the file is, what is wrong with it, and a line for each window."""

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from dynamix.cli.formatting import UNKNOWN, formatted, ranges, sizes_text
from dynamix.cli.inspection.inspection import Inspection
from dynamix.cli.inspection.window import CapturedWindow
from dynamix.cli.tables import console_for, new_table, print_lines
from dynamix.recording.capture import Fingerprint, differences
from dynamix.schemas.messages import Action, Job, RankMetrics
from dynamix.schemas.messages.allocation import EXACT

MOST_LINES = 60
"""The first and the last windows up to this number are shown, unless all are asked for."""
ENDS = {
    "ended": "whole, to the end of the job",
    "stored": "whole, what was stored when it was made",
    "windows": "whole, the windows that were asked for",
    "interrupted": "whole, made until it was interrupted",
}
HEADINGS = (
    *("window", "at, s", "batch", "step, ms", "loss", "accuracy", "held out", "sizes", "probe"),
    *("decided", "after, ms", "under", "reward"),
)
LEFT = ("sizes", "probe", "decided")


DETAIL_COLUMNS: dict[str, Callable[[RankMetrics], str]] = {
    "size": lambda rank: str(rank.training.local_batch_size),
    "next": lambda rank: str(rank.training.pending_local_batch_size),
    "samples": lambda rank: str(rank.training.num_samples),
    "loss": lambda rank: formatted(rank.training.loss, "{:.3f}"),
    "accuracy": lambda rank: formatted(rank.training.accuracy, "{:.1%}"),
    "step, ms": lambda rank: formatted(rank.training.step_time_s, "{:.2f}", 1000),
    "data": lambda rank: formatted(rank.training.data_time_s, "{:.2f}", 1000),
    "compute": lambda rank: formatted(rank.training.compute_time_s, "{:.2f}", 1000),
    "sync": lambda rank: formatted(rank.training.sync_time_s, "{:.2f}", 1000),
    "update": lambda rank: formatted(rank.training.update_time_s, "{:.2f}", 1000),
    "cpu": lambda rank: formatted(rank.system.cpu_time_ratio, "{:.2f}"),
    "memory": lambda rank: formatted(rank.system.memory_ratio, "{:.1%}"),
    "sent, B": lambda rank: str(rank.network.tx_bytes) if rank.network else UNKNOWN,
    "retrans": lambda rank: str(rank.network.retransmits) if rank.network else UNKNOWN,
    "rtt, us": lambda rank: formatted(rank.network.srtt_us if rank.network else None, "{:.0f}"),
}
"""Columns of the table of ranks, by heading."""


def show(inspection: Inspection, here: Fingerprint, *, every: bool, stderr: bool) -> None:
    """Print what the file is and a line for each window."""
    console = console_for(stderr=stderr)
    print_lines(console, lines(inspection, here))
    windows = inspection.sorted_windows()
    if windows:
        console.print(_table(inspection, windows, every=every))
    print_lines(console, (f"{one.signature} at window {one.window}: {one.explanation}" for one in inspection.events))


def lines(inspection: Inspection, here: Fingerprint) -> Iterator[str]:
    """What the file is and what is wrong with it, a sentence each."""
    header, end = inspection.header, inspection.end
    lasted_s = (inspection.last_ns - inspection.first_ns) / 1e9
    yield (
        f"{header.job}, captured {header.created}: {ENDS[end.reason] if end else 'CUT OFF'}; {inspection.num_records} "
        f"messages of {lasted_s:.1f} s, {inspection.num_payload_bytes / 1024:.0f} KiB"
    )
    yield from (f"damaged: {fault}" for fault in inspection.faults)
    if end and end.num_records > inspection.num_records:
        yield f"lost: {end.num_records - inspection.num_records} messages of damaged blocks"
    yield from (_job(job, _steps_of(inspection, job)) for job in inspection.jobs)
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
        yield f"malformed: {subject!r}: {reason}"
    if num_doubles := sum(window.num_doubles for window in inspection.windows.values()):
        yield f"repeated: {num_doubles} messages"


def _steps_of(inspection: Inspection, job: Job) -> str:
    """How many steps the windows of a generation have; those of short steps grow longer."""
    windows = inspection.windows.values()
    found = {one.num_steps for one in windows if one.generation == job.generation and one.num_steps}
    if len(found) < 2:
        return str(next(iter(found), job.window_steps))
    return f"{min(found)} to {max(found)}"


def _job(job: Job, steps: str) -> str:
    ended = f", {job.end_reason or 'no reason given'}" if job.phase == "ended" else ""
    nodes = "1 node" if len(job.nodes) == 1 else f"{len(job.nodes)} nodes"
    return (
        f"job {job.phase}{ended}: generation {job.generation}, {job.world_size} ranks on {nodes}, "
        f"{steps} steps a window, {job.optimizer_family}, policy {job.policy}, "
        f"global batch {job.global_batch}, sizes {sizes_text(job.initial_local_batch_sizes)} at first"
    )


def _build(inspection: Inspection, here: Fingerprint) -> Iterator[str]:
    others = differences(inspection.header.fingerprint, here)
    if not others:
        yield "build and processor: the same as here, a replay gives the same bytes"
        return
    yield "build or processor: another than here, a replay may differ in its last digits"
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
        yield "gaps: unknown, there is no window"
    elif not lacking:
        yield "gaps: none, every window has all its messages"


def _table(inspection: Inspection, windows: Sequence[CapturedWindow], *, every: bool) -> Table:
    several = len({window.generation for window in windows}) > 1
    headings = (*(("generation",) if several else ()), *HEADINGS)
    rows = [
        (*((str(window.generation),) if several else ()), *_cells(window, before, inspection.first_ns))
        for window, before in zip(windows, (None, *windows), strict=False)
    ]
    num_hidden = 0 if every else max(0, len(rows) - MOST_LINES)
    if num_hidden:
        half = MOST_LINES // 2
        rows[half:-half] = [("...",) * len(headings)]
    table = new_table(*headings, rows=rows, left=LEFT)
    table.caption = f"{num_hidden} windows are not shown: --all" if num_hidden else None
    return table


def _cells(window: CapturedWindow, before: CapturedWindow | None, first_ns: int) -> tuple[str, ...]:
    metrics, action = window.metrics, window.action
    same = action and before and before.action and _is_same(action, before.action)
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
        "the same" if same else _decided(action) if action else UNKNOWN,
        formatted(window.decision_s, "{:.1f}", 1000),
        ", ".join(f"{applied.decided_window}" for applied in window.applied) or "",
        formatted(window.mean_reward),
    )


def show_window(window: CapturedWindow, *, stderr: bool) -> None:
    """Print one window with every rank."""
    console = console_for(stderr=stderr)
    if window.detailed:
        console.print(_ranks(window))
    print_lines(console, window_lines(window))


def window_lines(window: CapturedWindow) -> Iterator[str]:
    """The window's metrics, the decision made on it, and the decisions adopted in it."""
    where = f"window {window.window} of generation {window.generation}"
    if (metrics := window.metrics) is not None:
        yield (
            f"{where}: global batch {metrics.global_batch_size}, step {metrics.step_time_s * 1000:.1f} ms, "
            f"{formatted(metrics.throughput, '{:.0f}')} samples/s, "
            f"noise scale {formatted(metrics.noise_scale, '{:.0f}')}, mean reward {formatted(window.mean_reward)}"
            + ("" if window.energy_j is None else f", {window.energy_j:.4g} J")
        )
    yield f"decided: {_action(window.action)}" if window.action else f"no action for {where}"
    for applied in window.applied:
        refused = ", ".join(f"{count} {reason}" for reason, count in applied.num_refused.items())
        yield (
            f"from step {applied.effective_step} on under the action of window {applied.decided_window}: "
            + sizes_text(applied.local_batch_sizes)
            + ("" if applied.exchange == EXACT else f", gradients {applied.exchange.label}")
            + (f"; refused so far: {refused}" if refused else "")
        )


def _is_same(action: Action, before: Action) -> bool:
    return (action.local_batch_sizes, action.exchange) == (before.local_batch_sizes, before.exchange)


def _decided(action: Action) -> str:
    exchange = "" if action.exchange == EXACT else f", {action.exchange.label}"
    return sizes_text(action.local_batch_sizes) + exchange


def _action(action: Action) -> str:
    levers = "".join(f", {name} {value:g}" for name, value in action.levers.items())
    exchange = "" if action.exchange == EXACT else f", gradients {action.exchange.label}"
    gap = ", after a gap" if action.gap else ""
    return (
        f"{sizes_text(action.local_batch_sizes)} by {action.policy} version {action.policy_version} "
        f"({action.split}{exchange}), watermark {action.watermark}{gap}{levers}, {len(action.carry)} bytes of memory, "
        f"{action.hash.hex()[:16]} after {action.previous_hash.hex()[:16] or 'nothing'}"
    )


def _ranks(window: CapturedWindow) -> Table:
    terms = list(dict.fromkeys(name for _, reward in window.detailed.values() if reward for name in reward.terms))
    rows = [
        (
            str(rank),
            *(cell(metrics) if metrics else UNKNOWN for cell in DETAIL_COLUMNS.values()),
            formatted(reward.reward if reward else None),
            *(formatted(reward.terms.get(name) if reward else None) for name in terms),
        )
        for rank, (metrics, reward) in sorted(window.detailed.items())
    ]
    return new_table("rank", *DETAIL_COLUMNS, "reward", *terms, rows=rows)
