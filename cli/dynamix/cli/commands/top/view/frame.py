"""One frame of the view: the board as lines of text for a terminal of a given size. Pure."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.text import Text

from dynamix.cli.board.board import Board
from dynamix.cli.board.heartbeats import Heartbeats
from dynamix.cli.formatting import bar, curve, duration, number, percent, signed_count
from dynamix.cli.jobs import NO_JOB
from dynamix.schemas.messages.allocation import EXACT

from .rank_table import rank_lines

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
    board: Board | None,
    heartbeats: Heartbeats,
    *,
    now_ns: int,
    now_s: float,
    width: int,
    height: int,
    missing: str = NO_JOB,
) -> list[Text]:
    """At most `height` lines of at most `width` characters; `missing` says why there is no board.

    `now_ns` is the wall clock, for the age of the newest window; `now_s` the clock that `heartbeats` was given.
    """
    below = [_services(heartbeats, now_s)]
    if board is None or (board.job is None and not board.timeline.points):
        return _cut([*_empty(board, missing), Text(), *below], width, height)
    rule = Text("─" * width, "dim")
    lacking = _collectors(board, heartbeats, now_s)
    below = [rule, *_decision(board, width), *_reward(board, width), *_event(board), *_network(board), *lacking, *below]
    tiles = _tiles(board, width)[: max(2, height - len(below) - MIN_TABLE)]
    above = [_title(board, now_ns, width), rule, *tiles, rule]
    room = height - len(above) - len(below)
    return _cut([*above, *rank_lines(board, width, room), *below], width, height)


def _empty(board: Board | None, missing: str) -> list[Text]:
    what = missing if board is None else f"no message of the job {board.name} yet"
    return [
        *(Text(part, "bold") for part in what.split("; ")),
        Text("start one with:  dynamix train -- --standalone --nproc-per-node 4 train.py", "dim"),
    ]


def _title(board: Board, now_ns: int, width: int) -> Text:
    job = board.job
    phase = "ended" if job is None else board.phase(now_ns)
    left = Text.assemble((board.name, "bold"), "  ", PHASES[phase])
    parts = [f"window {board.window}" if board.window >= 0 else "no window yet"]
    if job is not None:
        nodes = f" on {len(job.nodes)} nodes" if len(job.nodes) > 1 else ""
        parts = [job.policy, *parts, f"{job.world_size} ranks{nodes}"]
        if job.phase == "ended" and job.end_reason:
            parts.append(job.end_reason)
    if board.generation:
        parts.append(f"restart {board.generation}")
    left.append("  " + " · ".join(parts), "default")
    age = _age(board, now_ns, running=phase != "ended")
    left.truncate(max(0, width - age.cell_len - 1), overflow="ellipsis")
    return left.append(" " * (width - left.cell_len - age.cell_len)).append_text(age)


def _age(board: Board, now_ns: int, *, running: bool) -> Text:
    if board.updated_ns == 0:
        return Text()
    age_s = max(0.0, (now_ns - board.updated_ns) / 1e9)
    return Text(
        f"{age_s:.1f} s ago" if age_s < 60 else f"{duration(age_s)} ago",
        "yellow" if running and age_s > STALE_AFTER_S else "dim",
    )


def _tiles(board: Board, width: int) -> list[Text]:
    """Metrics of the whole job, each with its curve."""
    metrics = board.metrics
    if metrics is None:
        return []
    sizes = board.local_batch_sizes
    rule = f" {board.job.global_batch}" if board.job else ""
    tiles = (
        ("throughput", f"{number(metrics.throughput)}/s", board.curve("throughput"), "green"),
        ("loss", number(metrics.loss), board.curve("loss"), "red"),
        ("step time", duration(metrics.step_time_s), board.curve("step_time_s"), "cyan"),
        ("accuracy", percent(metrics.accuracy), board.curve("accuracy"), "green"),
        ("global batch", f"{sum(sizes):,}{rule}", board.curve("global_batch_size"), "magenta"),
        ("held-out", percent(metrics.held_out_accuracy), board.curve("held_out_accuracy"), "green"),
        ("noise scale", number(metrics.noise_scale), board.curve("noise_scale"), "blue"),
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


def _decision(board: Board, width: int) -> Iterator[Text]:
    action, applied = board.action, board.applied
    if board.exchange != EXACT:
        yield _labelled("gradients", (board.exchange.label, "bold"))
    if action is None:
        why = f"none in {board.window + 1} windows: the arbitrator's log says why"
        yield _labelled(
            "decision", (why, "yellow") if board.lacks_decision else ("none yet: the initial sizes stay", "dim")
        )
        return
    version = f" v{action.policy_version}" if action.policy_version else ""
    by = f"  of window {action.window} by {action.policy}{version}"
    missing = ", inputs missing" if action.gap else ""
    yield _labelled("decision", (_changes(action.deltas), "bold"), (by, "dim"), (missing, "yellow"))
    room = max(1, width - LABEL_WIDTH)
    for at, line in enumerate(textwrap.wrap(board.reason, room, max_lines=MOST_REASON_LINES, placeholder=" …")):
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


def _reward(board: Board, width: int) -> Iterator[Text]:
    if (mean := board.mean_reward()) is None:
        return
    terms = "  ".join(f"{name.replace('_', ' ')} {value:+.3f}" for name, value in board.reward_terms().items())
    line = _labelled("reward", (f"{mean:.3f}", "bold"), f"  {board.formula}")
    if line.cell_len + len(terms) + 3 <= width:
        yield line.append(f":  {terms}", "dim")
    else:
        yield from (line, _labelled("", (terms.replace("  ", " "), "dim")))


def _event(board: Board) -> Iterator[Text]:
    if (event := board.event) is not None:
        where = f"  window {event.window}"
        yield _labelled("signature", (event.signature, "yellow"), f"  {event.explanation}", (where, "dim"))


def _network(board: Board) -> Iterator[Text]:
    """Where network metrics come from, and why not from a better probe."""
    if not (nodes := board.nodes.values()):
        return
    probes = Counter(node.probe for node in nodes)
    named = ", ".join(probe if len(probes) == 1 else f"{probe} on {count}" for probe, count in probes.items())
    note = next((f"  {node.probe_note}" for node in nodes if node.probe_note), "")
    num_lost = sum(node.num_readings_lost for node in nodes)
    lost = f"  {num_lost} readings lost" if num_lost else ""
    yield _labelled("network", named, (note, "dim"), (lost, "yellow"))


def _collectors(board: Board, heartbeats: Heartbeats, now_s: float) -> Iterator[Text]:
    """Nodes of the job that no collector measures."""
    if nodes := heartbeats.nodes_without_collector(board.unmeasured_nodes, now_s):
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
