"""The interface of a policy, and what its author needs: observation, options, allocation, carry.

A policy is a pure function of the knowledge about one job at one closed window.
"""

import math
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from dynamix.schemas.features import GLOBAL_INDEX, RANK_INDEX
from dynamix.schemas.messages import MAX_STRETCH, Job
from dynamix.schemas.messages.allocation import EXACT, Allocation, Exchange, is_permitted
from dynamix.schemas.policies import Options

Array32 = npt.NDArray[np.float32]
Array64 = npt.NDArray[np.float64]
S = TypeVar("S", bound=msgspec.Struct)

MAX_REASON = 240
"""Characters of a reason that an action carries."""
MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions of a policy's own code: they halt one job, or cost one profile, and no other."""


def option(known: Options, job: Job, name: str) -> float:
    """The job's value of an option that takes numbers, or its default."""
    return float(job.policy_options.get(name, known[name].default))


def name_of(known: Options, job: Job, name: str) -> str:
    """The job's value of an option that takes names, or its default."""
    return str(job.policy_options.get(name, known[name].default))


def allocation_of(
    known: Options, job: Job, local_batch_sizes: tuple[int, ...], exchange: Exchange = EXACT
) -> Allocation:
    """The allocation of these sizes, divided further by the training processes if the job's options set it.

    Gradients are exchanged by `exchange` if the job permits it, else by all-reduces.
    """
    permitted = exchange if is_permitted(exchange, job.exchange, job.policy_options.values()) else EXACT
    return Allocation(local_batch_sizes, "tracking" if tracks(known, job) else "fixed", permitted)


def tracks(known: Options, job: Job) -> bool:
    """Whether the training processes of this job divide the global batch themselves."""
    return job.supports_tracking and option(known, job, "track") == 1


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


def digest_of(policy: Policy) -> bytes:
    """SHA-256 of the file that a policy was read from, which tells exactly what decided; empty for one that is code."""
    return getattr(policy, "digest", b"")


# --- what is observed, and what is remembered ------------------------------------------------------------------------


def column(obs_WF: Array32, name: str) -> Array64:
    """One feature of all ranks as float64, NaN where unknown."""
    return obs_WF[:, RANK_INDEX[name]].astype(np.float64)


def job_value(global_F: Array32, name: str) -> float:
    """One feature of the job, NaN when unknown."""
    return float(global_F[GLOBAL_INDEX[name]])


def steps_of(job: Job, global_F: Array32) -> int:
    """Optimizer steps of the window: the job's `window_steps`, or several times as many."""
    stretch = job_value(global_F, "stretch")
    return job.window_steps * (round(stretch) if 1 <= stretch <= MAX_STRETCH else 1)


def decided_sizes(obs_WF: Array32) -> tuple[int, ...]:
    """The arbitrator's own last decision, which every delta is relative to."""
    return tuple(obs_WF[:, RANK_INDEX["decided_local_batch_size"]].astype(np.int64).tolist())


class NoiseMemory(NamedTuple):
    """The last known B_noise, and for how many windows it has been masked since."""

    last_known: float = math.nan
    """NaN before the first: never measured is no reason to change anything."""
    num_masked: int = 0

    def observe(self, noise_scale: float) -> "NoiseMemory":
        """The memory after a window whose B_noise is NaN when masked."""
        if 0 < noise_scale < math.inf:
            return NoiseMemory(noise_scale)
        return self._replace(num_masked=self.num_masked + 1)

    @property
    def noise_scale(self) -> float:
        """B_noise in samples, NaN when never known.

        It is masked when the smoothed |G_true|^2 is not positive: the noise scale is then beyond what batches of this
        size can measure, so the last known one is taken as too small, by 10 % more per window, at most by a factor 4.
        """
        return self.last_known * min(4.0, 1.1 ** min(self.num_masked, 100))


_encoder = msgspec.msgpack.Encoder(enc_hook=lambda array: array.astype("<f4").tobytes())


def pack(state: msgspec.Struct) -> bytes:
    """The carry of a policy: its state as one msgspec struct, in msgpack; arrays of one dimension as float32."""
    return _encoder.encode(state)


def unpack(kind: type[S], carry: bytes) -> S:
    """The state in a carry; the initial one from an empty carry, or from anything that is not such a state."""
    try:
        return msgspec.msgpack.decode(carry, type=kind, dec_hook=_array)
    except msgspec.DecodeError:
        return kind()


def _array(_: type, packed: Any) -> Any:
    if not isinstance(packed, bytes) or len(packed) % 4:
        raise ValueError("not an array of float32")
    return np.frombuffer(packed, dtype="<f4").astype(np.float64)
