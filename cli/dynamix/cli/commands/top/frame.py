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

from dynamix.cli.documents import alarms_of
from dynamix.cli.fleet import Fleet
from dynamix.cli.jobs import NO_JOB, none_called
from dynamix.cli.services import Heartbeats
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
MOST_REASON_LINES = 3
MOST_ALARMS = 5
MIN_TABLE = 8
"""Lines reserved for the table of ranks; curves get what is left."""
MIN_BAR = 12
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
    """At most `height` lines of at most `width` characters; `missing` is shown where there is no view.

    `now_ns` is the wall clock, for the age of the newest window; `now_s` the clock that `heartbeats` was given.
    """
    below = list(_alarms(view, heartbeats, now_ns, now_s))
    if view is None or (view.job is None and not view.windows):
        what = missing if view is None else f"no message of the job {view.name} yet"
        start = "start one with:  dynamix train -- --standalone --nproc-per-node 4 train.py"
        lines = [*(Text(part, "bold") for part in what.split("; ")), Text(start, "dim"), Text(), *below]
    else:
        rule = Text("─" * width, "dim")
        below = [rule, *_decision(view, width), *_rewards_and_probes(view), *below]
        tiles = _tiles(view, width)[: max(2, height - len(below) - MIN_TABLE)]
        above = [_title(view, now_ns, width), rule, *tiles, rule]
        lines = [*above, *_ranks(view, width, height - len(above) - len(below)), *below]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def _title(view: JobView, now_ns: int, width: int) -> Text:
    job = view.job
    phase = "ended" if job is None else view.phase(now_ns)
    parts = [f"window {view.window}" if view.window >= 0 else "no window yet"]
    if job is not None:
        nodes = f" on {len(job.nodes)} nodes" if len(job.nodes) > 1 else ""
        parts = [job.policy, *parts, f"{job.world_size} ranks{nodes}"]
        parts += [job.end_reason] if job.phase == "ended" and job.end_reason else []
    if view.generation:
        parts.append(f"restart {view.generation}")
    left = Text.assemble((view.name, "bold"), "  ", PHASES[phase], "  ", " · ".join(parts))
    if view.updated_ns == 0:
        return left
    age_s = max(0.0, (now_ns - view.updated_ns) / 1e9)
    text = f"{age_s:.1f} s ago" if age_s < 60 else f"{duration(age_s)} ago"
    left.truncate(max(0, width - len(text) - 1), overflow="ellipsis")
    style = "yellow" if phase != "ended" and age_s > STALE_AFTER_S else "dim"
    return left.append(" " * (width - left.cell_len - len(text))).append(text, style)


def _tiles(view: JobView, width: int) -> list[Text]:
    """Metrics of the whole job, each with its curve."""
    metrics = view.metrics
    if metrics is None:
        return []
    rule = f" {view.job.global_batch}" if view.job else ""
    tiles = (
        ("throughput", f"{number(metrics.throughput)}/s", "throughput", "green"),
        ("loss", number(metrics.loss), "loss", "red"),
        ("step time", duration(metrics.step_time_s), "step_time_s", "cyan"),
        ("accuracy", percent(metrics.accuracy), "accuracy", "green"),
        ("global batch", f"{sum(view.local_batch_sizes):,}{rule}", "global_batch_size", "magenta"),
        ("held-out", percent(metrics.held_out_accuracy), "held_out_accuracy", "green"),
        ("noise scale", number(metrics.noise_scale), "noise_scale", "blue"),
        ("progress", percent(metrics.progress), "progress", "default"),
    )
    columns = 2 if width >= TWO_COLUMNS_FROM else 1
    room = (width - 2 * (columns - 1)) // columns
    cells = []
    for label, value, field, style in tiles:
        shown = f"{value} ".ljust(VALUE)
        left = room - LABEL - len(shown)
        drawn = bar(metrics.progress or 0.0, left) if field == "progress" else curve(view.curve(field), left)
        cell = Text.assemble((label.ljust(LABEL), "dim"), (shown, "bold"), (drawn, style))
        cells.append(cell.append(" " * max(0, room - cell.cell_len)))
    return [Text("  ").join(cells[index : index + columns]) for index in range(0, len(cells), columns)]


