"""The screen of `dynamix top`: a job as lines of text for a terminal of any size, redrawn on each change."""

import asyncio
import contextlib
import os
import sys
import termios
import textwrap
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dynamix.cli.errors import first_error
from dynamix.cli.fleet import Fleet
from dynamix.cli.heartbeats import Heartbeats
from dynamix.cli.jobs import NO_JOB, newest_job, none_called
from dynamix.cli.terminal import UNKNOWN, bar, curve, duration, number, percent, signed_count
from dynamix.recording.job_view import JobView, RankView
from dynamix.schemas.messages.allocation import EXACT

MIN_INTERVAL_S = 0.2
"""Frames are no closer than this, however fast windows come."""
TICK_S = 1.0
"""Without news a frame is drawn for the ages in it."""
QUIT_KEYS = (b"q", b"Q", b"\x1b", b"")
"""Escape alone, not an arrow's sequence; nothing read is a terminal that is gone."""


TWO_COLUMNS_FROM = 72
LABEL, VALUE = 13, 12
LABEL_WIDTH = 10
MOST_REASON_LINES = 3
MIN_TABLE = 8
"""Lines reserved for the table of ranks; curves get what is left."""
STALE_AFTER_S = 30.0
SHOWN_CHANGES = 16
PHASES = {
    "running": ("● running", "green"),
    "silent": ("○ silent, perhaps killed", "yellow"),
    "ended": ("■ ended", "red"),
}


def frame(
    view: JobView | None,
    heartbeats: Heartbeats,
    *,
    now_ns: int,
    now_s: float,
    width: int,
    height: int,
    missing: str = NO_JOB,
) -> list[Text]:
    """At most `height` lines of at most `width` characters; `missing` says why there is no view.

    `now_ns` is the wall clock, for the age of the newest window; `now_s` the clock that `heartbeats` was given.
    """
    below = [_services(heartbeats, now_s)]
    if view is None or (view.job is None and not view.windows):
        return _cut([*_empty(view, missing), Text(), *below], width, height)
    rule = Text("─" * width, "dim")
    lacking = _collectors(view, heartbeats, now_s)
    below = [rule, *_decision(view, width), *_reward(view, width), *_event(view), *_network(view), *lacking, *below]
    tiles = _tiles(view, width)[: max(2, height - len(below) - MIN_TABLE)]
    above = [_title(view, now_ns, width), rule, *tiles, rule]
    room = height - len(above) - len(below)
    return _cut([*above, *rank_lines(view, width, room), *below], width, height)


def _empty(view: JobView | None, missing: str) -> list[Text]:
    what = missing if view is None else f"no message of the job {view.name} yet"
    return [
        *(Text(part, "bold") for part in what.split("; ")),
        Text("start one with:  dynamix train -- --standalone --nproc-per-node 4 train.py", "dim"),
    ]


def _title(view: JobView, now_ns: int, width: int) -> Text:
    job = view.job
    phase = "ended" if job is None else view.phase(now_ns)
    left = Text.assemble((view.name, "bold"), "  ", PHASES[phase])
    parts = [f"window {view.window}" if view.window >= 0 else "no window yet"]
    if job is not None:
        nodes = f" on {len(job.nodes)} nodes" if len(job.nodes) > 1 else ""
        parts = [job.policy, *parts, f"{job.world_size} ranks{nodes}"]
        if job.phase == "ended" and job.end_reason:
            parts.append(job.end_reason)
    if view.generation:
        parts.append(f"restart {view.generation}")
    left.append("  " + " · ".join(parts), "default")
    age = _age(view, now_ns, running=phase != "ended")
    left.truncate(max(0, width - age.cell_len - 1), overflow="ellipsis")
    return left.append(" " * (width - left.cell_len - age.cell_len)).append_text(age)


def _age(view: JobView, now_ns: int, *, running: bool) -> Text:
    if view.updated_ns == 0:
        return Text()
    age_s = max(0.0, (now_ns - view.updated_ns) / 1e9)
    return Text(
        f"{age_s:.1f} s ago" if age_s < 60 else f"{duration(age_s)} ago",
        "yellow" if running and age_s > STALE_AFTER_S else "dim",
    )


