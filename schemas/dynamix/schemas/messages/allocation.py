"""The allocation: how a job goes on, as one value.

A policy makes it, an action carries it, the schedule adopts it from one step on, the checkpoint saves it. A new lever
is one field here (or in `Exchange`), with a default that changes nothing, and one owner in the trainer that carries it
out; `tests/trainer/test_allocation.py` says what was forgotten on the way.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from .fields import MAX_RANKS, Count, Token
from .policies import Split

Sizes = Annotated[tuple[Count, ...], Meta(max_length=MAX_RANKS)]
"""Local batch sizes in samples, one per rank, in rank order."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """How gradients travel between the ranks; the default is exact synchronous training."""

    every: Annotated[int, Meta(ge=1)] = 1
    """Sync period: optimizer steps between two averagings; 1 averages the gradient of every step."""
    codec: Token = "none"
    """Name of the gradient codec; `none` sends gradients as they are."""
    route: Token = "all-reduce"


EXACT = Exchange()
"""Every gradient, as it is, by all-reduce; the trainer refuses any other that is not the job's own codec."""


class Allocation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Who trains on how many samples, who may change that, and how gradients travel."""

    local_batch_sizes: Sizes
    split: Split = "fixed"
    """`fixed`: exactly these sizes; `tracking`: their sum, divided by the training processes themselves."""
    exchange: Exchange = EXACT

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return sum(self.local_batch_sizes)

    def with_sizes(self, local_batch_sizes: tuple[int, ...]) -> "Allocation":
        """The same allocation with other sizes."""
        return msgspec.structs.replace(self, local_batch_sizes=local_batch_sizes)