def _decision(view: JobView, width: int) -> Iterator[Text]:
    action, applied = view.action, view.applied
    if view.exchange != EXACT:
        yield _labelled("gradients", (view.exchange.label, "bold"))
    if action is None:
        yield _labelled("decision", ("none yet: the initial sizes stay", "dim"))
        return
    deltas = action.deltas
    more, less = sum(delta > 0 for delta in deltas), sum(delta < 0 for delta in deltas)
    if not any(deltas):
        changes = "no change"
    elif len(deltas) <= SHOWN_CHANGES:
        changes = " ".join(map(signed_count, deltas))
    else:
        changes = f"{more} ranks more, {less} less, {len(deltas) - more - less} the same"
    version = f" v{action.policy_version}" if action.policy_version else ""
    by = f"  of window {action.window} by {action.policy}{version}"
    yield _labelled("decision", (changes, "bold"), (by, "dim"), (", inputs missing" if action.gap else "", "yellow"))
    room = max(1, width - LABEL)
    for at, line in enumerate(textwrap.wrap(action.reason, room, max_lines=MOST_REASON_LINES, placeholder=" …")):
        yield _labelled("" if at else "because", (line, "dim"))
    if applied is not None:
        adopted = f"of window {applied.decided_window}, from window {applied.effective_window} on"
        yield _labelled("adopted", (adopted, "dim"))


def _rewards_and_probes(view: JobView) -> Iterator[Text]:
    if (mean := view.mean_reward()) is not None:
        terms = "  ".join(f"{name.replace('_', ' ')} {value:+.3f}" for name, value in view.reward_terms().items())
        yield _labelled("reward", (f"{mean:.3f}", "bold"), f"  {view.formula}", (f":  {terms}" if terms else "", "dim"))
    if nodes := view.nodes.values():
        probes = Counter(node.probe for node in nodes)
        named = ", ".join(probe if len(probes) == 1 else f"{probe} on {count}" for probe, count in probes.items())
        note = next((f"  {node.probe_note}" for node in nodes if node.probe_note), "")
        yield _labelled("network", named, (note, "dim"))


def _alarms(view: JobView | None, heartbeats: Heartbeats, now_ns: int, now_s: float) -> Iterator[Text]:
    """The alarms of the page, and the services by their heartbeats."""
    alarms = alarms_of([] if view is None else [view], heartbeats, now_ns=now_ns, now_s=now_s)
    for alarm in alarms[:MOST_ALARMS]:
        about = "" if view is not None and alarm.subject == view.name else f"{alarm.subject}: "
        yield _labelled(alarm.level, (about + alarm.text, "red" if alarm.level == "error" else "yellow"))
    if len(alarms) > MOST_ALARMS:
        yield _labelled("", f"and {len(alarms) - MOST_ALARMS} more: `dynamix dashboard` shows all")
    services = Text()
    for beat in heartbeats.recent(now_s):
        late = beat.is_late(now_s)
        where = f" {beat.live.node}" if beat.live.node and beat.live.service == "collector" else ""
        services.append("○ " if late else "● ", "red" if late else "green").append(f"{beat.live.service}{where}  ")
    yield _labelled("services", services)


def _labelled(label: str, *parts: Text | str | tuple[str, str]) -> Text:
    return Text.assemble((label.ljust(LABEL), "dim"), *parts)


# --- the table of ranks

DATA, COMPUTE, WAIT, UPDATE = ("▓", "magenta"), ("█", "cyan"), ("▒", "yellow"), ("░", "blue")
UNDIVIDED = ("-", "dim")
"""The part of a step that was computing or waiting, where the two could not be told apart."""
LEGEND = "█ compute  ▒ wait  ▓ data  ░ update"


class RankColumn(NamedTuple):
    """A column of the table; where not all fit, the last ones of `COLUMNS` are left out."""

    title: str
    width: int
    cell: Callable[[RankView], str]
    style: str = ""


def _size(row: RankView) -> str:
    now, pending = row.metrics.training.local_batch_size, row.metrics.training.pending_local_batch_size
    return str(now) if now == pending else f"{now}→{pending}"


LEFT = (
    RankColumn("rank", 4, lambda row: str(row.rank), "bold"),
    RankColumn("node", 12, lambda row: row.node, "dim"),
    RankColumn("batch", 9, _size, "bold"),
)
COLUMNS = (
    RankColumn("compute", 9, lambda row: duration(row.metrics.training.compute_time_s), COMPUTE[1]),
    RankColumn("wait", 9, lambda row: duration(row.metrics.training.sync_time_s), WAIT[1]),
    RankColumn("reward", 7, lambda row: UNKNOWN if row.reward is None else f"{row.reward.reward:.3f}"),
    RankColumn("cpu", 5, lambda row: number(row.metrics.system.cpu_time_ratio, 2)),
    RankColumn("retrans", 7, lambda row: str(row.metrics.network.retransmits) if row.metrics.network else UNKNOWN),
    RankColumn("queued", 6, lambda row: number(row.metrics.system.run_queue_wait_ratio, 2)),
    RankColumn("loss", 7, lambda row: number(row.metrics.training.loss)),
    RankColumn("accuracy", 8, lambda row: percent(row.metrics.training.accuracy)),
    RankColumn("memory", 7, lambda row: percent(row.metrics.system.memory_ratio)),
)
"""Shown while there is room, the most important first."""