def _tiles(view: JobView, width: int) -> list[Text]:
    """Metrics of the whole job, each with its curve."""
    metrics = view.metrics
    if metrics is None:
        return []
    sizes = view.local_batch_sizes
    rule = f" {view.job.global_batch}" if view.job else ""
    tiles = (
        ("throughput", f"{number(metrics.throughput)}/s", view.curve("throughput"), "green"),
        ("loss", number(metrics.loss), view.curve("loss"), "red"),
        ("step time", duration(metrics.step_time_s), view.curve("step_time_s"), "cyan"),
        ("accuracy", percent(metrics.accuracy), view.curve("accuracy"), "green"),
        ("global batch", f"{sum(sizes):,}{rule}", view.curve("global_batch_size"), "magenta"),
        ("held-out", percent(metrics.held_out_accuracy), view.curve("held_out_accuracy"), "green"),
        ("noise scale", number(metrics.noise_scale), view.curve("noise_scale"), "blue"),
        ("progress", percent(metrics.progress), metrics.progress, "default"),
    )
    columns = 2 if width >= TWO_COLUMNS_FROM else 1
    room = (width - 2 * (columns - 1)) // columns
    cells = [_tile(label, value, picture, style, room) for label, value, picture, style in tiles]
    return [Text("  ").join(cells[index : index + columns]) for index in range(0, len(cells), columns)]


def _tile(label: str, value: str, picture: Sequence[float] | float | None, style: str, room: int) -> Text:
    value = f"{value} ".ljust(VALUE)
    width = room - LABEL - len(value)
    drawn = curve(picture, width) if isinstance(picture, Sequence) else bar(picture or 0.0, width)
    line = Text.assemble((label.ljust(LABEL), "dim"), (value, "bold"), (drawn, style))
    return line.append(" " * max(0, room - line.cell_len))


def _decision(view: JobView, width: int) -> Iterator[Text]:
    action, applied = view.action, view.applied
    if view.exchange != EXACT:
        yield _labelled("gradients", (view.exchange.label, "bold"))
    if action is None:
        why = f"none in {view.window + 1} windows: the arbitrator's log says why"
        yield _labelled(
            "decision", (why, "yellow") if view.lacks_decision else ("none yet: the initial sizes stay", "dim")
        )
        return
    version = f" v{action.policy_version}" if action.policy_version else ""
    by = f"  of window {action.window} by {action.policy}{version}"
    missing = ", inputs missing" if action.gap else ""
    yield _labelled("decision", (_changes(action.deltas), "bold"), (by, "dim"), (missing, "yellow"))
    room = max(1, width - LABEL_WIDTH)
    for at, line in enumerate(textwrap.wrap(action.reason, room, max_lines=MOST_REASON_LINES, placeholder=" …")):
        yield _labelled("" if at else "because", (line, "dim"))
    if applied is not None:
        adopted = f"of window {applied.decided_window}, from window {applied.effective_window} on"
        refused = ", ".join(f"{count} {reason}" for reason, count in applied.num_refused.items() if count)
        yield _labelled("adopted", (adopted, "dim"), (f"   refused: {refused}" if refused else "", "yellow"))


def _changes(deltas: Sequence[int]) -> str:
    """An action's changes: each where they are few, else how many ranks got more and less."""
    if not any(deltas):
        return "no change"
    if len(deltas) <= SHOWN_CHANGES:
        return " ".join(map(signed_count, deltas))
    more, less = sum(delta > 0 for delta in deltas), sum(delta < 0 for delta in deltas)
    return f"{more} ranks more, {less} less, {len(deltas) - more - less} the same"


def _reward(view: JobView, width: int) -> Iterator[Text]:
    if (mean := view.mean_reward()) is None:
        return
    terms = "  ".join(f"{name.replace('_', ' ')} {value:+.3f}" for name, value in view.reward_terms().items())
    line = _labelled("reward", (f"{mean:.3f}", "bold"), f"  {view.formula}")
    if line.cell_len + len(terms) + 3 <= width:
        yield line.append(f":  {terms}", "dim")
    else:
        yield from (line, _labelled("", (terms.replace("  ", " "), "dim")))


