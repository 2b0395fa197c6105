"""The board as a JSON document, for `dynamix top --json`."""

import msgspec

from dynamix.cli.output import Document, document_of

from .board import Board, BoardRank
from .heartbeats import Heartbeats


def snapshot(board: Board | None, heartbeats: Heartbeats, now_s: float) -> Document:
    """Everything that the view shows, with the units in the names; `job` is `None` while there is none."""
    return {
        "job": None if board is None else _job(board),
        "services": [
            {**msgspec.structs.asdict(beat.live), "heard_s_ago": now_s - beat.heard_s, "late": beat.is_late(now_s)}
            for beat in heartbeats.recent(now_s)
        ],
        "services_missing": heartbeats.missing(now_s),
    }


def _job(board: Board) -> Document:
    return {
        "name": board.name,
        "specification": document_of(board.job),
        "generation": board.generation,
        "window": None if board.window < 0 else board.window,
        "updated_ns": board.updated_ns or None,
        "local_batch_sizes": list(board.local_batch_sizes),
        "metrics": document_of(board.metrics),
        "ranks": [_rank(row) for _, row in sorted(board.ranks.items())],
        "action": document_of(board.action, leave_out=("carry",)),
        "applied": document_of(board.applied),
        "event": document_of(board.event),
        "reward": {"formula": board.formula, "mean": board.mean_reward(), "terms": board.reward_terms()},
        "history": [
            {"generation": point.generation, "window": point.window, **document_of(point.metrics)}
            for point in board.history
        ],
    }


def _rank(row: BoardRank) -> Document:
    return {
        "rank": row.rank,
        "node": row.node,
        "window": row.window,
        "training": document_of(row.metrics.training),
        "system": document_of(row.metrics.system),
        "network": document_of(row.metrics.network),
        "reward": None if row.reward is None else row.reward.reward,
    }
