"""Jobs, their windows and alarms as JSON documents: for the page, `top --json` and `inspect --json`.

Pure: the caller passes the time. Change here what is shown of a job; units are in the names.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from dynamix.recording.capture import CaptureReader
from dynamix.recording.job_view import JobView, Window
from dynamix.schemas.messages import Message

from .output import Document, document_of
from .services import NOT_STORED, Heartbeats
from .terminal import duration

MOST_RANKS = 64
"""On the page, ranks that are shown one by one: of a larger job the slowest, and in curves minimum, median, maximum."""
MOST_WINDOWS = 5000
"""Windows of a capture on the page: the newest ones."""
PRIVATE = ("carry", "profile", "logprobs", "values", "job")
"""Fields of an action that are the policy's own, or known."""


# --- jobs


def job_document(view: JobView, now_ns: int, *, most_ranks: int | None = None) -> Document:
    """The specification, and the newest metrics, decision, rewards and signatures; at most the `most_ranks` slowest.

    All ranks wait at least the time of the communication; what a rank waits more, it waits for slower ranks. Ranks
    measure the time from their last gradient to the reduced one.
    """
    rows, rewarded = list(view.ranks.values()), view.rewarded
    times = [row.metrics.training.sync_time_s for row in rows if row.window == view.window]
    least_sync_s = min((time for time in times if time is not None), default=0.0)
    shown = sorted(rows, key=lambda row: row.busy_time_s, reverse=True)[:most_ranks]
    ranks = []
    for row in sorted(shown, key=lambda row: row.rank):
        sync_s = row.metrics.training.sync_time_s
        one = {"node": row.node, "window": row.window, "communication_time_s": None, "wait_time_s": None}
        if sync_s is not None:
            one["communication_time_s"] = communication_s = min(sync_s, least_sync_s)
            one["wait_time_s"] = sync_s - communication_s
        ranks.append({**one, "reward": row.reward and row.reward.reward, **document_of(row.metrics)})
    return {
        "name": view.name,
        "phase": view.phase(now_ns),
        "specification": document_of(view.job),
        "summary": view.job.summary.text if view.job and view.job.summary else None,
        "generation": view.generation,
        "window": view.window if view.window >= 0 else None,
        "updated_unix_s": view.updated_ns / 1e9 or None,
        "metrics": document_of(view.metrics),
        "global_batch_size": sum(view.local_batch_sizes) or None,
        "exchange": document_of(view.exchange),
        "num_ranks": view.job.world_size if view.job else len(rows),
        "num_ranks_known": len(rows),
        "ranks": ranks,
        "nodes": [
            {**document_of(node, leave_out=("job", "job_metrics", "ranks")), "num_ranks": len(node.ranks)}
            for _, node in sorted(view.nodes.items())
        ],
        "action": document_of(view.action, leave_out=PRIVATE),
        "applied": document_of(view.applied),
        "events": [
            {"time_unix_s": time_ns / 1e9 or None, **document_of(event)} for time_ns, event in reversed(view.events)
        ],
        "reward": {"formula": rewarded.formula, "mean": rewarded.mean_reward(), "terms": rewarded.reward_terms()},
    }