def _event(view: JobView) -> Iterator[Text]:
    if (event := view.event) is not None:
        where = f"  window {event.window}"
        yield _labelled("signature", (event.signature, "yellow"), f"  {event.explanation}", (where, "dim"))


def _network(view: JobView) -> Iterator[Text]:
    """Where network metrics come from, and why not from a better probe."""
    if not (nodes := view.nodes.values()):
        return
    probes = Counter(node.probe for node in nodes)
    named = ", ".join(probe if len(probes) == 1 else f"{probe} on {count}" for probe, count in probes.items())
    note = next((f"  {node.probe_note}" for node in nodes if node.probe_note), "")
    num_lost = sum(node.num_readings_lost for node in nodes)
    lost = f"  {num_lost} readings lost" if num_lost else ""
    yield _labelled("network", named, (note, "dim"), (lost, "yellow"))


def _collectors(view: JobView, heartbeats: Heartbeats, now_s: float) -> Iterator[Text]:
    """Nodes of the job that no collector measures."""
    if nodes := heartbeats.nodes_without_collector(view.unmeasured_nodes, now_s):
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        fix = "start it, or set one DYNAMIX_NODE for it and the ranks"
        yield _labelled("collector", (f"none on {nodes[0]}{more}: {fix}", "red"))


def _services(heartbeats: Heartbeats, now_s: float) -> Text:
    text = Text()
    if lost := heartbeats.num_not_stored(now_s):  # first, since a long line is cut at its end
        text.append(f"{lost} not stored by the broker  ", "red")
    if refused := heartbeats.count("refused_logs", now_s):
        text.append(f"{refused} logs refused  ", "red")
    for beat in heartbeats.recent(now_s):
        late = beat.is_late(now_s)
        where = f" {beat.live.node}" if beat.live.node and beat.live.service == "collector" else ""
        text.append("○ " if late else "● ", "red" if late else "green").append(f"{beat.live.service}{where}  ")
    for service in heartbeats.missing(now_s):
        if not any(beat.live.service == service for beat in heartbeats.recent(now_s)):
            text.append("○ ", "red").append(f"{service} not heard  ", "red")
    if dead := heartbeats.count("dead_letters", now_s):
        text.append(f"{dead} dead letters", "yellow")
    return _labelled("services", text)


def _labelled(label: str, *parts: Text | str | tuple[str, str]) -> Text:
    return Text.assemble((label.ljust(LABEL_WIDTH), "dim"), *parts)


def _cut(lines: list[Text], width: int, height: int) -> list[Text]:
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


# --- the table of ranks

MIN_BAR = 12
WAIT_STYLE, COMPUTE_STYLE, DATA_STYLE, UPDATE_STYLE = "yellow", "cyan", "magenta", "blue"
UNKNOWN_STYLE = "dim"
"""Style of the part of a step that was computing or waiting, where the two could not be told apart."""
LEGEND = (("█ compute", COMPUTE_STYLE), ("▒ wait", WAIT_STYLE), ("▓ data", DATA_STYLE), ("░ update", UPDATE_STYLE))


class BarSegment(NamedTuple):
    """One part of a stacked bar; the glyph distinguishes it where there is no colour."""

    value: float
    glyph: str
    style: str


class RankColumn(NamedTuple):
    """A column of the table; where not all fit, the last ones of `COLUMNS` are left out."""

    title: str
    width: int
    cell: Callable[[RankView], str]
    style: str = ""


def _pending(row: RankView) -> str:
    training = row.metrics.training
    is_same = training.pending_local_batch_size == training.local_batch_size
    return "" if is_same else f"→{training.pending_local_batch_size}"


def _speed(row: RankView) -> str:
    training = row.metrics.training
    return number(training.local_batch_size / training.compute_time_s) if training.compute_time_s else UNKNOWN


