"""Rows of ranks as `dynamix watch` receives them."""

from collections.abc import Sequence

from dynamix.schemas.watching import Row, Step


def watched_row(rank: int, steps: Sequence[Step], world_size: int) -> Row:
    """A row of a rank with a node of its own."""
    return Row(
        restart=0,
        rank=rank,
        world_size=world_size,
        node=f"node-{rank}",
        first_step=0,
        steps=list(steps),
        memory_bytes=1_000_000,
        link_bytes_per_s=None,
        link_peer=None,
        gradient_bytes=1_000_000,
        notes=[],
    )