def window_document(window: Window, *, most_ranks: int | None = None) -> Document:
    """One window and the decision made on it; `applied` is the receipt of that decision.

    With more than `most_ranks` ranks, sizes are minimum, median and maximum, and the decision has counts only.
    """
    sizes: dict[str, float] = {str(rank): size for rank, size in sorted(window.local_batch_sizes.items())}
    is_short = most_ranks is not None and len(sizes) > most_ranks
    if is_short:
        sizes = {"min": min(sizes.values()), "median": median(sizes.values()), "max": max(sizes.values())}
    action: Document | None = None
    if window.action is not None:
        deltas = window.action.deltas
        per_rank = ("local_batch_sizes", "deltas") if is_short else ()
        action = {
            **document_of(window.action, leave_out=(*PRIVATE, *per_rank)),
            "global_batch_size": sum(window.action.local_batch_sizes),
            "global_batch_size_change": sum(deltas),
            "num_ranks_more": sum(delta > 0 for delta in deltas),
            "num_ranks_less": sum(delta < 0 for delta in deltas),
        }
    ranks = {rank.rank: document_of(rank) for node in window.nodes.values() for rank in node.ranks}
    rewards = {reward.rank: document_of(reward) for node in window.nodes.values() for reward in node.rewards}
    return {
        "generation": window.generation,
        "window": window.window,
        "started_unix_s": window.started_ns / 1e9 or None,
        "measured_unix_s": window.measured_ns / 1e9 or None,
        "metrics": document_of(window.metrics),
        "local_batch_sizes": sizes,
        "nodes": {
            name: {
                "cpu_time_ratio": node.metrics.cpu_time_ratio if node.metrics else None,
                "tx_bytes_per_s": node.tx_bytes_per_s,
                "rx_bytes_per_s": node.rx_bytes_per_s,
                "probe": node.probe,
            }
            for name, node in sorted(window.nodes.items())[:most_ranks]
        },
        "reward": window.mean_reward(),
        "reward_terms": window.reward_terms(),
        "action": action,
        "decided_unix_s": window.decided_ns / 1e9 or None,
        "decision_s": window.decision_s,
        "applied": document_of(window.applied, leave_out=("local_batch_sizes",) if is_short else ()),
        "applied_unix_s": window.applied_ns / 1e9 or None,
        "ranks": [
            {"rank": rank, "metrics": ranks.get(rank), "reward": rewards.get(rank)} for rank in sorted(ranks | rewards)
        ],
    }


def overview(views: Iterable[JobView], heartbeats: Heartbeats, *, now_ns: int, now_s: float) -> Document:
    """All jobs in a line each, the newest first, running ones before the others; services; alarms."""
    views = list(views)
    rows = [
        {
            "name": view.name,
            "phase": view.phase(now_ns),
            "heard_s_ago": (now_ns - view.heard_ns) / 1e9 if view.heard_ns else None,
            "policy": view.job.policy if view.job else None,
            "num_ranks": view.job.world_size if view.job else len(view.ranks),
            "window": view.window if view.window >= 0 else None,
            "metrics": document_of(view.metrics),
        }
        for view in reversed(views)
        if view.job is not None or view.window >= 0
    ]
    order = ("running", "silent", "ended")
    return {
        "jobs": sorted(rows, key=lambda row: order.index(row["phase"])),
        "services": heartbeats.document(now_s),
        "services_missing": heartbeats.missing(now_s),
        "alarms": alarms_of(views, heartbeats, now_ns=now_ns, now_s=now_s),
    }


# --- alarms

LATE_AFTER_WINDOWS = 3
"""A job that is steered has a decision by this window."""
SILENT_ALARM_S = 3600.0
"""A job that has been silent for longer is history, and no alarm any more."""


class Alarm(msgspec.Struct, frozen=True):
    """A problem that the page or `top` shows."""

    level: Literal["error", "warning"]
    subject: str
    """The job or service that it is about."""
    text: str


def alarms_of(views: Iterable[JobView], heartbeats: Heartbeats, *, now_ns: int, now_s: float) -> list[Alarm]:
    """Alarms of the services first, then of the jobs that have not ended; `now_s` on the clock of the heartbeats."""
    found = [
        Alarm("error", service, "no heartbeat: without this service no job is steered")
        for service in heartbeats.missing(now_s)
    ]
    if count := heartbeats.count(*NOT_STORED, now_s=now_s):
        found.append(Alarm("error", "broker", f"{count} messages are not stored"))
    if count := heartbeats.count("refused_logs", now_s=now_s):
        found.append(Alarm("error", "services", f"{count} logs of decisions were refused: their jobs are not steered"))
    if count := heartbeats.count("dead_letters", now_s=now_s):
        what = f"{count} messages could not be used: stream DEAD has them, with the reasons"
        found.append(Alarm("warning", "services", what))
    collectors = (beat.live for beat in heartbeats.recent(now_s) if beat.live.service == "collector")
    measured = {live.node for live in collectors if live.node}
    for view in views:
        found += alarms_of_job(view, now_ns)
        if measured and view.phase(now_ns) == "running":
            for node in [] if view.job is None else [one.node for one in view.job.nodes]:
                if node not in measured and node not in view.nodes:
                    text = f"no collector on {node}: start it there, or set the same DYNAMIX_NODE for it and the ranks"
                    found.append(Alarm("error", view.name, text))
    return found


