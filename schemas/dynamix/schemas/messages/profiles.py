"""Lessons of the runs of a job family, for the next one."""

from typing import Annotated

import msgspec
from msgspec import Meta

from .allocation import EXACT, Allocation, Exchange, Objective, RateFactor, Sizes
from .fields import MAX_RANKS, Count, Message, Token
from .policies import Split

MAX_PROFILE_BYTES = 96 * 1024
"""A profile is in the first action of a job that begins with it, beside the carry."""

MAX_CURVE_POINTS = 64
MAX_MILESTONES = 128
MAX_ARMS = 8


class NoisePoint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The gradient noise scale at one point of a training."""

    num_samples: Annotated[float, Meta(ge=0)]
    """Samples that the run had seen."""
    noise_scale: Annotated[float, Meta(gt=0)]
    """B_noise in samples: geometric mean over the windows around it, and over runs."""


class ExploredArm(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One choice of what cannot be known within a run; the default is a run without exploration."""

    rate_factor: RateFactor = 1.0
    noise_multiplier: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    exact: bool = False
    """Gradients travel exactly, though the job permits more."""

    @property
    def label(self) -> str:
        """In words, for people."""
        parts = [
            f"learning rate x {self.rate_factor:.3g}" if self.rate_factor != 1.0 else "",
            f"noise scale x {self.noise_multiplier:.3g}" if self.noise_multiplier != 1.0 else "",
            "exact gradients" if self.exact else "",
        ]
        return ", ".join(filter(None, parts)) or "nothing changed"


class ArmRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How runs with an arm went."""

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
    """What the policy knows of times and links: rates and fixed times by rank, saturation, communication."""
    noise: Annotated[tuple[NoisePoint, ...], Meta(max_length=MAX_CURVE_POINTS)] = ()
    """By samples seen, ascending."""

    arms: Annotated[tuple[ArmRecord, ...], Meta(max_length=MAX_ARMS)] = ()
    """What runs tried out that were compared by time, in the order of their first runs; milestones are in seconds."""
    energy_arms: Annotated[tuple[ArmRecord, ...], Meta(max_length=MAX_ARMS)] = ()
    """Likewise of runs that were compared by energy, in joules. Not encoded while there are none."""

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
        """Whether nothing is known of the family."""
        return self.num_windows == 0

    def arms_of(self, objective: Objective) -> tuple[ArmRecord, ...]:
        """The arms of the runs that were compared by an objective."""
        return self.energy_arms if objective == "energy" else self.arms

    @property
    def allocation(self) -> Allocation:
        """The last decision of the newest run."""
        return Allocation(self.local_batch_sizes, self.split, self.exchange)
