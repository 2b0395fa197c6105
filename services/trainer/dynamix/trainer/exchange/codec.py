"""Exchange codecs: what every codec gets, and what it must hold to.

A codec sums buckets of gradients over ranks in a way of its own, as a generator of collectives. All ranks run the same
codec on the same buckets in the same order, so whatever decides which collective comes next must be known to all: a
codec decides from what collectives brought, never from its own gradient alone.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Size, Tensor

from .collectives import Leg


class Member(NamedTuple):
    """A rank of the job, and who owns how much of a bucket."""

    rank: int
    world_size: int
    shares: tuple[float, ...] = ()
    """By rank, at least one above 0 and none below, in any unit; empty for the all-reduce, where nothing is owned.

    A codec that needs owners in any case takes equal ones where this is empty. Behind those of the ranks are those of
    the servers.
    """
    num_servers: int = 0
    """Gradient servers, which own parts of a bucket too, and have no gradient."""


class BucketPart(NamedTuple):
    """Where one parameter's gradient lies in a bucket."""

    key: str
    """The parameter's name, the same in every bucket and on every rank: DDP makes its buckets again after a step."""
    start: int
    stop: int
    shape: Size


class BucketView(NamedTuple):
    """A bucket of gradients on its way: this rank's addend, and in the end the sum over ranks."""

    number: int
    """Among the buckets of the model."""
    flat: Tensor
    """One dimension, contiguous, float64, float32, bfloat16 or float16; the codec writes the sum into it."""
    parts: tuple[BucketPart, ...]
    """In order; together they cover all of `flat`. The same tuple from step to step, until buckets are made again."""


class CodedSquares(NamedTuple):
    """Squared norms of some messages, summed."""

    wanted: float = 0.0
    """What was to be sent: the gradient and the residual."""
    sent: float = 0.0
    """What the messages say."""

    def and_more(self, others: "CodedSquares") -> "CodedSquares":
        """Both together."""
        return CodedSquares(self.wanted + others.wanted, self.sent + others.sent)

    def since(self, before: "CodedSquares") -> "CodedSquares":
        """What came after."""
        return CodedSquares(self.wanted - before.wanted, self.sent - before.sent)


@runtime_checkable
class ExchangeCodec(Protocol):
    """Sums the buckets of one model; it may keep what it learned of them."""

    name: str
    is_lossless: bool
    """Whether the sum is that of the all-reduce, to the rounding of another order of additions."""

    def reduce(self, bucket: BucketView, member: Member) -> Leg:
        """Make `bucket.flat` the sum over ranks, with the same bits on every rank; nothing else of it is changed.

        The generators of several buckets may be under way at a time, in different threads: their first collectives in
        the order of the buckets, and the later ones in the same order. One that fails, or is dropped, leaves the codec
        as it was before.
        """


@runtime_checkable
class ErrorFeedbackCodec(ExchangeCodec, Protocol):
    """A codec with loss, which keeps what it has not sent yet and sends it later: the residual."""

    def residuals(self) -> dict[str, Tensor]:
        """What the sums lack so far of this rank, flat, by the parameter's key. Views: copy what is to be kept."""

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Begin with these instead, copied: of a checkpoint, or of another codec of this kind."""

    def flush(self, bucket: BucketView, member: Member) -> Leg:
        """Do what `reduce` does, without loss: residuals travel with the gradient and are zero afterwards.

        For the last step before something else rules.
        """


@runtime_checkable
class MeasuredCodec(ExchangeCodec, Protocol):
    """A codec that knows how much of a gradient its messages hold."""

    def coded(self) -> CodedSquares:
        """The squares of some messages, from the first one on."""


@runtime_checkable
class RevocableCodec(ErrorFeedbackCodec, Protocol):
    """One whose residuals survive a step that the optimizer skips, as under a gradient scaler; for those that care."""

    def begin_step(self) -> None:
        """Note what the residuals are; the buckets of a step follow."""

    def undo_step(self) -> None:
        """Have the residuals that were noted: what was sent since is thrown away."""

    def scale_residuals(self, factor: float) -> None:
        """Multiply the residuals: gradients will be larger by this factor from now on."""