def alarms_of_job(view: JobView, now_ns: int) -> Iterator[Alarm]:
    """Alarms of one job; none of one that has ended or has been silent for an hour."""
    phase, name = view.phase(now_ns), view.name
    silent_s = (now_ns - view.heard_ns) / 1e9
    if phase == "ended" or (phase == "silent" and silent_s > SILENT_ALARM_S):
        return
    if phase == "silent":
        text = f"no message for {duration(silent_s)}, and no end: its processes were probably killed"
        yield Alarm("error", name, text)
        return
    for _, event in view.events:
        text = f"{event.signature}: {event.explanation} (window {event.window})"
        yield Alarm("error" if event.signature == "log-refused" else "warning", name, text)
    if view.action is None and view.window >= LATE_AFTER_WINDOWS:
        yield Alarm("warning", name, f"no decision in {view.window + 1} windows: the arbitrator's log says why")
    refused = {} if view.applied is None else view.applied.num_refused
    if count := sum(refused.values()):
        reasons = ", ".join(f"{number} {why}" for why, number in refused.items() if number)
        yield Alarm("warning", name, f"the trainer refused {count} decisions: {reasons}")
    for node in view.nodes.values():
        for count, what in (
            (node.num_readings_lost, "windows without kernel counters, since reports came late"),
            (node.num_reports_dropped, "reports dropped, since the bus was unavailable"),
            (len(node.refused_pids), "processes that were not what their rank said, and were not read"),
        ):
            if count:
                yield Alarm("warning", name, f"{node.node}: {count} {what}")


# --- captures


class CapturedJob:
    """The messages of one capture, in memory; folded into a view up to any moment."""

    def __init__(self, path: Path) -> None:
        """Read what is good of the file. Raises CaptureError when it is no capture, and OSError."""
        self.path = path
        self._messages: list[tuple[int, Message]] = []
        with CaptureReader(path) as reader:
            self.job = reader.header.job
            for record, message in reader.messages():
                if message is not None:
                    self._messages.append((record.timestamp_ns, message))
            self.notes = [] if reader.fault is None else [str(reader.fault)]
            if reader.malformed:
                self.notes.append(f"{len(reader.malformed)} messages cannot be decoded and are left out")
        self.start_ns = self._messages[0][0] if self._messages else 0
        """When the broker stored the first message, 0 without one."""
        self.duration_s = (self._messages[-1][0] - self.start_ns) / 1e9 if self._messages else 0.0
        """Seconds from the first message to the last."""

    def document(self, elapsed_s: float, *, with_windows: bool = False) -> Document:
        """The job as it was so long after the first message; `windows` are those of the whole capture."""
        now_ns = self.start_ns + round(elapsed_s * 1e9)
        view = self._view_at(now_ns)
        found: Document = {
            "file": self.path.name,
            "notes": self.notes,
            "job": job_document(view, now_ns, most_ranks=MOST_RANKS),
            "alarms": list(alarms_of_job(view, now_ns)),
        }
        if with_windows:
            whole = self._view_at(self.start_ns + round(self.duration_s * 1e9))
            found["windows"] = [window_document(window, most_ranks=MOST_RANKS) for window in whole.history]
        return found

    def _view_at(self, now_ns: int) -> JobView:
        view = JobView(self.job, most_windows=MOST_WINDOWS)
        for timestamp_ns, message in self._messages[: bisect_right(self._messages, now_ns, key=lambda one: one[0])]:
            view.fold(message, timestamp_ns)
        return view
