"""The page's content as JSON documents: jobs, alarms, captures. The caller passes the time."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import msgspec

from dynamix.cli.heartbeats import Heartbeats
from dynamix.cli.output import Document, document_of
from dynamix.cli.terminal import duration
from dynamix.recording.capture import CaptureReader
from dynamix.recording.job_view import JobView, RankView, Window
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Action, Message, MetricWindow

MOST_RANKS = 64
"""Ranks that are shown one by one: of a larger job the slowest ones, and in curves minimum, median and maximum."""
MOST_NODES = 16
"""Nodes that have curves of their own: of a larger job the first ones by name."""
MOST_DECISIONS = 100


# --- alarms

SILENT_ALARM_S = 3600.0
"""A job that has been silent for longer is history, and no alarm any more."""

Level = Literal["error", "warning"]


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be."""

    level: Level
    subject: str
    """The job or service that it is about."""
    text: str


def alarms_of(views: Iterable[JobView], heartbeats: Heartbeats, *, now_ns: int, now_s: float) -> list[Alarm]:
    """Alarms of the services first, then of the jobs that have not ended; `now_s` on the clock of the heartbeats."""
    found = list(_of_services(heartbeats, now_s))
    for view in views:
        found += alarms_of_job(view, now_ns)
        if view.phase(now_ns) == "running":
            for node in heartbeats.nodes_without_collector(view.unmeasured_nodes, now_s):
                text = f"no collector on {node}: start it there, or set the same DYNAMIX_NODE for it and the ranks"
                found.append(Alarm(level="error", subject=view.name, text=text))
    return found


def alarms_of_job(view: JobView, now_ns: int) -> Iterator[Alarm]:
    """Alarms of one job; none of one that has ended or has been silent for an hour."""
    phase, name = view.phase(now_ns), view.name
    silent_s = (now_ns - view.heard_ns) / 1e9
    if phase == "ended" or (phase == "silent" and silent_s > SILENT_ALARM_S):
        return
    if phase == "silent":
        text = f"no message for {duration(silent_s)}, and no end: its processes were probably killed"
        yield Alarm(level="error", subject=name, text=text)
        return
    for _, event in view.events:
        level: Level = "error" if event.signature == "log-refused" else "warning"
        yield Alarm(level=level, subject=name, text=f"{event.signature}: {event.explanation} (window {event.window})")
    if view.lacks_decision:
        text = f"no decision in {view.window + 1} windows: the arbitrator's log says why"
        yield Alarm(level="warning", subject=name, text=text)
    refused = {} if view.applied is None else view.applied.num_refused
    if count := sum(refused.values()):
        reasons = ", ".join(f"{number} {why}" for why, number in refused.items() if number)
        yield Alarm(level="warning", subject=name, text=f"the trainer refused {count} decisions: {reasons}")
    for node in view.nodes.values():
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


# --- jobs


def overview(
    views: Iterable[JobView],
    heartbeats: Heartbeats,
    alarms: Iterable[Alarm],
    *,
    num_older: int,
    now_ns: int,
    now_s: float,
) -> Document:
    """All jobs in a line each, the newest first, those that run before the others; services; alarms."""
    known = [view for view in views if view.job is not None or view.window >= 0]
    rows = [_job_line(view, now_ns) for view in reversed(known)]
    order = ("running", "silent", "ended")
    return {
        "jobs": sorted(rows, key=lambda row: order.index(row["phase"])),
        "num_older_jobs": num_older,
        "services": heartbeats.document(now_s),
        "services_missing": heartbeats.missing(now_s),
        "alarms": [msgspec.structs.asdict(alarm) for alarm in alarms],
    }


def _job_line(view: JobView, now_ns: int) -> Document:
    metrics, job = view.metrics, view.job
    accuracy = metrics and (metrics.accuracy if metrics.held_out_accuracy is None else metrics.held_out_accuracy)
    return {
        "name": view.name,
        "phase": view.phase(now_ns),
        "heard_s_ago": (now_ns - view.heard_ns) / 1e9 if view.heard_ns else None,
        "policy": job.policy if job else None,
        "num_ranks": job.world_size if job else len(view.ranks),
        "window": view.window if view.window >= 0 else None,
        "throughput": metrics.throughput if metrics else None,
        "accuracy": accuracy,
        "progress": metrics.progress if metrics else None,
    }


