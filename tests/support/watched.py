"""Rows of ranks as `dynamix watch` receives them."""

from collections.abc import Sequence
from typing import Any

from dynamix.schemas.watching import Row, Step


def watched_row(rank: int, steps: Sequence[Step], world_size: int, **changes: Any) -> Row:
    """A row of a rank with a node of its own, some of it changed."""
    made: dict[str, Any] = {
        "restart": 0,
        "node": f"node-{rank}",
        "first_step": 0,
        "memory_bytes": 1_000_000,
        "link_bytes_per_s": None,
        "link_peer": None,
        "gradient_bytes": 1_000_000,
        "optimizer": "SGD",
        "notes": [],
    }
    return Row(rank=rank, world_size=world_size, steps=list(steps), **(made | changes))
