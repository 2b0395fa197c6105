"""The specification of a training run."""

from typing import Annotated, Literal

from msgspec import Meta, field

from .allocation import (
    EXACT,
    Allocation,
    Exchange,
    ExchangePermission,
    Explored,
    GlobalBatch,
    Objective,
    Sizes,
    Split,
)
from .fields import MAX_RANKS, Count, Message, OptimizerFamily, OptionalToken, Text, Token


class NodeRanks(Message, frozen=True, kw_only=True, array_like=True):
    """The ranks that run on one node."""

    node: Token
    ranks: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_RANKS)]


class Job(Message, frozen=True, kw_only=True, array_like=True):
    """Specification of one training run; published at each start (generation) and once more at its end."""

    job: Token
    """The user's name plus an 8-character run id, made once per run and kept over restarts."""
    generation: Count
    phase: Literal["running", "ended"]
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    nodes: Annotated[tuple[NodeRanks, ...], Meta(min_length=1)]
    window_steps: Annotated[int, Meta(ge=1)]
    """k: optimizer steps between two decisions."""
    initial_local_batch_sizes: Sizes
    """Sizes of the generation's first step: the user's, or the current ones at a restart."""
    base_global_batch_size: Annotated[int, Meta(ge=1)]
    """The global batch size that the user's learning rate was chosen for."""
    min_local_batch_size: Count
    max_local_batch_sizes: Sizes
    """Upper bound per rank: the job's, or less where a rank ran out of memory."""
    optimizer_family: OptimizerFamily
    policy: Token
    seed: Count
    total_samples: Count | None = None
    """Samples in the whole planned run, all epochs; `None` when the end is open."""
    max_lag_windows: Annotated[int, Meta(ge=2)] = 4
    """The trainer refuses an action decided more than this many windows ago."""
    policy_options: dict[str, float | Token] = field(default_factory=dict)
    end_reason: Text = ""
    supports_tracking: bool = False
    """Whether the training processes can divide a global batch among themselves (`Action.split`)."""
    initial_split: Split = "fixed"
    """Whether they do so from the generation's first step on."""
    learning_rate_rule: Literal["none", "linear", "sqrt"] = "sqrt"
    """Power of the global batch size over `base_global_batch_size` that scales the learning rate."""
    global_batch: GlobalBatch = "adaptive"
    """Whether a decision may change the sum of the sizes."""
    exchange: ExchangePermission = "exact"
    """Permission for decisions on the gradient exchange."""
    initial_exchange: Exchange = EXACT
    """The exchange from the generation's first step on."""
    supports_exchange: bool = False
    """Whether the training processes can carry out decisions on the gradient exchange, such as an exact codec."""
    table_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the gradient's numbers that lie in embedding tables, where most rows are zero."""
    family: OptionalToken = ""
    """Name of the family of recurring runs, which start from the profile of earlier ones; empty: none."""
    explores: tuple[Explored, ...] = ()
    """Choices that runs of the family may explore."""
    objective: Objective = "time"
    """Measure by which they are compared. Under `energy` the reports have the joules of each window."""

    @property
    def initial_allocation(self) -> Allocation:
        """The allocation of the generation's first step."""
        return Allocation(self.initial_local_batch_sizes, self.initial_split, self.initial_exchange)

    def __post_init__(self) -> None:
        """Raise ValueError when the parts of the specification contradict each other."""
        ranks = sorted(rank for node in self.nodes for rank in node.ranks)
        if ranks != list(range(self.world_size)):
            raise ValueError(f"nodes must hold each rank 0 ... {self.world_size - 1} once, not {ranks[:16]}")
        if len({node.node for node in self.nodes}) != len(self.nodes):
            raise ValueError("two nodes of one job have the same name: set a different DYNAMIX_NODE on each")
        for name in ("initial_local_batch_sizes", "max_local_batch_sizes"):
            if len(getattr(self, name)) != self.world_size:
                raise ValueError(f"{name} must hold {self.world_size} sizes, one per rank")
        if any(size < self.min_local_batch_size for size in self.max_local_batch_sizes):
            raise ValueError(
                f"a maximum below min_local_batch_size={self.min_local_batch_size} leaves no size to choose"
            )
