"""What the page shows, as JSON documents with the units in the names. Pure: the caller passes the time."""

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from dynamix.cli.board.board import Board, BoardRank
from dynamix.cli.board.heartbeats import Heartbeats
from dynamix.cli.board.timeline import DecidedWindow, HistoryPoint
from dynamix.cli.output import Document, document_of
from dynamix.schemas.messages import Action, MetricWindow

from .alarms import Alarm

MOST_RANKS = 64
"""Ranks that are shown one by one: of a larger job the slowest ones, and in curves minimum, median and maximum."""
MOST_NODES = 16
"""Nodes that have curves of their own: of a larger job the first ones by name."""
MOST_DECISIONS = 100


def overview(
    boards: Iterable[Board],
    heartbeats: Heartbeats,
    alarms: Iterable[Alarm],
    *,
    num_older: int,
    now_ns: int,
    now_s: float,
) -> Document:
    """All jobs in a line each, the newest first, those that run before the others; services; alarms."""
    known = [board for board in boards if board.job is not None or board.window >= 0]
    rows = [_job_line(board, now_ns) for board in reversed(known)]
    order = ("running", "silent", "ended")
    return {
        "jobs": sorted(rows, key=lambda row: order.index(row["phase"])),
        "num_older_jobs": num_older,
        "services": [
            {**msgspec.structs.asdict(beat.live), "heard_s_ago": now_s - beat.heard_s, "late": beat.is_late(now_s)}
            for beat in heartbeats.recent(now_s)
        ],
        "services_missing": heartbeats.missing(now_s),
        "alarms": [msgspec.structs.asdict(alarm) for alarm in alarms],
    }


def _job_line(board: Board, now_ns: int) -> Document:
    metrics, job = board.metrics, board.job
    return {
        "name": board.name,
        "phase": board.phase(now_ns),
        "heard_s_ago": (now_ns - board.heard_ns) / 1e9 if board.heard_ns else None,
        "policy": job.policy if job else None,
        "num_ranks": job.world_size if job else len(board.ranks),
        "window": board.window if board.window >= 0 else None,
        "throughput": metrics.throughput if metrics else None,
        "accuracy": _newest_accuracy(board),
        "progress": metrics.progress if metrics else None,
    }


def _newest_accuracy(board: Board) -> float | None:
    if (metrics := board.metrics) is None:
        return None
    return metrics.accuracy if metrics.held_out_accuracy is None else metrics.held_out_accuracy


def job_now(board: Board, now_ns: int) -> Document:
    """All of a job but its curves and decisions."""
    job, applied = board.job, board.applied
    return {
        "name": board.name,
        "phase": board.phase(now_ns),
        "end_reason": job.end_reason if job else "",
        "generation": board.generation,
        "window": board.window if board.window >= 0 else None,
        "updated_unix_s": board.updated_ns / 1e9 or None,
        "num_ranks": job.world_size if job else len(board.ranks),
        "num_nodes": len(job.nodes) if job else len(board.nodes),
        "policy": job.policy if job else None,
        "metrics": document_of(board.metrics),
        "global_batch_size": sum(board.local_batch_sizes) or None,
        "levers": _levers(board),
        **_ranks(board),
        "nodes": [_node(node) for _, node in sorted(board.nodes.items())],
        "reward": {"formula": board.formula, "mean": board.mean_reward(), "terms": board.reward_terms()},
        "num_refused": dict(applied.num_refused) if applied else {},
        "events": [
            {"time_unix_s": time_ns / 1e9 or None, **document_of(event, leave_out=("job",))}
            for time_ns, event in reversed(board.events)
        ],
    }


