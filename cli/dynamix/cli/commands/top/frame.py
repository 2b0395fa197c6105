"""The screen of `dynamix top`: a job for a terminal of any size, redrawn on each change."""

import asyncio
import contextlib
import os
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from dynamix.cli.documents import alarms_of
from dynamix.cli.fleet import Fleet
from dynamix.cli.jobs import NO_JOB, none_called
from dynamix.cli.services import Heartbeats
from dynamix.cli.terminal import UNKNOWN, bar, curve, duration, number, percent
from dynamix.recording.job_view import JobView, RankView
from dynamix.schemas.messages.allocation import EXACT

MIN_INTERVAL_S = 0.2
"""Frames are no closer than this, however fast windows come."""
TICK_S = 1.0
"""Without news a frame is drawn for the ages in it."""
QUIT_KEYS = (b"q", b"Q", b"\x1b", b"")
"""Escape alone, not an arrow's sequence; nothing read is a terminal that is gone."""
TWO_COLUMNS_FROM = 72
LABEL = 12
MOST_ALARMS = 5
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
    console: Console,
    *,
    now_ns: int,
    now_s: float,
    missing: str = NO_JOB,
) -> Group:
    """A job for the console's size, or `missing` where there is no view; ranks get the lines that the rest leaves.

    `now_ns` is the wall clock, for the age of the newest window; `now_s` the clock that `heartbeats` was given.
    """
    below = Table.grid(padding=(0, 1))
    below.add_column(style="dim", width=LABEL)
    below.add_column()
    if view is None or (view.job is None and not view.windows):
        what = missing if view is None else f"no message of the job {view.name} yet"
        start = Text("start one with:  dynamix train -- --standalone --nproc-per-node 4 train.py\n", "dim")
        _add_alarms(below, view, heartbeats, now_ns, now_s)
        return Group(*(Text(part, "bold") for part in what.split("; ")), start, below)
    _add_decision(below, view)
    _add_alarms(below, view, heartbeats, now_ns, now_s)
    rule = Rule(style="dim")
    job = view.job
    phase = "ended" if job is None else view.phase(now_ns)
    parts = [f"window {view.window}" if view.window >= 0 else "no window yet"]
    if job is not None:
        nodes = f" on {len(job.nodes)} nodes" if len(job.nodes) > 1 else ""
        parts = [job.policy, *parts, f"{job.world_size} ranks{nodes}"]
        parts += [job.end_reason] if job.phase == "ended" and job.end_reason not in {"", "left"} else []
    if view.generation:
        parts.append(f"restart {view.generation}")
    age_s = max(0.0, (now_ns - view.updated_ns) / 1e9)
    age = f"{duration(age_s)} ago" if view.updated_ns else ""
    title = Table.grid(expand=True, padding=(0, 1))
    title.add_column(no_wrap=True, overflow="ellipsis")
    stale = phase != "ended" and age_s > STALE_AFTER_S
    title.add_column(justify="right", min_width=len(age), style="yellow" if stale else "dim")
    title.add_row(Text.assemble((view.name, "bold"), "  ", PHASES[phase], "  ", " · ".join(parts)), age)
    above: list[RenderableType] = [title, rule, _tiles(view, console.width), rule]
    used = sum(len(console.render_lines(part)) for part in (*above, rule, below))
    return Group(*above, _ranks(view, console.width, console.height - used), rule, below)


class Fill:
    """Text that is made for the width that its column gets."""

    def __init__(self, make: Callable[[int], str | Text], style: str = "") -> None:
        self._make, self._style = make, style

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        made = self._make(options.max_width)
        yield Text(made, self._style) if isinstance(made, str) else made


def _tiles(view: JobView, width: int) -> Table:
    """Metrics of the whole job, each with its curve."""
    grid = Table.grid(padding=(0, 1), expand=True)
    if (metrics := view.metrics) is None:
        return grid
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
    for _ in range(columns):
        grid.add_column(width=LABEL, style="dim", no_wrap=True)
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(ratio=1, no_wrap=True)
    cells: list[RenderableType] = []
    for label, value, field, style in tiles:
        drawn = (
            (lambda room: bar(metrics.progress or 0.0, room))
            if field == "progress"
            else partial(curve, view.curve(field))
        )
        cells += [label, value, Fill(drawn, style)]
    for first in range(0, len(cells), 3 * columns):
        grid.add_row(*cells[first : first + 3 * columns])
    return grid


