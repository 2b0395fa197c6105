"""Messages after a window: its reward, the action, and its adoption by the ranks."""

from typing import Annotated

from msgspec import Meta, field

from .allocation import EXACT, Allocation, Exchange, RateFactor, Sizes
from .fields import MAX_RANKS, Carry, Count, Digest, Message, Text, Token
from .policies import Split
from .profiles import MAX_PROFILE_BYTES

ProfileBytes = Annotated[bytes, Meta(max_length=MAX_PROFILE_BYTES)]


class RankReward(Message, frozen=True, kw_only=True, array_like=True):
    """Reward of one rank and the weighted terms whose sum it is."""

    rank: Count
    reward: float
    terms: dict[str, float]


class Reward(Message, frozen=True, kw_only=True, array_like=True):
    """Rewards of one node's ranks for one window."""

    job: Token
    generation: Count
    window: Count
    node: Token
    formula: Token
    ranks: Annotated[tuple[RankReward, ...], Meta(min_length=1, max_length=4096)]


class Action(Message, frozen=True, kw_only=True, array_like=True):
    """The one decision for one window of a job, and the arbitrator's checkpoint in one."""

    job: Token
    generation: Count
    window: Count
    local_batch_sizes: Sizes
    """Absolute: what each rank shall use."""
    deltas: Annotated[tuple[int, ...], Meta(max_length=MAX_RANKS)]
    """Difference to the arbitrator's own previous decision, for information."""
    policy: Token
    policy_version: Count
    watermark: Count
    """FEED sequence up to which the fold needs nothing again: a restart reads on after it."""
    split: Split = "fixed"
    """`fixed`: exactly these sizes; `tracking`: their sum, split by the training processes themselves; `traces`: what
    the agents' traces say, these sizes only until there are any."""
    gap: bool = False
    """Inputs between the previous action and this one were no longer in FEED."""
    logprobs: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None
    carry: Carry = b""
    previous_hash: Digest = b""
    hash: Digest = b""
    """SHA-256 over this action without its hash; chains to `previous_hash` (dynamix.schemas.chain)."""
    policy_digest: Digest = b""
    """SHA-256 of the policy's file; empty for policies that do not learn. Fixed within a generation."""
    exchange: Exchange = EXACT
    """How gradients travel."""
    reason: Text = ""
    """Why, in the policy's words and numbers: for people."""
    profile: ProfileBytes = b""
    """The stored profile that the generation began with, in its first action: a replay needs no other source."""
    rate_factor: RateFactor = 1.0
    """On the learning rate."""

    @property
    def allocation(self) -> Allocation:
        """The decision as one value."""
        return Allocation(self.local_batch_sizes, self.split, self.exchange, self.rate_factor)


REFUSAL_REASONS = (
    *("job", "generation", "length", "bounds", "sum", "lever", "stale", "not_newer", "future"),
    *("tracking", "malformed"),
)
"""Why a trainer refuses an action, by name; of `tracking` only the split was refused."""


class Applied(Message, frozen=True, kw_only=True, array_like=True):
    """An action that all ranks adopted, and from when on it holds."""

    job: Token
    generation: Count
    decided_window: Count
    effective_window: Count
    effective_step: Count
    local_batch_sizes: Sizes
    action_hash: Digest = b""
    num_refused: dict[str, Count] = field(default_factory=dict)
    """Actions refused so far in this generation, by reason: see `REFUSAL_REASONS`."""
    exchange: Exchange = EXACT
    """How gradients travel from `effective_step` on."""
