"""The board as plain data, for `dynamix top --json`."""

from typing import Any

import msgspec

from .board import Board, RankRow
from .services import Services

Plain = dict[str, Any]


def snapshot(board: Board | None, services: Services, now_s: float) -> Plain:
    """What the view shows, with the units in the names."""
    return {
        "job": None if board is None else _job(board),
        "services": [
            {**msgspec.structs.asdict(beat.live), "heard_s_ago": now_s - beat.heard_s, "late": beat.is_late(now_s)}
            for beat in services.beats(now_s)
        ],
        "services_missing": services.missing(now_s),
    }


def _job(board: Board) -> Plain:
    return {
        "name": board.name,
        "specification": None if board.job is None else _plain(board.job),
        "generation": board.generation,
        "window": None if board.window < 0 else board.window,
        "updated_ns": board.updated_ns or None,
        "local_batch_sizes": list(board.local_batch_sizes),
        "metrics": None if board.metrics is None else _plain(board.metrics),
        "ranks": [_rank(row) for _, row in sorted(board.ranks.items())],
        "action": None if board.action is None else _plain(board.action, leave_out=("carry",)),
        "applied": None if board.applied is None else _plain(board.applied),
        "event": None if board.event is None else _plain(board.event),
        "reward": {"formula": board.formula, "mean": board.mean_reward(), "terms": board.reward_terms()},
        "history": [
            {"generation": point.generation, "window": point.window, **_plain(point.metrics)} for point in board.history
        ],
    }


def _rank(row: RankRow) -> Plain:
    return {
        "rank": row.rank,
        "node": row.node,
        "window": row.window,
        "training": _plain(row.metrics.training),
        "system": _plain(row.metrics.system),
        "network": None if row.metrics.network is None else _plain(row.metrics.network),
        "reward": None if row.reward is None else row.reward.reward,
    }


def _plain(message: msgspec.Struct, leave_out: tuple[str, ...] = ()) -> Plain:
    """A message with its field names, which on the wire it leaves out; digests as hexadecimal text."""
    return {
        name: _plain_value(value) for name, value in msgspec.structs.asdict(message).items() if name not in leave_out
    }


def _plain_value(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    return value
