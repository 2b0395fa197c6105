"""The table of ranks: batch sizes and times as bars; with more ranks than lines the slowest, and what all are like."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from rich.text import Text

from dynamix.cli.board.board import Board, RankRow

from .glyphs import UNKNOWN, Segment, duration, number, percent, signed_count, stacked_bar

MIN_BAR = 12
WAIT_STYLE, COMPUTE_STYLE, DATA_STYLE, UPDATE_STYLE = "yellow", "cyan", "magenta", "blue"
UNKNOWN_STYLE = "dim"
"""Of the part of a step that is computing or waiting, where nobody could tell."""
LEGEND = (("█ compute", COMPUTE_STYLE), ("▒ wait", WAIT_STYLE), ("▓ data", DATA_STYLE), ("░ update", UPDATE_STYLE))


class Column(NamedTuple):
    """One column; of those that do not fit the later ones in `COLUMNS` go first."""

    title: str
    width: int
    cell: Callable[[RankRow], Text]


def _pending(row: RankRow) -> Text:
    training = row.metrics.training
    if training.pending_local_batch_size == training.local_batch_size:
        return Text("")
    return Text(f"→{training.pending_local_batch_size}", "bold green")


def _reward(row: RankRow) -> Text:
    return Text(UNKNOWN if row.reward is None else f"{row.reward.reward:.3f}")


def _speed(row: RankRow) -> Text:
    training = row.metrics.training
    return Text(number(training.local_batch_size / training.compute_time_s) if training.compute_time_s else UNKNOWN)


RANK = Column("rank", 4, lambda row: Text(str(row.rank), "bold"))
NODE = Column("node", 12, lambda row: Text(row.node, "dim"))
BATCH = Column("batch", 5, lambda row: Text(str(row.metrics.training.local_batch_size), "bold"))
NEXT = Column("next", 5, _pending)
COMPUTE = Column("compute", 9, lambda row: Text(duration(row.metrics.training.compute_time_s), COMPUTE_STYLE))
WAIT = Column("wait", 9, lambda row: Text(duration(row.metrics.training.sync_time_s), WAIT_STYLE))
COLUMNS = (
    Column("reward", 7, _reward),
    Column("cpu", 5, lambda row: Text(number(row.metrics.system.cpu_time_ratio, 2))),
    Column(
        "resent", 6, lambda row: Text(UNKNOWN if row.metrics.network is None else str(row.metrics.network.retransmits))
    ),
    Column("samp/s", 7, _speed),
    Column("queued", 6, lambda row: Text(number(row.metrics.system.run_queue_wait_ratio, 2))),
    Column("loss", 7, lambda row: Text(number(row.metrics.training.loss))),
    Column("accuracy", 8, lambda row: Text(percent(row.metrics.training.accuracy))),
    Column("memory", 7, lambda row: Text(percent(row.metrics.system.memory_ratio))),
)
"""What is nice to have, dearest first."""


def table(board: Board, width: int, height: int) -> list[Text]:
    """Lines of the table: titles, rows, and a summary when not every rank has one; at most `height` lines."""
    rows = [row for _, row in sorted(board.ranks.items())]
    if not rows or height < 2:
        return _announced(board, height)
    right = _fitting(width - _left_width(board))
    full = max(_total(row) for row in rows)
    lines = [_titles(board, right, width)]
    shown, left_out = _chosen(rows, height - 1)
    lines += [_line(board, row, right, full, width) for row in shown]
    if left_out:
        lines.append(_summary(rows, len(shown)))
    return lines[:height]


def _announced(board: Board, height: int) -> list[Text]:
    """Before the first window: what the job said it would begin with."""
    if board.job is None or height < 1:
        return []
    sizes = board.job.initial_local_batch_sizes
    text = " ".join(str(size) for size in sizes[:16]) + (" …" if len(sizes) > 16 else "")
    return [Text(f"waiting for the first window; local batch sizes {text}", "dim")]


def _chosen(rows: Sequence[RankRow], height: int) -> tuple[list[RankRow], int]:
    """All rows if they fit, else the slowest, in rank order, and how many are left out."""
    if len(rows) <= height:
        return list(rows), 0
    slowest = sorted(rows, key=_slowness, reverse=True)[: max(0, height - 1)]
    return sorted(slowest, key=lambda row: row.rank), len(rows) - len(slowest)


def _slowness(row: RankRow) -> float:
    """What tells slow ranks: their own computing, or the whole step where it is not known apart."""
    training = row.metrics.training
    return training.step_time_s if training.compute_time_s is None else training.compute_time_s


def _left(board: Board) -> tuple[Column, ...]:
    several = len(board.nodes) > 1
    return (RANK, NODE, BATCH, NEXT) if several else (RANK, BATCH, NEXT)


def _left_width(board: Board) -> int:
    return sum(column.width + 1 for column in _left(board))


def _fitting(room: int) -> list[Column]:
    """Columns right of the bar: times first, then what else leaves the bar its least width."""
    chosen: list[Column] = []
    for column in (COMPUTE, WAIT, *COLUMNS):
        if sum(one.width + 1 for one in chosen) + column.width + 1 + MIN_BAR * (1 + len(chosen) // 3) > room:
            break
        chosen.append(column)
    return chosen


def _titles(board: Board, right: Sequence[Column], width: int) -> Text:
    bar_width = _bar_width(board, right, width)
    line = Text(style="dim")
    for column in _left(board):
        line.append(_title(column) + " ")
    legend, used = Text(), 0
    for label, style in LEGEND:
        if used + len(label) + 2 <= bar_width:
            legend.append(label + "  ", style)
            used += len(label) + 2
    line.append_text(legend).append(" " * (bar_width - used))
    for column in right:
        line.append(" " + _title(column))
    return line


def _title(column: Column) -> str:
    return column.title.ljust(column.width) if column is NODE else column.title.rjust(column.width)


def _line(board: Board, row: RankRow, right: Sequence[Column], full: float, width: int) -> Text:
    line = Text()
    for column in _left(board):
        line.append_text(_fit(column, row)).append(" ")
    line.append_text(_bar(row, full, _bar_width(board, right, width)))
    for column in right:
        line.append(" ").append_text(_fit(column, row))
    if row.window < board.window:
        line.stylize("dim")  # an older window than the newest: this node is behind
    return line


def _fit(column: Column, row: RankRow) -> Text:
    cell = column.cell(row)
    cell.truncate(column.width, overflow="ellipsis")
    pad = " " * (column.width - cell.cell_len)
    return cell.append(pad) if column is NODE else Text(pad).append_text(cell)


def _bar_width(board: Board, right: Sequence[Column], width: int) -> int:
    return max(0, width - _left_width(board) - sum(column.width + 1 for column in right))


def _bar(row: RankRow, full: float, width: int) -> Text:
    training = row.metrics.training
    data, update = training.data_time_s, training.update_time_s
    if training.compute_time_s is None or training.sync_time_s is None:
        middle = [Segment(training.step_time_s - data - update, UNKNOWN, UNKNOWN_STYLE)]
    else:
        compute, wait = training.compute_time_s, training.sync_time_s
        middle = [Segment(compute, "█", COMPUTE_STYLE), Segment(wait, "▒", WAIT_STYLE)]
    segments = (Segment(data, "▓", DATA_STYLE), *middle, Segment(update, "░", UPDATE_STYLE))
    return stacked_bar(segments, full, width)


def _total(row: RankRow) -> float:
    training = row.metrics.training
    parts = (training.data_time_s, training.compute_time_s, training.sync_time_s, training.update_time_s)
    return max(training.step_time_s, sum(part for part in parts if part is not None))


def _summary(rows: Sequence[RankRow], num_shown: int) -> Text:
    sizes = [row.metrics.training.local_batch_size for row in rows]
    times = [time for row in rows if (time := row.metrics.training.compute_time_s) is not None]
    three = (min(times), median(times), max(times)) if times else ()
    milliseconds = "/".join(f"{time * 1e3:.1f}" for time in three) or UNKNOWN
    return Text.assemble(
        (f"slowest {num_shown} of {len(rows)}", "dim"),
        f" · batch {min(sizes)}/{median(sizes):.0f}/{max(sizes)} · ",
        (f"compute {milliseconds} ms", COMPUTE_STYLE),
        (" (min/med/max)", "dim"),
    )


def changes(deltas: Sequence[int], most: int = 16) -> str:
    """An action's changes: each where they are few, else how many ranks got more and less."""
    if not any(deltas):
        return "no change"
    if len(deltas) <= most:
        return " ".join(signed_count(delta) for delta in deltas)
    more, less = sum(delta > 0 for delta in deltas), sum(delta < 0 for delta in deltas)
    return f"{more} ranks more, {less} less, {len(deltas) - more - less} the same"
