"""What an operator should look at, from boards and heartbeats. Pure: the caller passes the time."""

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from dynamix.cli.board.board import Board
from dynamix.cli.board.heartbeats import Heartbeats
from dynamix.cli.formatting import duration

SILENT_ALARM_S = 3600.0
"""A job that has been silent for longer is history, and no alarm any more."""

Level = Literal["error", "warning"]


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be."""

    level: Level
    subject: str
    """The job or service that it is about."""
    text: str


def alarms_of(boards: Iterable[Board], heartbeats: Heartbeats, *, now_ns: int, now_s: float) -> list[Alarm]:
    """Alarms of the services first, then of the jobs that have not ended; `now_s` on the clock of the heartbeats."""
    found = list(_of_services(heartbeats, now_s))
    for board in boards:
        found += alarms_of_job(board, now_ns)
        if board.phase(now_ns) == "running":
            for node in heartbeats.nodes_without_collector(board.unmeasured_nodes, now_s):
                text = f"no collector on {node}: start it there, or set the same DYNAMIX_NODE for it and the ranks"
                found.append(Alarm(level="error", subject=board.name, text=text))
    return found


def alarms_of_job(board: Board, now_ns: int) -> Iterator[Alarm]:
    """Alarms of one job; none of one that has ended or has been silent for an hour."""
    phase, name = board.phase(now_ns), board.name
    silent_s = (now_ns - board.heard_ns) / 1e9
    if phase == "ended" or (phase == "silent" and silent_s > SILENT_ALARM_S):
        return
    if phase == "silent":
        text = f"no message for {duration(silent_s)}, and no end: its processes were probably killed"
        yield Alarm(level="error", subject=name, text=text)
        return
    for _, event in board.events:
        level: Level = "error" if event.signature == "log-refused" else "warning"
        yield Alarm(level=level, subject=name, text=f"{event.signature}: {event.explanation} (window {event.window})")
    if board.lacks_decision:
        text = f"no decision in {board.window + 1} windows: the arbitrator's log says why"
        yield Alarm(level="warning", subject=name, text=text)
    refused = {} if board.applied is None else board.applied.num_refused
    if count := sum(refused.values()):
        reasons = ", ".join(f"{number} {why}" for why, number in refused.items() if number)
        yield Alarm(level="warning", subject=name, text=f"the trainer refused {count} decisions: {reasons}")
    for node in board.nodes.values():
        for count, what in (
            (node.num_readings_lost, "windows without kernel counters, since reports came late"),
            (node.num_reports_dropped, "reports dropped, since the bus was unavailable"),
            (len(node.refused_pids), "processes that were not what their rank said, and were not read"),
        ):
            if count:
                yield Alarm(level="warning", subject=name, text=f"{node.node}: {count} {what}")


def _of_services(heartbeats: Heartbeats, now_s: float) -> Iterator[Alarm]:
    for service in heartbeats.missing(now_s):
        yield Alarm(level="error", subject=service, text="no heartbeat: without this service no job is steered")
    for counter, level, what in (
        ("refused_logs", "error", "logs of decisions were refused: their jobs are not steered"),
        ("dead_letters", "warning", "messages could not be used: stream DEAD has them, with the reasons"),
    ):
        if count := heartbeats.count(counter, now_s):
            yield Alarm(level="error" if level == "error" else "warning", subject="services", text=f"{count} {what}")