def _add_decision(below: Table, view: JobView) -> None:
    """The exchange, the newest decision and the adopted one, the rewards, and the probes."""
    action, applied = view.action, view.applied
    if view.exchange != EXACT:
        below.add_row("gradients", Text(view.exchange.label, "bold"))
    if action is None:
        below.add_row("decision", Text("none yet: the initial sizes stay", "dim"))
    else:
        deltas = action.deltas
        more, less = sum(delta > 0 for delta in deltas), sum(delta < 0 for delta in deltas)
        changes = f"{more} ranks more, {less} less, {len(deltas) - more - less} the same"
        if len(deltas) <= SHOWN_CHANGES:
            changes = " ".join(f"{delta:+d}" if delta else "·" for delta in deltas)
        version = f" v{action.policy_version}" if action.policy_version else ""
        by = (f"  of window {action.window} by {action.policy}{version}", "dim")
        gap = (", inputs missing" if action.gap else "", "yellow")
        below.add_row("decision", Text.assemble((changes if any(deltas) else "no change", "bold"), by, gap))
        if action.reason:
            below.add_row("because", Text(action.reason, "dim"))
    if applied is not None:
        adopted = f"of window {applied.decided_window}, from window {applied.effective_window} on"
        below.add_row("adopted", Text(adopted, "dim"))
    rewarded = view.rewarded
    if (mean := rewarded.mean_reward()) is not None:
        terms = "  ".join(f"{name.replace('_', ' ')} {value:+.3f}" for name, value in rewarded.reward_terms().items())
        below.add_row("reward", Text.assemble((f"{mean:.3f}", "bold"), f"  {rewarded.formula}", (f":  {terms}", "dim")))
    if nodes := view.nodes.values():
        probes = Counter(node.probe for node in nodes)
        named = ", ".join(probe if len(probes) == 1 else f"{probe} on {count}" for probe, count in probes.items())
        note = next((f"  {node.probe_note}" for node in nodes if node.probe_note), "")
        below.add_row("network", Text.assemble(named, (note, "dim")))


def _add_alarms(below: Table, view: JobView | None, heartbeats: Heartbeats, now_ns: int, now_s: float) -> None:
    """The alarms of the page, and the services by their heartbeats."""
    alarms = alarms_of([] if view is None else [view], heartbeats, now_ns=now_ns, now_s=now_s)
    for alarm in alarms[:MOST_ALARMS]:
        about = "" if view is not None and alarm.subject == view.name else f"{alarm.subject}: "
        below.add_row(alarm.level, Text(about + alarm.text, "red" if alarm.level == "error" else "yellow"))
    if len(alarms) > MOST_ALARMS:
        below.add_row("", f"and {len(alarms) - MOST_ALARMS} more: `dynamix dashboard` shows all")
    services = Text()
    for beat in heartbeats.recent(now_s):
        late = beat.is_late(now_s)
        where = f" {beat.live.node}" if beat.live.node and beat.live.service == "collector" else ""
        services.append("○ " if late else "● ", "red" if late else "green").append(f"{beat.live.service}{where}  ")
    below.add_row("services", services)


# --- the table of ranks

DATA, COMPUTE, WAIT, UPDATE = ("▓", "magenta"), ("█", "cyan"), ("▒", "yellow"), ("░", "blue")
UNDIVIDED = ("-", "dim")
"""The part of a step that was computing or waiting, where the two could not be told apart."""
LEGEND = "█ compute  ▒ wait  ▓ data  ░ update"