def job_now(view: JobView, now_ns: int) -> Document:
    """All of a job but its curves and decisions."""
    job, applied = view.job, view.applied
    return {
        "name": view.name,
        "phase": view.phase(now_ns),
        "end_reason": job.end_reason if job else "",
        "generation": view.generation,
        "window": view.window if view.window >= 0 else None,
        "updated_unix_s": view.updated_ns / 1e9 or None,
        "num_ranks": job.world_size if job else len(view.ranks),
        "num_nodes": len(job.nodes) if job else len(view.nodes),
        "policy": job.policy if job else None,
        "metrics": document_of(view.metrics),
        "global_batch_size": sum(view.local_batch_sizes) or None,
        "levers": _levers(view),
        **_ranks(view),
        "nodes": [_node(node) for _, node in sorted(view.nodes.items())],
        "reward": {"formula": view.formula, "mean": view.mean_reward(), "terms": view.reward_terms()},
        "num_refused": dict(applied.num_refused) if applied else {},
        "events": [
            {"time_unix_s": time_ns / 1e9 or None, **document_of(event, leave_out=("job",))}
            for time_ns, event in reversed(view.events)
        ],
    }


def _levers(view: JobView) -> Document | None:
    """What a decision may set, how it is set now, and how it began."""
    if (job := view.job) is None:
        return None
    action = view.action
    return {
        "global_batch": job.global_batch,
        "initial_global_batch_size": sum(job.initial_local_batch_sizes),
        "min_local_batch_size": job.min_local_batch_size,
        "max_local_batch_size": max(job.max_local_batch_sizes),
        "split": job.initial_split if action is None else action.split,
        "initial_split": job.initial_split,
        "supports_tracking": job.supports_tracking,
        "exchange": view.exchange.label,
        "initial_exchange": job.initial_exchange.label,
        "exchange_permission": job.exchange,
        "learning_rate_rule": job.learning_rate_rule,
        "window_steps": max((window.num_steps for window in view.nodes.values()), default=job.window_steps),
        "policy_options": dict(job.policy_options),
    }


def _ranks(view: JobView) -> Document:
    rows = [row for _, row in sorted(view.ranks.items())]
    shown = rows
    if len(rows) > MOST_RANKS:
        slowest = sorted(rows, key=lambda row: row.busy_time_s, reverse=True)[:MOST_RANKS]
        shown = sorted(slowest, key=lambda row: row.rank)
    times = [row.metrics.training.sync_time_s for row in rows if row.window == view.window]
    least_sync_s = min((time for time in times if time is not None), default=0.0)
    return {"num_ranks_known": len(rows), "ranks": [_rank(row, least_sync_s, view.window) for row in shown]}


def _rank(row: RankView, least_sync_s: float, newest: int) -> Document:
    """One rank's newest window. What all ranks wait at least is the communication, what a rank waits more, the barrier.

    Ranks measure the time from their last gradient to the reduced one; the slowest of them waits for none.
    """
    training, network = row.metrics.training, row.metrics.network
    sync_s = training.sync_time_s
    communication_s = None if sync_s is None else min(sync_s, least_sync_s)
    return {
        "rank": row.rank,
        "node": row.node,
        "is_behind": row.window < newest,
        "local_batch_size": training.local_batch_size,
        "pending_local_batch_size": training.pending_local_batch_size,
        "step_time_s": training.step_time_s,
        "compute_time_s": training.compute_time_s,
        "communication_time_s": communication_s,
        "wait_time_s": None if sync_s is None or communication_s is None else sync_s - communication_s,
        "data_time_s": training.data_time_s,
        "update_time_s": training.update_time_s,
        "cpu_time_ratio": row.metrics.system.cpu_time_ratio,
        "retransmits": None if network is None else network.retransmits,
        "reward": None if row.reward is None else row.reward.reward,
    }


def _node(node: MetricWindow) -> Document:
    metrics = node.node_metrics
    rates = {
        f"{name}_per_s": count / metrics.interval_s if count is not None and metrics.interval_s else None
        for name, count in (("tx_bytes", metrics.tx_bytes), ("rx_bytes", metrics.rx_bytes))
    }
    return {
        "node": node.node,
        "window": node.window,
        "num_ranks": len(node.ranks),
        "cpu_time_ratio": metrics.cpu_time_ratio,
        "load_per_cpu": metrics.load_per_cpu,
        "memory_used_ratio": metrics.memory_used_ratio,
        **rates,
        "retransmits": metrics.retransmits,
        "probe": node.probe,
        "probe_note": node.probe_note,
    }


def curves(view: JobView, since: int = 0) -> list[Document]:
    """The windows that changed after revision `since`, oldest first."""
    return [_point(window) for window in view.history if window.revision > since]


def _point(window: Window) -> Document:
    nodes = sorted(window.nodes.items())[:MOST_NODES]
    ratios = {name: node.metrics.cpu_time_ratio if node.metrics else None for name, node in nodes}
    return {
        "generation": window.generation,
        "window": window.window,
        "time_unix_s": window.measured_ns / 1e9 or None,
        "metrics": document_of(window.metrics),
        **_sizes(window.local_batch_sizes),
        "nodes": {name: [ratios[name], node.tx_bytes_per_s, node.rx_bytes_per_s] for name, node in nodes},
        "reward": window.mean_reward(),
        "reward_terms": window.reward_terms(),
    }


