"""Traces: what the agents of a job's nodes leave for all ranks, and what each of them sees of the field.

Under the policy `stigmergy` every node is a cell. The newest trace on a cell's subject is what lies there; it loses the
option `evaporation` of its strength in each window. Cells are in a ring, in the order of the job's nodes.
"""

from typing import Annotated

from msgspec import Meta, field

from .fields import Count, Message, Seconds, Token

Activity = Annotated[tuple[Annotated[float, Meta(ge=0)], ...], Meta(min_length=1, max_length=4096)]
"""Samples per second of computing, one number per rank of a node; 0 where there is no trace."""


class SeenTrace(Message, frozen=True, kw_only=True, array_like=True):
    """The part of a trace that its own cell and those beside it can see."""

    strength: Annotated[float, Meta(gt=0, le=1)]
    """What evaporation has left of it: 1 when it is as new as it can be."""
    appetite: Annotated[float, Meta(ge=0)]
    waiting_s: Seconds


class FieldView(Message, frozen=True, kw_only=True, array_like=True):
    """Input of a node's agent besides its own ranks' rows: the traces around, and its rule's settings."""

    activity: Activity
    """What its own trace says of its own ranks."""
    own: SeenTrace | None
    """`None` where it has none, or none is left."""
    around: Annotated[tuple[SeenTrace, ...], Meta(max_length=2)] = ()
    """The traces in the cells beside its own."""
    keeps_global_batch: bool = True
    """Whether the sum of the sizes is fixed."""
    rate_exponent: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Power of the global batch that the learning rate follows."""
    options: dict[str, float] = field(default_factory=dict)
    """All options of the policy."""
    base_global_batch_size: Count = 0
    """The global batch that the script's learning rate is meant for."""


class Trace(Message, frozen=True, kw_only=True, array_like=True):
    """The trace that a node's agent leaves at its cell after a window."""

    job: Token
    generation: Count
    window: Count
    """The newest that it knew."""
    node: Token
    ranks: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=4096)]
    activity: Activity
    """In the order of `ranks`: all ranks of the job divide the global batch in proportion to it."""
    appetite: Annotated[float, Meta(ge=0)]
    """Samples per step that the job should have, as seen from here; it diffuses. The job has the mean of all cells."""
    waiting_s: Seconds
    """The least time per step that a rank waits at the barrier here, or where such traces come from: that is
    communication; what others wait longer, they wait for slower ranks."""