RANK = RankColumn("rank", 4, lambda row: str(row.rank), "bold")
NODE = RankColumn("node", 12, lambda row: row.node, "dim")
BATCH = RankColumn("batch", 5, lambda row: str(row.metrics.training.local_batch_size), "bold")
NEXT = RankColumn("next", 5, _pending, "bold green")
COLUMNS = (
    RankColumn("compute", 9, lambda row: duration(row.metrics.training.compute_time_s), COMPUTE_STYLE),
    RankColumn("wait", 9, lambda row: duration(row.metrics.training.sync_time_s), WAIT_STYLE),
    RankColumn("reward", 7, lambda row: UNKNOWN if row.reward is None else f"{row.reward.reward:.3f}"),
    RankColumn("cpu", 5, lambda row: number(row.metrics.system.cpu_time_ratio, 2)),
    RankColumn(
        "retrans", 7, lambda row: UNKNOWN if row.metrics.network is None else str(row.metrics.network.retransmits)
    ),
    RankColumn("samp/s", 7, _speed),
    RankColumn("queued", 6, lambda row: number(row.metrics.system.run_queue_wait_ratio, 2)),
    RankColumn("loss", 7, lambda row: number(row.metrics.training.loss)),
    RankColumn("accuracy", 8, lambda row: percent(row.metrics.training.accuracy)),
    RankColumn("memory", 7, lambda row: percent(row.metrics.system.memory_ratio)),
)
"""Shown while there is room, the most important first."""


