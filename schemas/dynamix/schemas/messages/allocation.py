"""Types of the fields of messages, and the allocation: sizes, split and exchange of a job, as one value.

A policy makes it, an action carries it, the schedule adopts it from one step on, the checkpoint saves it. A new lever
is one field here (or in `Exchange`), with a default that changes nothing, and one owner in the trainer that carries it
out; `tests/trainer/test_allocation.py` names what was forgotten on the way.
"""

import math
import re
from collections.abc import Collection
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_RANKS = 1 << 17
"""Most ranks of one job: bounds the memory for a foreign message."""

MAX_GENERATION = 1_000_000
"""Most starts of one job; a higher number is forged, and would leave no room for the next start."""

MAX_SOCKETS = 4096
"""Sockets that one rank names; a full mesh of as many ranks is far beyond what such back ends are used for."""

MAX_CARRY_BYTES = 256 * 1024
"""A policy's whole memory between two windows (architecture: one action per window)."""

TOKEN_PATTERN = r"^[a-z0-9-]{1,63}\Z"  # noqa: S105 - a subject token, not a secret

Token = Annotated[str, Meta(pattern=TOKEN_PATTERN)]
"""One token of a subject: a job, a node, a service, a policy."""

OptionalToken = Annotated[str, Meta(pattern=r"^[a-z0-9-]{0,63}\Z")]
"""A token, or nothing."""

Count = Annotated[int, Meta(ge=0, lt=2**53)]
"""A count that a float64 holds exactly."""

Cookie = Annotated[int, Meta(ge=1)]
"""A socket's number in the kernel, never given twice while it runs."""

Seconds = Annotated[float, Meta(ge=0)]
Digest = Annotated[bytes, Meta(max_length=32)]
Carry = Annotated[bytes, Meta(max_length=MAX_CARRY_BYTES)]
Text = Annotated[str, Meta(max_length=1024)]

Sizes = Annotated[tuple[Count, ...], Meta(max_length=MAX_RANKS)]
"""Local batch sizes in samples, one per rank, in rank order."""

Shares = Annotated[tuple[float, ...], Meta(max_length=MAX_RANKS)]
"""Share of each gradient bucket that a rank sums up for all, by rank, up to a common factor."""

GlobalBatch = Literal["fixed", "adaptive"]
"""`fixed`: the sum of the local batch sizes stays as in the script; `adaptive`: a policy may change it."""

ExchangePermission = Literal["exact", "lossy", "local"]
"""Permitted changes of a job's gradients; each includes those before it. `exact`: every gradient arrives bit for bit;
`lossy`: rounded, with the error added to the next one; `local`: ranks may make several steps between averagings."""

EXCHANGE_CODECS = ("none", "rows", "bf16", "fp16", "int8")
"""Codecs of the core; further ones are extensions (entry points of the group `dynamix.codecs`)."""

LOSSY_CODECS = frozenset({"bf16", "fp16", "int8"})
"""With error feedback: what a step loses is added to the next one."""

ROUTES = ("all-reduce", "shares")
"""`shares`: each rank sums up its share of a bucket and sends it to all others."""

