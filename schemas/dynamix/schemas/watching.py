"""Measurements of `dynamix watch` in a rank that knows nothing of it: from the trainer's part to the command."""

import msgspec


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One step of one rank, in seconds; their sum is the time from the end of the step before to its own."""

    data_s: float
    between_s: float
    """From the end of the step before until a batch is asked for: logging, evaluation."""
    compute_s: float
    """From having the batch to the rank's complete gradient."""
    sync_s: float
    """Waiting for other ranks, and what of communication computing does not hide."""
    update_s: float
    num_samples: int


DATA, BETWEEN, COMPUTE, SYNC, UPDATE = range(5)
"""Fields of `Step`."""


class Row(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Work of one rank since its last row."""

    restart: int
    rank: int
    world_size: int
    node: str
    first_step: int
    steps: list[Step]
    memory_bytes: int
    """The most that was allocated on the GPU; on a CPU what the process holds."""
    link_bytes_per_s: float | None
    link_peer: int | None
    gradient_bytes: int
    notes: list[str]