COLUMNS: dict[str, tuple[str, Callable[[RankView], str]]] = {
    "compute": (COMPUTE[1], lambda row: duration(row.metrics.training.compute_time_s)),
    "wait": (WAIT[1], lambda row: duration(row.metrics.training.sync_time_s)),
    "reward": ("", lambda row: UNKNOWN if row.reward is None else f"{row.reward.reward:.3f}"),
    "cpu": ("", lambda row: number(row.metrics.system.cpu_time_ratio, 2)),
    "retrans": ("", lambda row: str(row.metrics.network.retransmits) if row.metrics.network else UNKNOWN),
    "queued": ("", lambda row: number(row.metrics.system.run_queue_wait_ratio, 2)),
    "loss": ("", lambda row: number(row.metrics.training.loss)),
    "accuracy": ("", lambda row: percent(row.metrics.training.accuracy)),
    "memory": ("", lambda row: percent(row.metrics.system.memory_ratio)),
}
"""Style and text of what is shown of a rank while there is room, the most important first."""
LEFT_WIDTH, COLUMN_WIDTH = 50, 9


def _ranks(view: JobView, width: int, height: int) -> RenderableType:
    """A row for each rank; where they do not fit into `height` lines, for the slowest, and a summary."""
    rows = [row for _, row in sorted(view.ranks.items())]
    if not rows:
        sizes = view.local_batch_sizes
        text = " ".join(map(str, sizes[:16])) + (" …" if len(sizes) > 16 else "")
        ended = view.job is not None and view.job.phase == "ended"
        what = "it ended and no window came" if ended else "waiting for the first window"
        return Text(f"{what}; local batch sizes {text}", "dim")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", expand=True)
    several = len(view.nodes) > 1
    table.add_column("rank", style="bold", justify="right", no_wrap=True)
    if several:
        table.add_column("node", style="dim", no_wrap=True, max_width=12)
    table.add_column("batch", style="bold", justify="right", no_wrap=True)
    table.add_column(LEGEND, ratio=1, no_wrap=True)
    right = list(COLUMNS.items())[: max(0, (width - LEFT_WIDTH) // COLUMN_WIDTH)]
    for title, (style, _) in right:
        table.add_column(title, style=style, justify="right", no_wrap=True)
    shown = rows
    if len(rows) >= height:
        slowest = sorted(rows, key=lambda row: row.busy_time_s, reverse=True)[: max(1, height - 2)]
        shown = sorted(slowest, key=lambda row: row.rank)
    full = max(sum(seconds for seconds, *_ in _segments(row)) for row in rows)
    for row in shown:
        drawn = Fill(partial(stacked_bar, _segments(row), full))
        size, pending = row.metrics.training.local_batch_size, row.metrics.training.pending_local_batch_size
        left = [str(row.rank), *([row.node] if several else []), f"{size}" + ("" if size == pending else f"→{pending}")]
        behind = "dim" if row.window < view.window else ""  # an older window than the newest
        table.add_row(*left, drawn, *(cell(row) for _, (_, cell) in right), style=behind)
    if len(shown) == len(rows):
        return table
    batches = [row.metrics.training.local_batch_size for row in rows]
    times = [row.busy_time_s * 1e3 for row in rows]
    summary = (
        f"slowest {len(shown)} of {len(rows)} · batch {min(batches)}/{median(batches):.0f}/{max(batches)} · "
        f"compute {min(times):.1f}/{median(times):.1f}/{max(times):.1f} ms (min/med/max)"
    )
    return Group(table, Text(summary, "dim"))


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
    async with fleet.following(), contextlib.AsyncExitStack() as stack:
        if sys.stdin.isatty():  # single keys without Enter
            descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
            stack.callback(termios.tcsetattr, descriptor, termios.TCSADRAIN, termios.tcgetattr(descriptor))
            tty.setcbreak(descriptor)
            loop.add_reader(descriptor, lambda: left.set() if os.read(descriptor, 64) in QUIT_KEYS else None)
            stack.callback(loop.remove_reader, descriptor)
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        while not left.is_set():
            news = fleet.news
            name = fleet.newest(time.time_ns())
            view = None if name is None else fleet.opened(name) or fleet.jobs[name]
            now_ns, now_s = time.time_ns(), time.monotonic()
            shown = frame(view, fleet.heartbeats, console, now_ns=now_ns, now_s=now_s, missing=missing)
            live.update(shown, refresh=True)
            await asyncio.sleep(MIN_INTERVAL_S)
            waiting = [asyncio.create_task(news.wait()), asyncio.create_task(left.wait())]
            await asyncio.wait(waiting, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
