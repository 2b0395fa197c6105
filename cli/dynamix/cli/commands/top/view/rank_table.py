"""The table of ranks: batch sizes and times as bars; with more ranks than lines the slowest, and what all are like."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from rich.text import Text

from dynamix.cli.board.board import Board, BoardRank
from dynamix.cli.formatting import UNKNOWN, duration, number, percent

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
    cell: Callable[[BoardRank], Text]


class TableLayout(NamedTuple):
    """The columns around the bars, and what they leave for the bars."""

    left: Sequence[RankColumn]
    right: Sequence[RankColumn]
    bar_width: int


def _pending(row: BoardRank) -> Text:
    training = row.metrics.training
    if training.pending_local_batch_size == training.local_batch_size:
        return Text("")
    return Text(f"→{training.pending_local_batch_size}", "bold green")


def _reward(row: BoardRank) -> Text:
    return Text(UNKNOWN if row.reward is None else f"{row.reward.reward:.3f}")


def _speed(row: BoardRank) -> Text:
    training = row.metrics.training
    return Text(number(training.local_batch_size / training.compute_time_s) if training.compute_time_s else UNKNOWN)


RANK = RankColumn("rank", 4, lambda row: Text(str(row.rank), "bold"))
NODE = RankColumn("node", 12, lambda row: Text(row.node, "dim"))
BATCH = RankColumn("batch", 5, lambda row: Text(str(row.metrics.training.local_batch_size), "bold"))
NEXT = RankColumn("next", 5, _pending)
COMPUTE = RankColumn("compute", 9, lambda row: Text(duration(row.metrics.training.compute_time_s), COMPUTE_STYLE))
WAIT = RankColumn("wait", 9, lambda row: Text(duration(row.metrics.training.sync_time_s), WAIT_STYLE))
COLUMNS = (
    RankColumn("reward", 7, _reward),
    RankColumn("cpu", 5, lambda row: Text(number(row.metrics.system.cpu_time_ratio, 2))),
    RankColumn(
        "retrans", 7, lambda row: Text(UNKNOWN if row.metrics.network is None else str(row.metrics.network.retransmits))
    ),
    RankColumn("samp/s", 7, _speed),
    RankColumn("queued", 6, lambda row: Text(number(row.metrics.system.run_queue_wait_ratio, 2))),
    RankColumn("loss", 7, lambda row: Text(number(row.metrics.training.loss))),
    RankColumn("accuracy", 8, lambda row: Text(percent(row.metrics.training.accuracy))),
    RankColumn("memory", 7, lambda row: Text(percent(row.metrics.system.memory_ratio))),
)
"""Shown while there is room, the most important first."""


def rank_lines(board: Board, width: int, height: int) -> list[Text]:
    """Lines of the table: titles, rows, and a summary when not every rank has one; at most `height` lines."""
    rows = [row for _, row in sorted(board.ranks.items())]
    if not rows or height < 2:
        return _announced(board, height)
    layout = _layout(board, width)
    full = max(map(_total_time_s, rows))
    shown = rows if len(rows) < height else _slowest(rows, height - 2)
    lines = [_titles(layout), *(_line(board, row, layout, full) for row in shown)]
    if len(shown) < len(rows):
        lines.append(_summary(rows, len(shown)))
    return lines[:height]


def _announced(board: Board, height: int) -> list[Text]:
    """Without a window: what the job said it would begin with."""
    if board.job is None or height < 1:
        return []
    sizes = board.job.initial_local_batch_sizes
    text = " ".join(str(size) for size in sizes[:16]) + (" …" if len(sizes) > 16 else "")
    what = "waiting for the first window" if board.job.phase == "running" else "it ended and no window came"
    return [Text(f"{what}; local batch sizes {text}", "dim")]


def _layout(board: Board, width: int) -> TableLayout:
    """Right of the bar times come first, then what else leaves the bar its least width."""
    left = (RANK, NODE, BATCH, NEXT) if len(board.nodes) > 1 else (RANK, BATCH, NEXT)
    room = width - sum(column.width + 1 for column in left)
    right: list[RankColumn] = []
    for column in (COMPUTE, WAIT, *COLUMNS):
        if column.width + 1 + MIN_BAR * (1 + len(right) // 3) > room:
            break
        right.append(column)
        room -= column.width + 1
    return TableLayout(left, right, max(0, room))


def _titles(layout: TableLayout) -> Text:
    line = Text(style="dim")
    for column in layout.left:
        line.append(_title(column) + " ")
    legend, used = Text(), 0
    for label, style in LEGEND:
        if used + len(label) + 2 <= layout.bar_width:
            legend.append(label + "  ", style)
            used += len(label) + 2
    line.append_text(legend).append(" " * (layout.bar_width - used))
    for column in layout.right:
        line.append(" " + _title(column))
    return line


def _title(column: RankColumn) -> str:
    return column.title.ljust(column.width) if column is NODE else column.title.rjust(column.width)


def _line(board: Board, row: BoardRank, layout: TableLayout, full: float) -> Text:
    line = Text()
    for column in layout.left:
        line.append_text(_fit(column, row)).append(" ")
    line.append_text(_bar(row, full, layout.bar_width))
    for column in layout.right:
        line.append(" ").append_text(_fit(column, row))
    if row.window < board.window:
        line.stylize("dim")  # an older window than the newest: this node is behind
    return line


def _fit(column: RankColumn, row: BoardRank) -> Text:
    cell = column.cell(row)
    cell.truncate(column.width, overflow="ellipsis")
    pad = " " * (column.width - cell.cell_len)
    return cell.append(pad) if column is NODE else Text(pad).append_text(cell)


def _bar(row: BoardRank, full: float, width: int) -> Text:
    training = row.metrics.training
    data, update = training.data_time_s, training.update_time_s
    if training.compute_time_s is None or training.sync_time_s is None:
        middle = [BarSegment(training.step_time_s - data - update, UNKNOWN, UNKNOWN_STYLE)]
    else:
        compute, wait = training.compute_time_s, training.sync_time_s
        middle = [BarSegment(compute, "█", COMPUTE_STYLE), BarSegment(wait, "▒", WAIT_STYLE)]
    segments = (BarSegment(data, "▓", DATA_STYLE), *middle, BarSegment(update, "░", UPDATE_STYLE))
    return stacked_bar(segments, full, width)


def _summary(rows: Sequence[BoardRank], num_shown: int) -> Text:
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


def _busy_time_s(row: BoardRank) -> float:
    """What tells slow ranks apart: their compute time, or the whole step where it is not known."""
    training = row.metrics.training
    return training.step_time_s if training.compute_time_s is None else training.compute_time_s


def _total_time_s(row: BoardRank) -> float:
    """Seconds of a step: as measured, or the sum of its known parts where that is more."""
    training = row.metrics.training
    parts = (training.data_time_s, training.compute_time_s, training.sync_time_s, training.update_time_s)
    return max(training.step_time_s, sum(part for part in parts if part is not None))


def _slowest(rows: Sequence[BoardRank], count: int) -> list[BoardRank]:
    """The `count` slowest ranks, in rank order."""
    return sorted(sorted(rows, key=_busy_time_s, reverse=True)[: max(0, count)], key=lambda row: row.rank)


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
