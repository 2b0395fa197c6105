"""Messages made up for those who watch a job: rewards, adoptions and failure signatures."""

from typing import Any

from tests.support import made

from dynamix.schemas.messages import Applied, Event, RankReward, Reward


def reward(node: str, ranks: tuple[int, ...], window: int = 0, value: float = 0.5, **changes: Any) -> Reward:
    fields: dict[str, Any] = {
        "job": made.JOB,
        "generation": 0,
        "window": window,
        "node": node,
        "formula": "paper-sgd",
        "ranks": tuple(
            RankReward(rank=rank, reward=value, terms={"accuracy": value + 0.1, "size": -0.1}) for rank in ranks
        ),
    }
    return Reward(**(fields | changes))


def applied(decided: int, effective: int, **changes: Any) -> Applied:
    fields: dict[str, Any] = {
        "job": made.JOB,
        "generation": 0,
        "decided_window": decided,
        "effective_window": effective,
        "effective_step": effective * 10,
        "local_batch_sizes": (128,) * 4,
    }
    return Applied(**(fields | changes))


def event(window: int, **changes: Any) -> Event:
    fields: dict[str, Any] = {
        "job": made.JOB,
        "generation": 0,
        "window": window,
        "signature": "size-stuck",
        "service": "arbitrator",
        "value": 0.75,
        "limit": 0.5,
        "explanation": "75% of the ranks were at their minimum of 32",
    }
    return Event(**(fields | changes))