def rank_lines(view: JobView, width: int, height: int) -> list[Text]:
    """Lines of the table: titles, rows, and a summary when not every rank has one; at most `height` lines."""
    rows = [row for _, row in sorted(view.ranks.items())]
    if not rows or height < 2:
        return _announced(view, height)
    left = (RANK, NODE, BATCH, NEXT) if len(view.nodes) > 1 else (RANK, BATCH, NEXT)
    room = width - sum(column.width + 1 for column in left)
    right: list[RankColumn] = []
    for column in COLUMNS:
        if column.width + 1 + MIN_BAR * (1 + len(right) // 3) > room:
            break
        right.append(column)
        room -= column.width + 1
    room = max(0, room)
    shown = rows
    if len(rows) >= height:
        slowest = sorted(rows, key=lambda row: row.busy_time_s, reverse=True)[: max(0, height - 2)]
        shown = sorted(slowest, key=lambda row: row.rank)
    full = max(map(_total_time_s, rows))
    lines = [_row(left, _legend(room), right)]
    for row in shown:
        line = _row(left, _bar(row, full, room), right, row)
        if row.window < view.window:
            line.stylize("dim")  # an older window than the newest: this node is behind
        lines.append(line)
    if len(shown) < len(rows):
        lines.append(_summary(rows, len(shown)))
    return lines[:height]


def _row(left: Sequence[RankColumn], middle: Text, right: Sequence[RankColumn], row: RankView | None = None) -> Text:
    """The cells of a rank around its bar; without a rank the titles around the legend."""
    line = Text(style="dim" if row is None else "")
    for column in left:
        line.append_text(_cell(column, row)).append(" ")
    line.append_text(middle)
    for column in right:
        line.append(" ").append_text(_cell(column, row))
    return line


def _cell(column: RankColumn, row: RankView | None) -> Text:
    """A cell cut or filled to its column's width; only names of nodes are left-aligned."""
    cell = Text(column.title) if row is None else Text(column.cell(row), column.style)
    cell.truncate(column.width, overflow="ellipsis")
    pad = " " * (column.width - cell.cell_len)
    return cell.append(pad) if column is NODE else Text(pad).append_text(cell)


def _legend(room: int) -> Text:
    legend = Text()
    for label, style in LEGEND:
        if legend.cell_len + len(label) + 2 <= room:
            legend.append(label + "  ", style)
    return legend.append(" " * (room - legend.cell_len))


def _announced(view: JobView, height: int) -> list[Text]:
    """Without a window: the initial sizes."""
    if view.job is None or height < 1:
        return []
    sizes = view.job.initial_local_batch_sizes
    text = " ".join(str(size) for size in sizes[:16]) + (" …" if len(sizes) > 16 else "")
    what = "waiting for the first window" if view.job.phase == "running" else "it ended and no window came"
    return [Text(f"{what}; local batch sizes {text}", "dim")]


def _bar(row: RankView, full: float, width: int) -> Text:
    training = row.metrics.training
    data, update = training.data_time_s, training.update_time_s
    if training.compute_time_s is None or training.sync_time_s is None:
        middle = [BarSegment(training.step_time_s - data - update, UNKNOWN, UNKNOWN_STYLE)]
    else:
        compute, wait = training.compute_time_s, training.sync_time_s
        middle = [BarSegment(compute, "█", COMPUTE_STYLE), BarSegment(wait, "▒", WAIT_STYLE)]
    segments = (BarSegment(data, "▓", DATA_STYLE), *middle, BarSegment(update, "░", UPDATE_STYLE))
    return stacked_bar(segments, full, width)


def _summary(rows: Sequence[RankView], num_shown: int) -> Text:
    times = [time * 1e3 for row in rows if (time := row.metrics.training.compute_time_s) is not None]
    return Text.assemble(
        (f"slowest {num_shown} of {len(rows)}", "dim"),
        f" · batch {_spread([row.metrics.training.local_batch_size for row in rows], '.0f')} · ",
        (f"compute {_spread(times, '.1f')} ms", COMPUTE_STYLE),
        (" (min/med/max)", "dim"),
    )


def _spread(values: Sequence[float], form: str) -> str:
    """Least, median and greatest of the values."""
    shown = (min(values), median(values), max(values)) if values else ()
    return "/".join(format(value, form) for value in shown) or UNKNOWN


def _total_time_s(row: RankView) -> float:
    """Seconds of a step: as measured, or the sum of its known parts where that is more."""
    training = row.metrics.training
    parts = (training.data_time_s, training.compute_time_s, training.sync_time_s, training.update_time_s)
    return max(training.step_time_s, sum(part for part in parts if part is not None))


def stacked_bar(segments: Sequence[BarSegment], full: float, width: int) -> Text:
    """Segments beside each other, `full` being the whole width; a segment that exists is never less than one cell."""
    if full <= 0 or width < 1:
        return Text(" " * max(0, width))
    bar = Text()
    used, total = 0, 0.0
    for segment in segments:
        total += max(0.0, segment.value)
        end = min(width, round(total / full * width))
        cells = max(end - used, 1 if segment.value / full * width >= 0.25 and used < width else 0)
        cells = min(cells, width - used)
        bar.append(segment.glyph * cells, segment.style)
        used += cells
    return bar.append(" " * (width - used))


# --- the terminal


async def watch(fleet: Fleet, wanted: str | None) -> None:
    """Draw the wanted job, or the newest that runs, until the person leaves."""
    console = Console()
    left = asyncio.Event()
    following = asyncio.create_task(fleet.follow())
    following.add_done_callback(lambda _: left.set())
    with _keys(left), Live(console=console, screen=True, auto_refresh=False) as live:
        while not left.is_set():
            news = fleet.news
            name = shown_job(fleet, wanted, time.time_ns())
            view = None if name is None else fleet.opened(name) or fleet.jobs[name]
            missing = NO_JOB if wanted is None else none_called(wanted, {})
            live.update(show(view, fleet.heartbeats, console, missing), refresh=True)
            await asyncio.sleep(MIN_INTERVAL_S)
            waiting = [asyncio.create_task(news.wait()), asyncio.create_task(left.wait())]
            await asyncio.wait(waiting, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
    following.cancel()
    try:
        await following
    except asyncio.CancelledError:
        return
    except BaseExceptionGroup as group:
        raise first_error(group) from group


def shown_job(fleet: Fleet, wanted: str | None, now_ns: int) -> str | None:
    """The job to show now: a job that died without a word gives way to another one that runs."""
    jobs = {name: view.job for name, view in fleet.jobs.items() if view.job is not None}
    silent = {name for name in jobs if fleet.jobs[name].phase(now_ns) == "silent"}
    return newest_job(jobs, wanted, silent)


def show(view: JobView | None, heartbeats: Heartbeats, console: Console, missing: str) -> Group:
    """The frame for the console's size now."""
    now_ns, now_s, size = time.time_ns(), time.monotonic(), console.size
    room = {"width": size.width, "height": size.height}
    return Group(*frame(view, heartbeats, missing=missing, now_ns=now_ns, now_s=now_s, **room))


@contextlib.contextmanager
def _keys(left: asyncio.Event) -> Iterator[None]:
    """Single keys without Enter, while the context lasts; nothing where standard input is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, lambda: left.set() if os.read(descriptor, 64) in QUIT_KEYS else None)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
