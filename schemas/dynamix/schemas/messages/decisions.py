"""Messages after a window: its reward, the action, its adoption by the ranks; and what runs leave to later ones."""

from typing import Annotated

import msgspec
from msgspec import Meta, field

from .allocation import EXACT, Allocation, Exchange, Objective, RateFactor, Sizes, Split
from .fields import MAX_RANKS, Carry, Count, Digest, Message, Text, Token

MAX_PROFILE_BYTES = 96 * 1024
"""The first action of a job that starts from a profile holds it, beside the carry."""

MAX_CURVE_POINTS = 64
MAX_MILESTONES = 128
MAX_ARMS = 8


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
    """`fixed`: exactly these sizes; `tracking`: their sum, split by the training processes themselves; `traces`: the
    agents' traces decide, and these sizes hold only until there are any."""
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
    """The gradient exchange."""
    reason: Text = ""
    """Reason of the decision, in the policy's words and numbers: for people."""
    profile: Annotated[bytes, Meta(max_length=MAX_PROFILE_BYTES)] = b""
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
"""Reason for which a trainer refuses an action; with `tracking` only the split was refused."""


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
    """The gradient exchange from `effective_step` on."""


# --- recurring jobs


class NoisePoint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The gradient noise scale at one point of a training."""

    num_samples: Annotated[float, Meta(ge=0)]
    """Samples that the run had seen."""
    noise_scale: Annotated[float, Meta(gt=0)]
    """B_noise in samples: geometric mean over the windows around it, and over runs."""


class ExploredArm(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A setting that is tried out between runs; the default is a run without exploration."""

    rate_factor: RateFactor = 1.0
    noise_multiplier: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    exact: bool = False
    """Gradients are exchanged exactly, though the job permits more."""

    @property
    def label(self) -> str:
        """Description for people."""
        parts = [
            f"learning rate x {self.rate_factor:.3g}" if self.rate_factor != 1.0 else "",
            f"noise scale x {self.noise_multiplier:.3g}" if self.noise_multiplier != 1.0 else "",
            "exact gradients" if self.exact else "",
        ]
        return ", ".join(filter(None, parts)) or "nothing changed"


class ArmRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Results of the runs with an arm."""

    arm: ExploredArm
    num_runs: Annotated[int, Meta(ge=1)]
    num_stopped: Count
    """Runs that left the arm, since they were too far behind."""
    milestones: Annotated[tuple[Annotated[float, Meta(ge=0)], ...], Meta(max_length=MAX_MILESTONES)] = ()
    """Seconds of training, or joules, until the held-out error first fell below each of a row of levels, mean over
    runs; 0: never."""


class JobProfile(Message, frozen=True, kw_only=True, array_like=True):
    """Lessons of a job family's runs: the arbitrator writes them at the end of each, and reads them at the next start.

    Times are those of the newest run; the curve of the noise scale is a mean over runs.
    """

    family: Token
    run: Annotated[int, Meta(ge=1)]
    """Version: how many runs it was made of."""
    job: Token
    """The newest of them."""
    generation: Count
    ended_sequence: Count
    """Sequence in JOBS of the end of that run: an end behind it is not in the profile yet."""
    policy: Token
    """The policy that can read `memory`."""
    policy_version: Count
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    num_windows: Count
    """Decided in the newest run; 0 where the family was forgotten: the ends of its runs until then teach nothing."""
    local_batch_sizes: Sizes
    """The last ones."""
    split: Split = "fixed"
    exchange: Exchange = EXACT
    memory: Annotated[bytes, Meta(max_length=MAX_PROFILE_BYTES)] = b""
    """The policy's model of times and links: rates and fixed times by rank, saturation, communication."""
    noise: Annotated[tuple[NoisePoint, ...], Meta(max_length=MAX_CURVE_POINTS)] = ()
    """By samples seen, ascending."""

    arms: Annotated[tuple[ArmRecord, ...], Meta(max_length=MAX_ARMS)] = ()
    """Arms of runs that were compared by time, in the order of their first runs; milestones are in seconds."""
    energy_arms: Annotated[tuple[ArmRecord, ...], Meta(max_length=MAX_ARMS)] = ()
    """The same for runs that were compared by energy, in joules."""

    @classmethod
    def forgotten(cls, family: str, ended_sequence: int) -> "JobProfile":
        """The mark of a family that an operator forgot, so that no restart makes it again of runs that are over."""
        return cls(
            family=family,
            run=1,
            job="forgotten",
            generation=0,
            ended_sequence=ended_sequence,
            policy="forgotten",
            policy_version=0,
            world_size=1,
            num_windows=0,
            local_batch_sizes=(1,),
        )

    @property
    def is_forgotten(self) -> bool:
        """Whether the family was forgotten."""
        return self.num_windows == 0

    def arms_of(self, objective: Objective) -> tuple[ArmRecord, ...]:
        """The arms of the runs that were compared by an objective."""
        return self.energy_arms if objective == "energy" else self.arms

    @property
    def allocation(self) -> Allocation:
        """The last decision of the newest run."""
        return Allocation(self.local_batch_sizes, self.split, self.exchange)