def _levers(board: Board) -> Document | None:
    """What a decision may set, how it is set now, and how it began."""
    if (job := board.job) is None:
        return None
    action = board.action
    return {
        "global_batch": job.global_batch,
        "initial_global_batch_size": sum(job.initial_local_batch_sizes),
        "min_local_batch_size": job.min_local_batch_size,
        "max_local_batch_size": max(job.max_local_batch_sizes),
        "split": job.initial_split if action is None else action.split,
        "initial_split": job.initial_split,
        "supports_tracking": job.supports_tracking,
        "exchange": board.exchange.label,
        "initial_exchange": job.initial_exchange.label,
        "exchange_permission": job.exchange,
        "learning_rate_rule": job.learning_rate_rule,
        "window_steps": max((window.num_steps for window in board.nodes.values()), default=job.window_steps),
        "policy_options": dict(job.policy_options),
    }


def _ranks(board: Board) -> Document:
    rows = [row for _, row in sorted(board.ranks.items())]
    shown = rows
    if len(rows) > MOST_RANKS:
        slowest = sorted(rows, key=_busy_time_s, reverse=True)[:MOST_RANKS]
        shown = sorted(slowest, key=lambda row: row.rank)
    times = [row.metrics.training.sync_time_s for row in rows if row.window == board.window]
    least_sync_s = min((time for time in times if time is not None), default=0.0)
    return {"num_ranks_known": len(rows), "ranks": [_rank(row, least_sync_s, board.window) for row in shown]}


def _busy_time_s(row: BoardRank) -> float:
    training = row.metrics.training
    return training.step_time_s if training.compute_time_s is None else training.compute_time_s


def _rank(row: BoardRank, least_sync_s: float, newest: int) -> Document:
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


def curves(board: Board, since: int = 0) -> list[Document]:
    """The windows that changed after revision `since` of the board's timeline, oldest first."""
    return [_point(point) for point in board.timeline.points if point.revision > since]


def _point(point: HistoryPoint) -> Document:
    nodes = sorted(point.nodes.items())[:MOST_NODES]
    return {
        "generation": point.generation,
        "window": point.window,
        "time_unix_s": point.time_ns / 1e9 or None,
        "metrics": document_of(point.metrics),
        **_sizes(point.local_batch_sizes),
        "nodes": {
            name: [traffic.cpu_time_ratio, traffic.tx_bytes_per_s, traffic.rx_bytes_per_s] for name, traffic in nodes
        },
        "reward": point.mean_reward(),
        "reward_terms": point.reward_terms(),
    }


def _sizes(sizes: dict[int, int]) -> Document:
    """Sizes by rank; of many ranks minimum, median and maximum."""
    if len(sizes) <= MOST_RANKS:
        return {"local_batch_sizes": {str(rank): size for rank, size in sorted(sizes.items())}}
    spread = (min(sizes.values()), median(sizes.values()), max(sizes.values()))
    return {"local_batch_sizes": dict(zip(("min", "median", "max"), spread, strict=True))}


def decisions(board: Board, since: int = 0) -> list[Document]:
    """The decisions that changed after revision `since` of the board's timeline, oldest first, the newest hundred."""
    return [_decision(entry) for entry in board.timeline.decisions if entry.revision > since][-MOST_DECISIONS:]


def _decision(entry: DecidedWindow) -> Document:
    action, applied = entry.action, entry.applied
    assert action is not None, "only decisions whose action is known are listed"
    return {
        "generation": entry.generation,
        "window": entry.window,
        "time_unix_s": entry.time_ns / 1e9 or None,
        "policy": action.policy,
        "policy_version": action.policy_version,
        "global_batch_size": sum(action.local_batch_sizes),
        "change": _change(action),
        "split": action.split,
        "exchange": action.exchange.label,
        "reason": action.reason,
        "inputs_missing": action.gap,
        "effective_window": None if applied is None else applied.effective_window,
    }


def _change(action: Action) -> Document:
    """What a decision changed of the one before it, in samples."""
    deltas: Sequence[int] = action.deltas
    return {
        "global_batch_size": sum(deltas),
        "local_batch_sizes": list(deltas) if len(deltas) <= MOST_RANKS else [],
        "num_ranks_more": sum(delta > 0 for delta in deltas),
        "num_ranks_less": sum(delta < 0 for delta in deltas),
    }