def _sizes(sizes: dict[int, int]) -> Document:
    """Sizes by rank; of many ranks minimum, median and maximum."""
    if len(sizes) <= MOST_RANKS:
        return {"local_batch_sizes": {str(rank): size for rank, size in sorted(sizes.items())}}
    spread = (min(sizes.values()), median(sizes.values()), max(sizes.values()))
    return {"local_batch_sizes": dict(zip(("min", "median", "max"), spread, strict=True))}


def decisions(view: JobView, since: int = 0) -> list[Document]:
    """The decisions that changed after revision `since`, oldest first, the newest hundred."""
    return [_decision(window, window.action) for window in view.history if window.action and window.revision > since][
        -MOST_DECISIONS:
    ]


def _decision(window: Window, action: Action) -> Document:
    return {
        "generation": window.generation,
        "window": window.window,
        "time_unix_s": window.decided_ns / 1e9 or None,
        "policy": action.policy,
        "policy_version": action.policy_version,
        "global_batch_size": sum(action.local_batch_sizes),
        "change": _change(action),
        "split": action.split,
        "exchange": action.exchange.label,
        "reason": action.reason,
        "inputs_missing": action.gap,
        "effective_window": None if window.applied is None else window.applied.effective_window,
    }


def _change(action: Action) -> Document:
    """What a decision changed of the one before it, in samples."""
    deltas = action.deltas
    return {
        "global_batch_size": sum(deltas),
        "local_batch_sizes": list(deltas) if len(deltas) <= MOST_RANKS else [],
        "num_ranks_more": sum(delta > 0 for delta in deltas),
        "num_ranks_less": sum(delta < 0 for delta in deltas),
    }


# --- captures

MOST_WINDOWS = 5000
"""Windows of a capture that have curves: the newest ones."""
SHOWN_KINDS = ("job", "window", "reward", "action", "applied", "event")


class TimedMessage(NamedTuple):
    """One message of a capture, and when the broker stored it."""

    timestamp_ns: int
    message: Message


class CapturedJob:
    """The messages of one capture, in memory; folded into a view up to any moment."""

    def __init__(self, path: Path) -> None:
        """Read what is good of the file. Raises CaptureError when it is no capture, and OSError."""
        self.path = path
        self.notes: list[str] = []
        self._messages: list[TimedMessage] = []
        num_malformed = 0
        with CaptureReader(path) as reader:
            self.job = reader.header.job
            for record in reader:
                if record.subject.split(".")[2:3][0] not in SHOWN_KINDS:
                    continue
                try:
                    message = decode_any(record.subject, record.payload)
                except MalformedMessageError:
                    num_malformed += 1
                    continue
                self._messages.append(TimedMessage(record.timestamp_ns, message))
            self.notes += [str(fault) for fault in reader.faults]
        if num_malformed:
            self.notes.append(f"{num_malformed} messages cannot be decoded and are left out")

    @property
    def start_ns(self) -> int:
        """When the broker stored the first message, 0 without one."""
        return self._messages[0].timestamp_ns if self._messages else 0

    @property
    def duration_s(self) -> float:
        """Seconds from the first message to the last."""
        return (self._messages[-1].timestamp_ns - self.start_ns) / 1e9 if self._messages else 0.0

    def view_at(self, elapsed_s: float) -> JobView:
        """The job as it was so long after the first message."""
        view = JobView(self.job, most_windows=MOST_WINDOWS)
        end_ns = self.start_ns + int(elapsed_s * 1e9)
        count = bisect_right(self._messages, end_ns, key=lambda entry: entry.timestamp_ns)
        for timestamp_ns, message in self._messages[:count]:
            view.fold(message, timestamp_ns)
        return view

    def document(self, elapsed_s: float, *, with_curves: bool) -> Document:
        """The document of that moment; its curves are those of the whole capture."""
        view = self.view_at(elapsed_s)
        now_ns = self.start_ns + int(elapsed_s * 1e9)
        found: Document = {
            "file": self.path.name,
            "notes": self.notes,
            "start_unix_s": self.start_ns / 1e9,
            "duration_s": self.duration_s,
            "elapsed_s": elapsed_s,
            "job": job_now(view, now_ns),
            "decisions": decisions(view),
            "alarms": [msgspec.structs.asdict(alarm) for alarm in alarms_of_job(view, now_ns)],
        }
        if with_curves:
            found["curves"] = curves(self.view_at(self.duration_s))
        return found