SERVERS = "servers"
"""The route of jobs that were started with gradient servers: they and the ranks sum up shares. Nothing decides it."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The exchange of gradients between the ranks; the default is exact synchronous training."""

    every: Annotated[int, Meta(ge=1)] = 1
    """Sync period: optimizer steps between two averagings; 1 averages the gradient of every step."""
    codec: Token = "none"
    """Name of the gradient codec; `none` sends gradients as they are."""
    route: Token = "all-reduce"
    shares: Shares = ()
    """Share of a bucket that each rank sums up under the route `shares`; equal shares where there are none. Under the
    route `servers` those of the servers follow those of the ranks."""
    outer_rate: float = 1.0
    """Step towards the mean after local steps, over the distance to it; 1 is the mean itself. 0: with momentum m it is
    (1 - m) / (1 - a), as far as the movements of successive rounds agree."""
    outer_momentum: float = 0.0
    """Nesterov momentum of the outer steps, from round to round; 0 is none."""

    def __post_init__(self) -> None:
        """Raise ValueError for what messages cannot hold, shares that divide nothing, outer steps that lead nowhere."""
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"every={self.every!r}: a whole number of optimizer steps, at least 1")
        for name, value in (("codec", self.codec), ("route", self.route)):
            if not (isinstance(value, str) and re.search(TOKEN_PATTERN, value)):
                raise ValueError(f"{name}={value!r}: a name of 1 to 63 of the characters a-z, 0-9 and '-'")
        are_numbers = all(isinstance(share, int | float) and 0 <= share < math.inf for share in self.shares)
        if self.shares and not (are_numbers and sum(self.shares) > 0):
            raise ValueError(f"shares {list(self.shares)[:16]}: each is 0 or more, and one at least above 0")
        is_outer = 0 <= self.outer_rate < math.inf and 0 <= self.outer_momentum < 1
        if not is_outer or self.outer_rate == self.outer_momentum == 0:
            raise ValueError(
                f"outer_rate={self.outer_rate:g}, outer_momentum={self.outer_momentum:g}: the momentum is from 0 to "
                "less than 1, the rate above 0, or 0 with momentum"
            )
        if self.has_outer_step and self.every == 1:
            raise ValueError(
                f"outer_rate={self.outer_rate:g} and outer_momentum={self.outer_momentum:g} are of rounds of local "
                "steps: use every=2 or more with them"
            )

    @property
    def has_outer_step(self) -> bool:
        """Whether a round of local steps ends with an outer step instead of the mean."""
        return self.outer_rate != 1.0 or self.outer_momentum != 0.0

    @property
    def label(self) -> str:
        """The exchange in words, for people."""
        if self == EXACT:
            return "exact"
        period = "" if self.every == 1 else f" every {self.every} steps"
        outer = f", outer rate {self.outer_rate:g} and momentum {self.outer_momentum:g}" if self.has_outer_step else ""
        return f"{self.codec} over {self.route}{period}{outer}"


EXACT = Exchange()
"""Every gradient, as it is, by all-reduce."""


def is_permitted(exchange: Exchange, permission: ExchangePermission, named: Collection[object] = ()) -> bool:
    """Whether a job with this permission may use an exchange: a codec and a route of the core.

    `named` are the values of the job's policy options: a codec of an extension is permitted where one of them names it,
    since `attach` has checked it against the permission.
    """
    if exchange.codec not in (*EXCHANGE_CODECS, *named) or exchange.route not in ROUTES:
        return False
    return permission == "local" or not (
        exchange.every > 1 or (exchange.codec in LOSSY_CODECS and permission == "exact")
    )


RateFactor = Annotated[float, Meta(ge=0.1, le=10)]
"""Bounds of a decision's factor on a learning rate."""

Explored = Literal["learning_rate"]
"""Choice that runs of a job's family may explore: a factor on its learning rate."""


Split = Literal["fixed", "tracking", "traces"]
"""`fixed`: sizes as they were decided; `tracking`: their sum was, and the ranks divide it themselves; `traces`: nothing
was, sum and division are those of the traces that the agents of all nodes leave."""


class Allocation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Samples of each rank per step, who may change them, and the gradient exchange."""

    local_batch_sizes: Sizes
    split: Split = "fixed"
    exchange: Exchange = EXACT
    rate_factor: RateFactor = 1.0
    """Factor on the learning rate of the script, in jobs that let recurring runs explore it."""

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return sum(self.local_batch_sizes)

    def with_sizes(self, local_batch_sizes: tuple[int, ...]) -> "Allocation":
        """The same allocation with other sizes."""
        return msgspec.structs.replace(self, local_batch_sizes=local_batch_sizes)