def _ranks(view: JobView, width: int, height: int) -> list[Text]:
    """Titles, rows, and a summary when not every rank has one; at most `height` lines."""
    rows = [row for _, row in sorted(view.ranks.items())]
    if not rows:
        sizes = view.local_batch_sizes
        text = " ".join(map(str, sizes[:16])) + (" …" if len(sizes) > 16 else "")
        ended = view.job is not None and view.job.phase == "ended"
        what = "it ended and no window came" if ended else "waiting for the first window"
        return [Text(f"{what}; local batch sizes {text}", "dim")][: max(0, height)]
    left = [column for column in LEFT if column.title != "node" or len(view.nodes) > 1]
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
    full = max(sum(seconds for seconds, *_ in _segments(row)) for row in rows)
    titles = " ".join(f"{column.title:>{column.width}}" for column in left)
    lines = [Text(f"{titles} {LEGEND:<{room}.{room}}" + "".join(f" {one.title:>{one.width}}" for one in right), "dim")]
    for row in shown:
        line = Text()
        for column in left:
            line.append(f"{column.cell(row):>{column.width}.{column.width}}", column.style).append(" ")
        line.append_text(stacked_bar(_segments(row), full, room))
        for column in right:
            line.append(f" {column.cell(row):>{column.width}.{column.width}}", column.style)
        if row.window < view.window:
            line.stylize("dim")  # an older window than the newest: this node is behind
        lines.append(line)
    if len(shown) < len(rows):
        batches = [row.metrics.training.local_batch_size for row in rows]
        times = [row.busy_time_s * 1e3 for row in rows]
        lines.append(
            Text(
                f"slowest {len(shown)} of {len(rows)} · batch {min(batches)}/{median(batches):.0f}/{max(batches)} · "
                f"compute {min(times):.1f}/{median(times):.1f}/{max(times):.1f} ms (min/med/max)",
                "dim",
            )
        )
    return lines[: max(0, height)]


def _segments(row: RankView) -> list[tuple[float, str, str]]:
    """Seconds, glyph and style of the parts of a step."""
    training = row.metrics.training
    data, update = training.data_time_s, training.update_time_s
    if training.compute_time_s is None or training.sync_time_s is None:
        middle = [(max(0.0, training.step_time_s - data - update), *UNDIVIDED)]
    else:
        middle = [(training.compute_time_s, *COMPUTE), (training.sync_time_s, *WAIT)]
    return [(data, *DATA), *middle, (update, *UPDATE)]


def stacked_bar(segments: Sequence[tuple[float, str, str]], full: float, width: int) -> Text:
    """Seconds as segments beside each other, each of its glyph and style; `full` seconds are the whole width."""
    drawn, total_s = Text(), 0.0
    for seconds, glyph, style in segments:
        total_s += seconds
        end = min(width, round(total_s / full * width)) if full > 0 else 0
        drawn.append(glyph * (end - drawn.cell_len), style)
    return drawn.append(" " * (width - drawn.cell_len))


# --- the terminal


async def watch(fleet: Fleet, wanted: str | None) -> None:
    """Draw the wanted job, or the newest that runs, until the person leaves."""
    console, left = Console(), asyncio.Event()
    missing = NO_JOB if wanted is None else none_called(wanted, {})
    async with fleet.following():
        with _keys(left), Live(console=console, screen=True, auto_refresh=False) as live:
            while not left.is_set():
                news = fleet.news
                name = fleet.newest(time.time_ns())
                view = None if name is None else fleet.opened(name) or fleet.jobs[name]
                live.update(show(view, fleet.heartbeats, console, missing), refresh=True)
                await asyncio.sleep(MIN_INTERVAL_S)
                waiting = [asyncio.create_task(news.wait()), asyncio.create_task(left.wait())]
                await asyncio.wait(waiting, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in waiting:
                    task.cancel()


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
