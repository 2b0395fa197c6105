"""The interface of a policy: a pure function of the knowledge about one job at one closed window."""

from typing import NamedTuple, Protocol, runtime_checkable

from dynamix.arbitrator.policies.model.observation import Array32
from dynamix.schemas.messages import ArmRecord, Job, JobProfile, NoisePoint
from dynamix.schemas.messages.allocation import Allocation
from dynamix.schemas.policies import Options

MAX_REASON = 240
"""Characters of a reason that an action carries."""
MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions of a policy's own code: they halt one job, or cost one profile, and no other."""


class Decision(NamedTuple):
    """A policy's decision for the next windows, and its state."""

    allocation: Allocation
    """The sizes that the job continues with; the fold clamps its sizes to the job's bounds."""
    carry: bytes = b""
    """The policy's whole memory, at most 256 KB: handed back at the next window, also after a restart."""
    logprobs: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None
    reason: str = ""
    """Reason of the decision, a short sentence with its numbers, for people. The fold keeps `MAX_REASON` of it."""
    note: str = ""
    """Message for the arbitrator's log, once: a sentence for people."""


class Policy(Protocol):
    """Decides allocations. The same arguments give the same decision: no clock, no global random state."""

    @property
    def name(self) -> str:
        """The name that a job's specification chooses it by."""

    @property
    def version(self) -> int:
        """Fixed within a generation; 1 for policies that do not learn."""

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:
        """Decide how a job continues after `window`.

        Args:
            job: the specification: bounds, initial sizes, options.
            window: index of the closed window.
            obs_WF: ranks x `schemas.features.RANK_FEATURES`; NaN where unknown; `age_windows` > 0 marks a stale row.
            global_F: `schemas.features.GLOBAL_FEATURES`; NaN where unknown.
            carry: the carry of the previous decision, empty at the start of a generation.
        """


class NamedPolicy(Policy, Protocol):
    """A policy that a job's specification can name."""

    @property
    def options(self) -> Options:
        """The options of `Job.policy_options` that it understands."""


class Knowledge(NamedTuple):
    """Lessons of a run, for the next one of its family."""

    memory: bytes
    """Times and links, in the policy's own bytes; empty when nothing was measured."""
    noise: tuple[NoisePoint, ...] = ()
    """The noise scale by samples seen: of this run and, where it began with a profile, of those before."""
    tried: ArmRecord | None = None
    """Result of this run and its trial; `None` without exploration or without a result."""
    is_changed: bool = False
    """Whether the cluster is another than that of the profile that it began with, as its first windows showed."""


@runtime_checkable
class RecurringPolicy(Policy, Protocol):
    """A policy that can start from what earlier runs of a job's family learned."""

    def begin(self, job: Job, profile: JobProfile) -> bytes:
        """The carry of a generation that begins with a profile.

        It checks the profile against the first windows; of what does not fit the job's shape, nothing is in the carry.
        """

    def knowledge(self, job: Job, carry: bytes) -> Knowledge:
        """Lessons of the run behind the last decision's carry."""


def digest_of(policy: Policy) -> bytes:
    """SHA-256 of the file that a policy was read from, which tells exactly what decided; empty for one that is code."""
    digest: bytes = getattr(policy, "digest", b"")
    return digest
